/* The life of a producer's blocks: publish, hold, decode, take, release, cancel, reap, reuse, and the endpoint's end.
 *
 * Each option of a process is one atomic operation of the real code (src/ofs_block.c, src/_core.pyx, janitor.py); `at`
 * says which comes next. What a process does on its own belongs to the step before. Processes may die before any step.
 */
#ifndef BLOCKS
#define BLOCKS 1          /* descriptors, each with its bytes: 1 or 2 */
#endif
#ifndef GENERATION_BITS
#define GENERATION_BITS 1
#endif
#ifndef PUBLICATIONS
#define PUBLICATIONS 3    /* up to 6; more than there are generations: the last one has the first one's again */
#endif
#ifndef TAKERS
#define TAKERS 1          /* n of each publication: 1 to 3 */
#endif
#ifndef CONSUMERS
#define CONSUMERS 2       /* processes: 1 to 3 */
#endif
#ifndef OWN_SLOTS
#define OWN_SLOTS 2       /* reader slots of one process each: 0 to 2; one more is shared by late-comers */
#endif
#ifndef GETS
#define GETS 1            /* of each consuming process */
#endif
#ifndef NESTED
#define NESTED 0          /* 1: a get may run inside another one of the same process */
#endif
#ifndef CANCELS
#define CANCELS 1         /* by somebody else */
#endif
#ifndef DEATHS
#define DEATHS 1          /* of all processes together; a new process takes a dead consumer's or heir's place */
#endif
#ifndef ENDS
#define ENDS 0            /* 1: the producer closes, or dies, whatever the consumers are doing; an heir tidies up */
#endif

/* A block's word: generation, pending, holders. */
#define SLOTS (OWN_SLOTS + 1)
#define SHARED_SLOT OWN_SLOTS
#define NO_SLOT SLOTS
#define BIT(slot) (1 << (slot))
#define HOLDERS 7
#define ONE_TAKE 8
#define PENDING 24
#define IN_USE (PENDING | HOLDERS)
#define ONE_GENERATION 32
#define GENERATIONS (((1 << GENERATION_BITS) - 1) * ONE_GENERATION)

/* Shared memory. */
byte words[BLOCKS];       /* ofs_block.word */
byte sequences[BLOCKS];   /* ofs_block.sequence */
byte contents[BLOCKS];    /* all other fields: of which publication they are */
byte bytes[BLOCKS];       /* the payload: of which publication it is, or one of: */
#define TORN 99           /* in the middle of being written */
#define GIVEN_BACK 98     /* its memory was given back to the system */
byte readers;             /* ofs_control.readers */
bit unlinked, removed;    /* the data segments, and the control segment, have no names any more */

/* The kernel: which process (its number + 1) has the lock of each slot, and the owner's lock. */
byte lock[SLOTS];
byte owner;
#define PRODUCER CONSUMERS
#define HEIR (CONSUMERS + 1)
#define CANCELLER (CONSUMERS + 2)

/* Inbox.holds, the leases of each process on each block. Global, for it says who are the live holders. */
byte holds[CONSUMERS * BLOCKS];
#define HOLDS(process, block) holds[(process) * BLOCKS + (block)]
#define LOOKED_AT(block) (HOLDS(0, block) || HOLDS(1 % CONSUMERS, block) || HOLDS(2 % CONSUMERS, block))

/* What nobody in the real system knows, to judge by. */
byte published;                  /* the last publication; what put returned for it is known */
byte block_of[PUBLICATIONS + 1];
byte current[BLOCKS];            /* the publication that the word is about */
byte left[PUBLICATIONS + 1];     /* its takes that are left: neither used nor cancelled */
byte busy;
byte deaths;                     /* from any number on: that it could die must not hide that a process is stuck */

/* Without the mark nobody would clear the bit when its process dies. */
#define MARKED(word) assert(((word) & HOLDERS & ~readers) == 0)
/* The one stale handle that gets through: docs/protocol.md, "Stale handles". */
#define CAME_ROUND(publications) ((publications) % (1 << GENERATION_BITS) == 0)

mtype = { Consumer, Canceller, Producer, Heir };
mtype = { IDLE, INNER, LOCK, MARK, CLEAR_LOOK, CLEAR, HOLD_LOOK, HOLD_SEQUENCE, HOLD_SWAP, HOLD_AGAIN, HOLD_BACK, READ,
          DECODE, TAKE_LOOK, TAKE_SWAP, VIEW, RELEASE, UNMARK, UNLOCK, OUT };
mtype = { RESERVE, SWEEP, WAIT, WRITE, WRITTEN, PUBLISH_LOOK, PUBLISH_SEQUENCE, PUBLISH_CONTENT, PUBLISH_WORD };
mtype = { CANCEL_LOOK, CANCEL_SEQUENCE, CANCEL_SWAP, REAP_LOOK, REAP_LOCK, REAP_CLEAR_LOOK, REAP_CLEAR, REAP_UNMARK,
          REAP_UNLOCK, CANCEL_ALL, CANCELLED, KEEP_OR_NOT, GIVE_BACK, UNLINK_DATA, UNLINK, DONE, OWN, SEE, AGE };

#define STEP(label) d_step { at == label -> SHOW
#define SHOW printf("%e %d: %e of %d  (publication %d: generation %d, pending %d, holders %d; bytes %d; marks %d)\n", \
    WHO, me, at, sequence, sequences[0], words[0] / ONE_GENERATION, (words[0] & PENDING) / ONE_TAKE, \
    words[0] & HOLDERS, bytes[0], readers);

#define FREE(block) ((words[block] & IN_USE) == 0)
#define NEXT_BLOCK(again, next) i++; if :: i < BLOCKS -> at = again :: else -> i = 0; at = next fi
#define NEXT_SLOT(next) slot++; if :: slot < SLOTS -> at = REAP_LOOK :: else -> slot = 0; at = next fi

/* ofs_reader_clear, then `next`. */
#define CLEAR_STEPS(look, clear, next) \
    :: STEP(look) if :: words[i] & BIT(slot) -> at = clear :: else -> NEXT_BLOCK(look, next) fi } \
    :: STEP(clear) words[i] = words[i] & ~BIT(slot); NEXT_BLOCK(look, next) }

/* Outbox.reap and Inbox.reap: _clear_reader for each marked slot, then `next`. */
#define REAP_STEPS(next) \
    :: STEP(REAP_LOOK) if :: readers & BIT(slot) -> at = REAP_LOCK :: else -> NEXT_SLOT(next) fi } \
    :: STEP(REAP_LOCK) \
        if :: lock[slot] == 0 -> lock[slot] = me + 1; at = REAP_CLEAR_LOOK :: else -> NEXT_SLOT(next) fi } \
    CLEAR_STEPS(REAP_CLEAR_LOOK, REAP_CLEAR, REAP_UNMARK) \
    :: STEP(REAP_UNMARK) readers = readers & ~BIT(slot); MARKED(words[0]); at = REAP_UNLOCK } \
    :: STEP(REAP_UNLOCK) lock[slot] = 0; NEXT_SLOT(next) }

/* ofs_block_cancel(block, sequence), then `next`. */
#define CANCEL_STEPS(next) \
    :: STEP(CANCEL_LOOK) word = words[block]; at = CANCEL_SEQUENCE } \
    :: STEP(CANCEL_SEQUENCE) \
        if :: (word & PENDING) == 0 || sequences[block] != sequence -> word = 0; at = next \
           :: else -> at = CANCEL_SWAP fi } \
    :: STEP(CANCEL_SWAP) \
        if :: words[block] == word -> words[block] = word & ~PENDING; word = 0; at = next; \
              assert(current[block] == sequence || CAME_ROUND(current[block] - sequence)); \
              left[current[block]] = 0 \
           :: else -> word = words[block]; at = CANCEL_SEQUENCE fi }

/* Producer._tear_down and janitor.sweep, from CANCEL_ALL to OUT. */
#define TEAR_DOWN_STEPS(after_cancel) \
    :: STEP(CANCEL_ALL) \
        if :: words[block] & PENDING -> sequence = sequences[block]; at = CANCEL_LOOK :: else -> at = CANCELLED fi } \
    CANCEL_STEPS(CANCELLED) \
    :: d_step { at == CANCELLED -> sequence = 0; block++; \
        if :: block < BLOCKS -> at = CANCEL_ALL :: else -> block = 0; at = after_cancel fi } \
    :: STEP(KEEP_OR_NOT) kept[i] = !FREE(i); NEXT_BLOCK(KEEP_OR_NOT, GIVE_BACK) } \
    :: STEP(GIVE_BACK) \
        if :: !kept[i] -> assert(!LOOKED_AT(i)); bytes[i] = GIVEN_BACK :: else fi; \
        NEXT_BLOCK(GIVE_BACK, UNLINK_DATA) } \
    :: STEP(UNLINK_DATA) unlinked = 1; at = UNLINK } \
    :: STEP(UNLINK) removed = 1; at = OUT }

#define DROP_LOCKS slot = 0; \
    do :: slot < SLOTS -> lock[slot] = (lock[slot] == me + 1 -> 0 : lock[slot]); slot++ :: else -> break od

#define EACH_PUBLICATION(option) option(1) option(2) option(3) option(4) option(5) option(6)

#define WHO Consumer
#define GET(s) :: d_step { (at == INNER || (at == IDLE && outer_at == 0)) && gets && s <= published -> \
        gets--; sequence = s; block = block_of[s]; at = (slot == NO_SLOT -> LOCK : HOLD_LOOK) }
#define LOCKED lock[i] = me + 1; slot = i; i = 0; at = MARK
/* A late-comer gives the shared slot back after each get, unless that was inside another one. */
#define GET_ENDS block = 0; sequence = 0; word = 0; at = (slot == SHARED_SLOT && outer_at == 0 -> UNMARK : IDLE)

proctype consumer(byte me)
{
    mtype at = IDLE, outer_at;
    byte slot = NO_SLOT, block, sequence, word, i, gets = GETS, outer_block, outer_sequence;
    do
    EACH_PUBLICATION(GET)
    :: d_step { at == IDLE && outer_at == 0 && (gets == 0 || slot == NO_SLOT) ->
        gets = 0; at = (slot == NO_SLOT -> OUT : UNMARK) }

    /* Inbox.claim_slot */
    :: d_step { at == LOCK && i < OWN_SLOTS -> SHOW if :: lock[i] == 0 -> LOCKED :: else -> i++ fi }
    :: d_step { at == LOCK && i == SHARED_SLOT && (lock[i] == 0 || lock[i] == me + 1) -> SHOW LOCKED }
    :: STEP(MARK) readers = readers | BIT(slot); at = CLEAR_LOOK }
    CLEAR_STEPS(CLEAR_LOOK, CLEAR, HOLD_LOOK)

    /* ofs_block_hold */
    :: STEP(HOLD_LOOK) word = words[block]; at = HOLD_SEQUENCE }
    :: STEP(HOLD_SEQUENCE)
        if :: (word & PENDING) == 0 || sequences[block] != sequence -> assert(left[sequence] == 0); GET_ENDS
           :: else -> at = HOLD_SWAP fi }
    :: STEP(HOLD_SWAP)
        if :: words[block] == word -> words[block] = word | BIT(slot); MARKED(words[block]); at = HOLD_AGAIN
           :: else -> word = words[block]; at = HOLD_SEQUENCE fi }
    :: STEP(HOLD_AGAIN) word = 0;
        if :: sequences[block] == sequence -> HOLDS(me, block)++; at = READ :: else -> at = HOLD_BACK fi }
    :: STEP(HOLD_BACK) assert(left[sequence] == 0); words[block] = words[block] & ~BIT(slot); GET_ENDS }
    :: STEP(READ) assert(contents[block] == sequence); at = DECODE }
#if ENDS
    /* Inbox.data_segment, not mapped yet: no name to open */
    :: d_step { at == READ && unlinked -> SHOW assert(left[sequence] == 0); at = RELEASE }
#endif

    /* decode, ofs_block_take, looking at views, Inbox.drop */
    :: STEP(DECODE) assert(bytes[block] == sequence); at = TAKE_LOOK }
    :: STEP(TAKE_LOOK) word = words[block]; at = ((word & PENDING) -> TAKE_SWAP : RELEASE) }
    :: STEP(TAKE_SWAP)
        if :: words[block] == word -> words[block] = word - ONE_TAKE; word = 0; at = VIEW;
              assert(current[block] == sequence && left[sequence] > 0); left[sequence]--
           :: else -> word = words[block]; at = ((word & PENDING) -> TAKE_SWAP : RELEASE) fi }
    :: STEP(VIEW) assert(bytes[block] == sequence); at = RELEASE }
    :: STEP(RELEASE) HOLDS(me, block)--;
        if :: HOLDS(me, block) == 0 -> words[block] = words[block] & ~BIT(slot) :: else fi; GET_ENDS }

    /* Inbox.leave_shared_slot, the Inbox's end */
    :: STEP(UNMARK) readers = readers & ~BIT(slot); MARKED(words[0]); at = UNLOCK }
    :: STEP(UNLOCK) lock[slot] = 0; slot = NO_SLOT; at = IDLE }

#if NESTED
    /* another get begins while this one decodes or has a view, and ends before it goes on */
    :: d_step { (at == DECODE || (at == VIEW && slot != SHARED_SLOT)) && outer_at == 0 && gets -> SHOW
        outer_at = at; outer_block = block; outer_sequence = sequence; at = INNER }
    :: d_step { at == IDLE && outer_at != 0 -> SHOW
        at = outer_at; block = outer_block; sequence = outer_sequence;
        outer_at = 0; outer_block = 0; outer_sequence = 0 }
#endif
    :: d_step { slot != NO_SLOT && deaths < DEATHS -> deaths++; printf("Consumer %d dies before %e\n", me, at);
        DROP_LOCKS; slot = NO_SLOT; i = 0;
        do :: i < BLOCKS -> assert((words[i] & PENDING) == left[current[i]] * ONE_TAKE); HOLDS(me, i) = 0; i++
           :: else -> break od; i = 0;
        word = 0; block = 0; sequence = 0; outer_at = 0; outer_block = 0; outer_sequence = 0; gets = GETS; at = IDLE }
    :: atomic { at == OUT -> busy--; break }
    od
}
#undef WHO

#define WHO Canceller
#define CANCEL(s) :: d_step { at == IDLE && cancels && s <= published -> \
        cancels--; sequence = s; block = block_of[s]; at = CANCEL_LOOK }
proctype canceller(byte me)
{
    mtype at = IDLE;
    byte block, sequence, word, cancels = CANCELS;
    do
    EACH_PUBLICATION(CANCEL)
    CANCEL_STEPS(IDLE)
    :: atomic { at == IDLE -> cancels = 0; block = 0; sequence = 0; busy--; break }
    od
}
#undef WHO

#define WHO Producer
#define DEAD_READER(slot) ((readers & BIT(slot)) && lock[slot] == 0)
#define DEAD_READERS (DEAD_READER(0) || DEAD_READER(1 % SLOTS) || DEAD_READER(2 % SLOTS))
#if ENDS
#define AFTER_REAP KEEP_OR_NOT
#else
#define AFTER_REAP DONE
#endif
proctype producer(byte me)
{
    mtype at = RESERVE;
    byte block, sequence, word, i, slot;
    bit live[BLOCKS], kept[BLOCKS], closing;    /* live: reserved or published, and not taken back yet */
    do
    /* Outbox.reserve; no room: Outbox.reap, then waiting */
    :: d_step { at == RESERVE && sequence < PUBLICATIONS ->
        if :: !live[0] -> block = 0; at = WRITE
           :: else -> if :: !live[BLOCKS - 1] -> block = BLOCKS - 1; at = WRITE :: else -> at = SWEEP fi fi;
        if :: at == WRITE -> live[block] = 1; sequence++; block_of[sequence] = block :: else fi }
    :: STEP(SWEEP) live[i] = !FREE(i); NEXT_BLOCK(SWEEP, (live[0] && live[BLOCKS - 1] -> REAP_LOOK : RESERVE)) }
    :: d_step { at == WAIT && (FREE(0) || FREE(BLOCKS - 1) || DEAD_READERS) -> at = SWEEP }
    REAP_STEPS((closing -> AFTER_REAP : WAIT))

    /* pack_into, ofs_block_publish */
    :: STEP(WRITE) assert(!LOOKED_AT(block)); bytes[block] = TORN; at = WRITTEN }
    :: STEP(WRITTEN) assert(!LOOKED_AT(block)); bytes[block] = sequence; at = PUBLISH_LOOK }
    :: STEP(PUBLISH_LOOK) word = (words[block] + ONE_GENERATION) & GENERATIONS; at = PUBLISH_SEQUENCE }
    :: STEP(PUBLISH_SEQUENCE) sequences[block] = sequence; at = PUBLISH_CONTENT }
    :: STEP(PUBLISH_CONTENT) contents[block] = sequence; at = PUBLISH_WORD }
    :: STEP(PUBLISH_WORD) assert(FREE(block) && left[current[block]] == 0);
        words[block] = word | TAKERS * ONE_TAKE; word = 0;
        current[block] = sequence; published = sequence; left[sequence] = TAKERS; block = 0; at = RESERVE }

#if ENDS
    /* Producer.close at any time, also while it waits for room; death */
    :: d_step { at == RESERVE || at == WAIT -> sequence = 0; block = 0; closing = 1; at = CANCEL_ALL }
    TEAR_DOWN_STEPS(REAP_LOOK)
    :: d_step { at != OUT && deaths < DEATHS -> deaths++; printf("Producer %d dies before %e\n", me, at);
        DROP_LOCKS; at = OUT }
    :: atomic { at == OUT -> owner = 0; break }
#else
    /* All others have gone: what is untaken goes, and one reap frees the rest. */
    :: d_step { ((at == RESERVE && sequence == PUBLICATIONS) || at == WAIT) && busy == 0 ->
        words[0] = words[0] & ~PENDING; words[BLOCKS - 1] = words[BLOCKS - 1] & ~PENDING; closing = 1; at = REAP_LOOK }
    :: atomic { at == DONE -> assert(readers == 0 && FREE(0) && FREE(BLOCKS - 1)); break }
#endif
    od
}
#undef WHO

#if ENDS
#define WHO Heir
proctype heir(byte me)
{
    mtype at = OWN;
    byte block, sequence, word, i, slot, visits = 2;
    bit kept[BLOCKS], waiting;
    do
    :: d_step { at == OWN && owner == 0 && !removed -> SHOW owner = me + 1; at = REAP_LOOK }
    REAP_STEPS(SEE)
    :: STEP(SEE) waiting = waiting || (words[i] & PENDING); NEXT_BLOCK(SEE, (waiting -> AGE : CANCEL_ALL)) }
    /* not orphan_ttl_s yet: look again some time, or longer than that */
    :: d_step { at == AGE && visits > 1 -> SHOW waiting = 0; visits--; owner = 0; at = OWN }
    :: STEP(AGE) waiting = 0; at = CANCEL_ALL }
    TEAR_DOWN_STEPS(KEEP_OR_NOT)
    :: d_step { at != OWN && at != OUT && deaths < DEATHS -> deaths++; printf("Heir %d dies before %e\n", me, at);
        DROP_LOCKS; owner = 0; block = 0; sequence = 0; word = 0; i = 0; slot = 0; waiting = 0; at = OWN }
    :: atomic { at == OUT || (at == OWN && removed) -> owner = (owner == me + 1 -> 0 : owner); break }
    od
}
#undef WHO
#endif

init {
    atomic {
        select (deaths : 0 .. DEATHS);
        owner = PRODUCER + 1; busy = CONSUMERS + (CANCELS > 0);
        run producer(PRODUCER);
        run consumer(0);
        if :: CONSUMERS > 1 -> run consumer(1) :: else fi;
        if :: CONSUMERS > 2 -> run consumer(2) :: else fi;
#if ENDS
        run heir(HEIR);
#endif
        if :: CANCELS > 0 -> run canceller(CANCELLER) :: else fi
    }
    _nr_pr == 1;
    assert(removed == ENDS)
}
