/* Names: a put replaces what has its key, gets and cleanup find by key; several producers (src/ofs_keys.c,
 * _put_shared and _get_by_key of connectors/shared_memory.py).
 *
 * Slots, bits and generations are in block.pml: here a hold and its take are one step, and a block whose take is used
 * is free. All keys have the same place in the table but different tags, so that they are in each other's way.
 */
#ifndef PRODUCERS
#define PRODUCERS 1       /* 1 or 2 */
#endif
#ifndef BLOCKS
#define BLOCKS 2          /* of each producer */
#endif
#ifndef PLACES
#define PLACES 4          /* of each producer's key table: twice the blocks */
#endif
#ifndef PUTS
#define PUTS 3            /* of each producer */
#endif
#ifndef KEYS
#define KEYS 2            /* 1 or 2 */
#endif
#ifndef GETS
#define GETS 1
#endif
#ifndef WAITS
#define WAITS 0           /* 1: a get waits for the bell, until nothing more can come */
#endif
#ifndef CLEANUPS
#define CLEANUPS 0        /* of one key, by somebody else */
#endif
#ifndef DEATHS
#define DEATHS 0          /* of producers */
#endif
#ifndef STRICT
#define STRICT 0          /* 1: a get finds something if all the time there was something */
#endif
#ifndef IN_ORDER
#define IN_ORDER 0        /* 1: no payload is handed over after a newer one of its key */
#endif

/* Shared memory. A publication is known by its stamp, which stands for its sequence number as well. */
byte words[PRODUCERS * BLOCKS];      /* 2 * publication + pending */
byte sequences[PRODUCERS * BLOCKS];
byte keys[PRODUCERS * BLOCKS];
byte stamps[PRODUCERS * BLOCKS];
byte table[PRODUCERS * PLACES];
byte stamp;                          /* ofs_directory.stamp */
byte bell;
#define VACANT 0
#define DELETED 1
#define ENTRY(key, index) (2 + (index) + 8 * (key))
#define TAG(entry) (((entry) - 2) / 8)
#define INDEX(entry) (((entry) - 2) % 8)
#define BLOCK(producer, index) ((producer) * BLOCKS + (index))
#define PLACE(producer, offset) table[(producer) * PLACES + (offset) % PLACES]

/* What nobody in the real system knows, to judge by. */
#define STAMPS (PRODUCERS * PUTS)
byte key_of[STAMPS + 1];
bit there[STAMPS + 1];               /* can be found and taken */
byte newest[KEYS + 1];               /* of each key, of those */
bit gap[KEYS + 1];                   /* since a get began, nothing was there at some time */
byte taken[KEYS + 1];                /* of each key, the newest that was handed over */
byte deaths, putting;

mtype = { Producer, Getter, Cleaner };
mtype = { RESERVE, REMOVE, EMPTY, DRAW, PUT_SEQUENCE, PUT_KEY, PUT_STAMP, PUT_WORD, INSERT, REPLACE, REPLACED, NEWEST,
          RING, SCAN, SEQUENCE, IS_PENDING, KEY, STAMP, SEQUENCE_AGAIN, NEXT, CANCEL_LOOK, CANCEL_SEQUENCE, CANCEL_SWAP,
          LISTEN, FOUND, OLDER, TAKE, ABSENT, ASLEEP, IDLE, OUT };

#define STEP(label) d_step { at == label -> SHOW
#define SHOW printf("%e %d: %e key %d  (block %d: publication %d, pending %d, key %d; table %d %d %d; bell %d)\n", \
    WHO, me, at, key, block, sequences[block], words[block] & 1, keys[block], table[0], table[1 % PLACES], \
    table[2 % PLACES], bell);

#define GONE(s) there[s] = 0; newest[key_of[s]] = 0; j = 1; \
    do :: j <= STAMPS -> newest[key_of[s]] = (there[j] && key_of[j] == key_of[s] -> j : newest[key_of[s]]); j++ \
       :: else -> break od; j = 0; \
    gap[key_of[s]] = gap[key_of[s]] || newest[key_of[s]] == 0

/* The walk through the key tables, one producer's after the other, that ofs_keys_find and ofs_keys_cancel_older share.
 * `carries` leaves sequence s and stamp t, and ends in SEQUENCE_AGAIN or, when the block is another's, in NEXT. */
#define SCAN_STEPS(next) \
    :: d_step { at == SCAN && from == PRODUCERS -> from = 0; at = next } \
    :: d_step { at == SCAN && from < PRODUCERS -> SHOW \
        if :: i == PLACES || PLACE(from, i) == VACANT -> i = 0; from++ \
           :: else -> \
              if :: PLACE(from, i) == DELETED || TAG(PLACE(from, i)) != key -> i++ \
                 :: else -> block = BLOCK(from, INDEX(PLACE(from, i))); i++; at = SEQUENCE fi fi } \
    LOOK_STEPS \
    :: d_step { at == NEXT -> s = 0; t = 0; block = 0; at = SCAN }
#define LOOK_STEPS \
    :: STEP(SEQUENCE) s = sequences[block]; at = IS_PENDING } \
    :: STEP(IS_PENDING) at = ((words[block] & 1) -> KEY : NEXT) } \
    :: STEP(KEY) at = (keys[block] == key -> STAMP : NEXT) } \
    :: STEP(STAMP) t = stamps[block]; at = SEQUENCE_AGAIN }

/* ofs_block_cancel(block, s), then `next`. */
#define CANCEL_STEPS(next) \
    :: STEP(CANCEL_LOOK) word = words[block]; at = CANCEL_SEQUENCE } \
    :: STEP(CANCEL_SEQUENCE) \
        if :: (word & 1) == 0 || sequences[block] != s -> word = 0; at = next :: else -> at = CANCEL_SWAP fi } \
    :: STEP(CANCEL_SWAP) \
        if :: words[block] == word -> words[block] = word & ~1; assert(MAY_CANCEL(word / 2)); GONE(word / 2); \
              word = 0; at = next \
           :: else -> word = words[block]; at = CANCEL_SEQUENCE fi }

#define WHO Producer
#define MAY_CANCEL(s) ((key_of[s] == key && s < mine) || s == mine)
#define PUT(k) :: d_step { at == RESERVE && k <= KEYS && room < BLOCKS && !live[room] -> puts--; key = k; at = DRAW }
proctype producer(byte me)
{
    mtype at = RESERVE, after;
    byte puts = PUTS, key, room, block, from, i, j, s, t, word, mine, best;
    bit live[BLOCKS];
    do
    /* Outbox.reserve; Outbox.reclaim: ofs_keys_remove, then the block is used anew */
    :: d_step { at == RESERVE && room < BLOCKS && live[room] -> room++ }
    :: d_step { at == RESERVE && room == BLOCKS && i < BLOCKS -> block = BLOCK(me, i);
        if :: (words[block] & 1) == 0 -> key = keys[block]; at = REMOVE :: else -> i++; block = 0 fi }
    :: STEP(REMOVE) j = 0; do :: PLACE(me, j) != ENTRY(key, i) -> j++ :: else -> break od;
        PLACE(me, j) = DELETED; at = EMPTY }
    :: STEP(EMPTY)
        if :: PLACE(me, j + 1) == VACANT && PLACE(me, j) == DELETED ->
              PLACE(me, j) = VACANT; j = (j + PLACES - 1) % PLACES
           :: else -> live[i] = 0; room = i; i = 0; j = 0; block = 0; key = 0; at = RESERVE fi }
    :: d_step { at == RESERVE && room == BLOCKS && i == BLOCKS -> i = 0; puts--; at = OUT }    /* no room: refused */
    PUT(1)
    PUT(2)

    /* _put_shared: a stamp, ofs_block_publish, ofs_keys_insert */
    :: STEP(DRAW) stamp++; mine = stamp; key_of[mine] = key;
        live[room] = 1; block = BLOCK(me, room); at = PUT_SEQUENCE }
    :: STEP(PUT_SEQUENCE) sequences[block] = mine; at = PUT_KEY }
    :: STEP(PUT_KEY) keys[block] = key; at = PUT_STAMP }
    :: STEP(PUT_STAMP) stamps[block] = mine; at = PUT_WORD }
    :: STEP(PUT_WORD) words[block] = 2 * mine + 1; at = INSERT }
    :: STEP(INSERT) j = 0; do :: PLACE(me, j) > DELETED -> j++ :: else -> break od;
        PLACE(me, j) = ENTRY(key, room); j = 0;
        there[mine] = words[block] & 1; newest[key] = (there[mine] && newest[key] < mine -> mine : newest[key]);
        block = 0; at = RING }

    /* the bell rings before anything goes: older ones, or this one if a newer one was published before it */
    :: d_step { at == REPLACE -> after = REPLACED; at = SCAN }
    :: STEP(SEQUENCE_AGAIN)
        if :: sequences[block] != s -> at = NEXT
           :: else -> if :: after == REPLACED -> at = (t < mine -> CANCEL_LOOK : NEXT)
                         :: else -> best = (t > best -> t : best); at = NEXT fi fi }
    :: d_step { at == REPLACED -> after = NEWEST; at = SCAN }
    :: d_step { at == NEWEST -> after = 0;
        if :: best > mine -> block = BLOCK(me, room); s = mine; at = RING
           :: else -> at = OUT fi; best = 0 }
    SCAN_STEPS(after)
    CANCEL_STEPS((after == REPLACED -> NEXT : OUT))
    :: STEP(RING) bell++; at = (s -> CANCEL_LOOK : REPLACE) }

    :: d_step { at == OUT && puts -> block = 0; s = 0; mine = 0; key = 0; room = 0; at = RESERVE }
    :: d_step { at != OUT && deaths < DEATHS -> deaths++; puts = 0; at = OUT; printf("Producer %d dies\n", me) }
    :: atomic { at == OUT && puts == 0 -> putting--; break }
    od
}
#undef WHO
#undef MAY_CANCEL

#define WHO Getter
#define MAY_CANCEL(s) (key_of[s] == key && s < best)
#define GET(k) :: d_step { at == IDLE && gets && k <= KEYS -> gets--; key = k; at = LISTEN }
proctype getter(byte me)
{
    mtype at = IDLE, after = FOUND;
    byte gets = GETS, key, block, from, i, j, s, t, word, seen, best, best_block, must;
    bit lost, older;
    do
    GET(1)
    GET(2)
    :: STEP(LISTEN) seen = bell; must = newest[key]; gap[key] = (must == 0); at = SCAN }
    SCAN_STEPS(after)
    :: STEP(SEQUENCE_AGAIN)
        if :: sequences[block] != s -> at = NEXT
           :: else -> assert(key_of[s] == key && t == s);
              if :: after == OLDER -> at = (t < best -> CANCEL_LOOK : NEXT)
                 :: else -> older = (best != 0);
                    if :: t > best -> best = t; best_block = block :: else fi; at = NEXT fi fi }
    /* what the newest replaces goes before it is taken: the put that replaces may have died before it cancelled */
    :: d_step { at == FOUND -> at = (best == 0 -> ABSENT : (older -> RING : TAKE)); older = 0 }
    :: STEP(RING) bell++; after = OLDER; at = SCAN }
    CANCEL_STEPS(NEXT)
    :: d_step { at == OLDER -> after = FOUND; at = TAKE }
    :: STEP(TAKE) block = best_block;
        if :: words[block] == 2 * best + 1 -> words[block] = 2 * best; assert(!IN_ORDER || best > taken[key]);
              taken[key] = best; GONE(best); must = 0; at = IDLE
           :: else -> lost = 1; at = ABSENT fi; block = 0; best = 0; best_block = 0 }
    /* nothing, or somebody was faster */
    :: STEP(ABSENT) assert(lost || !there[must]); must = 0; lost = 0;
        if :: WAITS -> at = ASLEEP
           :: else -> if :: bell != seen -> at = LISTEN
                         :: else -> assert(!STRICT || gap[key]); seen = 0; at = IDLE fi fi }
    /* it wakes when the bell shows something else; a death counts as the end of a slice */
    :: d_step { at == ASLEEP && (bell != seen || (putting == 0 && (newest[key] == 0 || deaths))) -> SHOW
        seen = 0; at = (putting == 0 && newest[key] == 0 -> IDLE : LISTEN) }
    :: atomic { at == IDLE && (gets == 0 || putting == 0) -> break }
    od
}
#undef WHO
#undef MAY_CANCEL

/* ofs_request_cancel: all blocks, whatever the table says */
#define WHO Cleaner
#define MAY_CANCEL(s) (key_of[s] == key)
#define CLEANUP(k) :: d_step { at == IDLE && cleanups && k <= KEYS -> cleanups--; key = k; at = SEQUENCE }
proctype cleaner(byte me)
{
    mtype at = IDLE;
    byte cleanups = CLEANUPS, key, block, j, s, t, word;
    do
    CLEANUP(1)
    CLEANUP(2)
    LOOK_STEPS
    :: d_step { at == SEQUENCE_AGAIN -> at = CANCEL_LOOK }
    CANCEL_STEPS(NEXT)
    :: d_step { at == NEXT -> s = 0; t = 0; block++;
        if :: block < PRODUCERS * BLOCKS -> at = SEQUENCE :: else -> block = 0; at = IDLE fi }
    :: atomic { at == IDLE -> break }
    od
}
#undef WHO

init {
    atomic {
        putting = PRODUCERS;
        run producer(0);
        if :: PRODUCERS > 1 -> run producer(1) :: else fi;
        if :: CLEANUPS > 0 -> run cleaner(0) :: else fi;
        run getter(0)
    }
    /* of each key one at most is left */
    d_step {
        _nr_pr == 1; byte n = 1;
        do :: n <= STAMPS -> assert(!there[n] || newest[key_of[n]] == n || deaths); n++ :: else -> break od
    }
}
