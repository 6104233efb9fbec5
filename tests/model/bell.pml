/* The bells: no wake-up is lost, whoever dies (src/ofs_wait.c, Producer._queue_up, _get_by_key).
 *
 * ROOM 1: two puts of one producer wait for room; consumers make it by releasing, by cancelling, or by dying.
 * ROOM 0: two gets wait for the payloads of two producers.
 * The end of a slice wakes a sleeper only once a ringer has died: it must not hide a wake-up that was lost.
 */
#ifndef ROOM
#define ROOM 1
#endif
#ifndef DEATHS
#define DEATHS 1
#endif

#define ASLEEP 1
#define ONE_RING 2
byte bell;                /* shared memory: somebody sleeps, and the count of rings */
bit sleeps[2];            /* the kernel: who sleeps on it */
byte rooms[2];            /* ROOM: block words; else: is the payload there? */
byte deaths;              /* from any number on: that it could die must not hide that a process is stuck */
bit ringer_died;

mtype = { Waiter, Releaser, Getter, Putter };
mtype = { ANNOUNCE, LOOK, LOOK_ON, REAP, REAP_ON, LOOK_AGAIN, AGAIN_ON, LISTEN, MARK, SLEEP, SLEEPING, LEAVE, CHANGE,
          HEARD, RING_LOOK, RING_SWAP, WAKE, NEXT, OUT };

#define STEP(label) d_step { at == label -> SHOW
#define SHOW printf("%e %d: %e  (bell: %d rings, asleep %d; sleeping: %d %d; room: %d %d)\n", WHO, me, at, \
    bell / ONE_RING, bell & ASLEEP, sleeps[0], sleeps[1], rooms[0], rooms[1]);

/* ofs_bell_ring, then `next`. */
#define RING_STEPS(next) \
    :: STEP(RING_LOOK) word = bell; at = RING_SWAP } \
    :: STEP(RING_SWAP) \
        if :: bell == word -> bell = (word + ONE_RING) & ~ASLEEP; at = ((word & ASLEEP) -> WAKE : next); word = 0 \
           :: else -> word = bell fi } \
    :: STEP(WAKE) sleeps[0] = 0; sleeps[1] = 0; at = next }

/* The kernel compares and puts to sleep in one step. */
#define SLEEP_STEPS(next) \
    :: STEP(SLEEP) if :: bell == (seen | ASLEEP) -> sleeps[me] = 1; at = SLEEPING :: else -> seen = 0; at = next fi } \
    :: d_step { at == SLEEPING && (!sleeps[me] || ringer_died) -> SHOW sleeps[me] = 0; seen = 0; at = next }

#if ROOM
/* A word: bit 0 or 1 while consumer 0 or 1 holds the block, bit 2 while a take is left, bit 3 once a put has it. */
#define TAKE 4
#define RESERVED 8
bit dead[3];              /* releaser 0 or 1 */
bit got[2];
#define FIRST (got[0] -> 1 : 0)
#define ROOM_STEPS(look, look_on, otherwise) \
    :: STEP(look) if :: rooms[0] == 0 -> rooms[0] = RESERVED; at = LEAVE :: else -> at = look_on fi } \
    :: STEP(look_on) if :: rooms[1] == 0 -> rooms[1] = RESERVED; at = LEAVE :: else -> at = otherwise fi }

#define WHO Waiter
proctype waiter(byte me)
{
    mtype at = ANNOUNCE;
    byte seen, word;
    do
    /* ofs_bell_announce; only the first in the queue looks: attempt, reap, attempt */
    :: STEP(ANNOUNCE) bell = bell | ASLEEP; seen = bell; at = (FIRST == me -> LOOK : SLEEP) }
    ROOM_STEPS(LOOK, LOOK_ON, REAP)
    :: STEP(REAP) if :: dead[0] -> rooms[0] = rooms[0] & ~1 :: else fi; at = REAP_ON }
    :: STEP(REAP_ON) if :: dead[1] -> rooms[0] = rooms[0] & ~2; rooms[1] = rooms[1] & ~2 :: else fi; at = LOOK_AGAIN }
    ROOM_STEPS(LOOK_AGAIN, AGAIN_ON, SLEEP)
    SLEEP_STEPS(ANNOUNCE)
    :: STEP(LEAVE) got[me] = 1; at = (got[0] && got[1] -> OUT : RING_LOOK) }
    RING_STEPS(OUT)
    :: atomic { at == OUT -> break }
    od
}
#undef WHO

/* set_free and ofs_block_cancel: change one word, then another; whoever leaves one free rings if heard. */
#define WHO Releaser
proctype releaser(byte me; byte bits; byte block; byte last)
{
    mtype at = CHANGE;
    byte word;
    do
    :: STEP(CHANGE) rooms[block] = rooms[block] & ~bits; at = (rooms[block] == 0 -> HEARD : NEXT) }
    :: STEP(HEARD) at = ((bell & ASLEEP) -> RING_LOOK : NEXT) }
    RING_STEPS(NEXT)
    :: STEP(NEXT) at = (block < last -> CHANGE : OUT); block = last }
    :: d_step { at != OUT && !(at == CHANGE && bits == TAKE) && deaths < DEATHS -> deaths++;
        printf("Releaser %d dies before %e\n", me, at); ringer_died = 1; dead[me] = 1; at = OUT }
    :: atomic { at == OUT -> break }
    od
}
#undef WHO

init {
    atomic {
        select (deaths : 0 .. DEATHS);
        rooms[0] = 1 + 2; rooms[1] = 2 + TAKE;
        run waiter(0); run waiter(1);
        run releaser(0, 1, 0, 0); run releaser(1, 2, 0, 1); run releaser(2, TAKE, 1, 1)
    }
}

#else

bit gone[2];              /* putter 0 or 1 died */
#define WHO Getter
proctype getter(byte me)
{
    mtype at = LISTEN;
    byte seen;
    do
    :: STEP(LISTEN) seen = bell; at = LOOK }
    :: STEP(LOOK)
        if :: rooms[me] || gone[me] -> seen = 0; at = OUT :: else -> at = ((seen & ASLEEP) -> SLEEP : MARK) fi }
    /* ofs_bell_wait */
    :: STEP(MARK)
        if :: bell == seen -> bell = seen | ASLEEP; at = SLEEP
           :: else -> if :: bell == (seen | ASLEEP) -> at = SLEEP :: else -> seen = 0; at = LISTEN fi fi }
    SLEEP_STEPS(LISTEN)
    :: d_step { at != OUT && deaths < DEATHS -> printf("Getter %d dies before %e\n", me, at);
        deaths++; sleeps[me] = 0; seen = 0; at = OUT }
    :: atomic { at == OUT -> break }
    od
}
#undef WHO

#define WHO Putter
proctype putter(byte me)
{
    mtype at = CHANGE;
    byte word;
    do
    :: STEP(CHANGE) rooms[me] = 1; at = RING_LOOK }
    RING_STEPS(OUT)
    :: d_step { at != OUT && deaths < DEATHS -> printf("Putter %d dies before %e\n", me, at);
        deaths++; ringer_died = 1; gone[me] = 1; at = OUT }
    :: atomic { at == OUT -> break }
    od
}
#undef WHO

init {
    atomic {
        select (deaths : 0 .. DEATHS);
        run getter(0); run getter(1); run putter(0); run putter(1)
    }
}
#endif
