/* The names of a producer: made, in use, taken away by itself or by an heir (segments.py, producer.py, janitor.py).
 *
 * It makes up to TRIES control segments, each under a name that is never used again, and one data segment. A step is
 * one system call or one store.
 */
#ifndef TRIES
#define TRIES 2
#endif
#ifndef DEATHS
#define DEATHS 2          /* of all processes together */
#endif
#ifndef JANITORS
#define JANITORS 2        /* 1 or 2 */
#endif

#define NOBODY 255
#define PRODUCER 9
bit control[TRIES + 1];   /* the names: of the control segment, */
bit data[TRIES + 1];      /* and of its data segment */
bit made[TRIES + 1];      /* the magic word stands */
byte owner[TRIES + 1];    /* the kernel: who has LOCK_OWNER */
byte running;
byte deaths;              /* from any number on: that it could die must not hide that a process is stuck */

mtype = { Producer, Janitor };
mtype = { CREATE, LOCK, CHECK, RESERVE, FILL, GROW, USE, SHUT_DATA, SHUT,
          LIST, LIST_MORE, OPEN, TRY, LIST_AGAIN, REMOVE_DATA, UNLINK, CLOSE, STRAYS, END };

#define STEP(label) d_step { at == label -> SHOW
#define SHOW printf("%e %d: %e  (try %d: control %d, data %d, made %d, owner %d)\n", WHO, me, at, file, control[file], \
    data[file], made[file], owner[file]);
#define LET_GO owner[file] = (owner[file] == me -> NOBODY : owner[file])

#define WHO Producer
proctype producer(byte me)
{
    mtype at = CREATE;
    byte file;
    do
    /* segments.make_control, segments.make */
    :: d_step { at == CREATE && file < TRIES -> SHOW file++; control[file] = 1; at = LOCK }
    :: d_step { at == CREATE && file == TRIES -> at = END }
    :: STEP(LOCK) if :: owner[file] == NOBODY -> owner[file] = me; at = CHECK :: else -> at = CREATE fi }
    :: STEP(CHECK) if :: control[file] -> at = RESERVE :: else -> LET_GO; at = CREATE fi }
    :: STEP(RESERVE) at = FILL }
    :: STEP(FILL) made[file] = 1; at = GROW }
    :: STEP(GROW) data[file] = 1; at = USE }
    :: STEP(USE) assert(control[file] && data[file]); at = SHUT_DATA }
    /* Producer._tear_down */
    :: STEP(SHUT_DATA) data[file] = 0; at = SHUT }
    :: STEP(SHUT) control[file] = 0; LET_GO; at = END }
    :: d_step { at != END && deaths < DEATHS -> printf("Producer dies before %e\n", at); deaths++; LET_GO; at = END }
    :: atomic { at == END -> running--; break }
    od
}
#undef WHO

/* Two sweeps: one at any time, one after the producer has ended. What becomes of an heir's blocks is in block.pml. */
#define WHO Janitor
proctype janitor(byte me)
{
    mtype at = LIST;
    byte file;
    bit listed, listed_data, last;
    do
    /* listing is not one step: data may show where control did not */
    :: d_step { at == LIST && (!last || running == 0) -> file++; SHOW listed = control[file]; at = LIST_MORE }
    :: STEP(LIST_MORE) listed_data = data[file]; at = (listed -> OPEN : STRAYS) }
    /* a dead producer's */
    :: STEP(OPEN) at = (control[file] -> TRY : STRAYS) }
    :: STEP(TRY) if :: owner[file] == NOBODY -> owner[file] = me; at = LIST_AGAIN :: else -> at = STRAYS fi }
    :: STEP(LIST_AGAIN) listed_data = data[file]; at = REMOVE_DATA }
    :: STEP(REMOVE_DATA) data[file] = (listed_data -> 0 : data[file]); at = UNLINK }
    :: STEP(UNLINK) control[file] = 0; assert(!data[file]); at = CLOSE }
    :: STEP(CLOSE) LET_GO; listed_data = 0; at = STRAYS }
    /* data without control */
    :: STEP(STRAYS)
        if :: listed_data && !listed && !control[file] -> data[file] = 0 :: else fi; listed = 0; listed_data = 0;
        if :: file < TRIES -> at = LIST
           :: else -> file = 0; if :: last -> at = END :: else -> last = 1; at = LIST fi fi }
    :: d_step { at != END && deaths < DEATHS && running -> printf("Janitor %d dies before %e\n", me, at);
        deaths++; LET_GO; file = 0; listed = 0; listed_data = 0; last = 1; at = LIST }
    :: atomic { at == END -> break }
    od
}
#undef WHO

init {
    atomic {
        select (deaths : 0 .. DEATHS);
        owner[1] = NOBODY; owner[TRIES] = NOBODY; running = 1;
        run producer(PRODUCER); run janitor(0);
        if :: JANITORS > 1 -> run janitor(1) :: else fi
    }
    _nr_pr == 1;
    assert(!control[1] && !data[1] && !control[TRIES] && !data[TRIES])
}
