/* The life of a namespace's directory: made by the first endpoint, joined, removed by the last (directory.py).
 *
 * Files are numbered in the order in which they are made; the name leads to one of them or to none. A step is one
 * system call. What a process has locked is free again when it closes the file or dies.
 */
#ifndef ENDPOINTS
#define ENDPOINTS 3       /* 2 or 3, each for one stay */
#endif
#ifndef FILES
#define FILES 3           /* 2 or more: so many are made, one after the other */
#endif
#ifndef DEATHS
#define DEATHS 1          /* of endpoints */
#endif
#ifndef NO_ROOM
#define NO_ROOM 0         /* how often memory for a new file is refused */
#endif

#define NOBODY 255
byte name;                /* the file that the name leads to; 0: none */
byte files;               /* made so far */
bit made[FILES + 1];      /* the magic word stands */
byte maker[FILES + 1];    /* the kernel: who has LOCK_MAKER */
byte remover[FILES + 1];  /* who has LOCK_USERS for himself */
byte users[FILES + 1];    /* who share it, a bit each */
byte refusals, running;
byte deaths;              /* from any number on: that it could die must not hide that a process is stuck */
bit died;

/* To judge by. */
byte using[ENDPOINTS];    /* the file that each works with */
bit waiting[ENDPOINTS];   /* to join: the others work on until it has, so that waiting for their end is a deadlock */
#define IN_USE(file) (file != 0 && (using[0] == file || using[1] == file || using[ENDPOINTS - 1] == file))

mtype = { Endpoint, Janitor };
mtype = { OPEN, CREATE, LOCK_NEW, CHECK_NEW, RESERVE, REFUSED, USE_NEW, FILL, MADE, JOIN, WAIT, JOINED, LOOK,
          WAIT_MAKER, LOOK_AGAIN, FINISHED, BROKEN, UNLINK_BROKEN, CLOSE_AND_RETRY, USE, LEAVE, ALONE, LOCK_OLD,
          CHECK_OLD, UNLINK, CLOSE, VISIT, VISIT_JOIN, VISITED, END };

#define STEP(label) d_step { at == label -> SHOW
#define SHOW printf("%e %d: %e  (its file %d; the name leads to %d)\n", WHO, me, at, file, name);

#define ME (1 << me)
#define CAN_SHARE (remover[file] == NOBODY || remover[file] == me)
#define CAN_OWN (CAN_SHARE && (users[file] & ~ME) == 0)
#define UNLINK_NAME assert(!IN_USE(name)); name = 0
#define LET_GO maker[file] = (maker[file] == me -> NOBODY : maker[file]); \
    remover[file] = (remover[file] == me -> NOBODY : remover[file]); users[file] = users[file] & ~ME; file = 0

/* remove_if_unused, then CLOSE. */
#define REMOVE_STEPS \
    :: STEP(ALONE) if :: CAN_OWN -> remover[file] = me; at = LOCK_OLD :: else -> at = CLOSE fi } \
    :: STEP(LOCK_OLD) if :: maker[file] == NOBODY -> maker[file] = me; at = CHECK_OLD :: else -> at = CLOSE fi } \
    :: STEP(CHECK_OLD) at = (name == file -> UNLINK : CLOSE) } \
    :: STEP(UNLINK) UNLINK_NAME; at = CLOSE }

#define WHO Endpoint
proctype endpoint(byte me)
{
    mtype at = OPEN;
    byte file;
    do
    /* open_directory */
    :: STEP(OPEN) file = name; at = (file == 0 -> CREATE : JOIN) }
    :: STEP(CLOSE_AND_RETRY) LET_GO; at = OPEN }

    /* segments.make, _make */
    :: d_step { at == CREATE && name == 0 && files < FILES -> SHOW files++; name = files; file = files; at = LOCK_NEW }
    :: d_step { at == CREATE && name == 0 && files == FILES -> at = END }    /* more than is explored */
    :: d_step { at == CREATE && name != 0 -> at = OPEN }
    :: STEP(LOCK_NEW)
        if :: maker[file] == NOBODY -> maker[file] = me; at = CHECK_NEW :: else -> at = CLOSE_AND_RETRY fi }
    :: STEP(CHECK_NEW) at = (name == file -> RESERVE : CLOSE_AND_RETRY) }
    :: STEP(RESERVE) at = USE_NEW }
    :: d_step { at == RESERVE && refusals < NO_ROOM -> SHOW refusals++; at = REFUSED }
    :: STEP(REFUSED) UNLINK_NAME; at = CLOSE }
    :: STEP(USE_NEW) if :: CAN_SHARE -> users[file] = users[file] | ME; at = FILL :: else -> at = CLOSE_AND_RETRY fi }
    :: STEP(FILL) made[file] = 1; at = MADE }
    :: STEP(MADE) maker[file] = NOBODY; using[me] = file; at = USE }

    /* _join */
    :: STEP(JOIN)
        if :: CAN_SHARE -> users[file] = users[file] | ME; at = JOINED :: else -> waiting[me] = 1; at = WAIT fi }
    :: d_step { at == WAIT && CAN_SHARE -> SHOW users[file] = users[file] | ME; waiting[me] = 0; at = JOINED }
    :: STEP(JOINED) at = (name == file -> LOOK : CLOSE_AND_RETRY) }
    :: STEP(LOOK)
        if :: made[file] -> using[me] = file; at = USE :: else -> waiting[me] = 1; at = WAIT_MAKER fi }
    :: d_step { at == WAIT_MAKER && maker[file] == NOBODY -> SHOW maker[file] = me; waiting[me] = 0; at = LOOK_AGAIN }
    :: STEP(LOOK_AGAIN) at = (made[file] -> FINISHED : BROKEN) }
    :: STEP(FINISHED) maker[file] = NOBODY; using[me] = file; at = USE }
    :: STEP(BROKEN) at = (name == file -> UNLINK_BROKEN : CLOSE_AND_RETRY) }
    :: STEP(UNLINK_BROKEN) UNLINK_NAME; at = CLOSE_AND_RETRY }

    /* leave_directory */
    :: d_step { at == USE && !waiting[0] && !waiting[1] && !waiting[ENDPOINTS - 1] -> SHOW
        assert(name == file); using[me] = 0; at = LEAVE }
    :: STEP(LEAVE) users[file] = users[file] & ~ME; at = ALONE }
    REMOVE_STEPS
    :: STEP(CLOSE) LET_GO; at = END }

    :: d_step { at != END && deaths < DEATHS -> printf("Endpoint %d dies before %e\n", me, at);
        deaths++; died = 1; LET_GO; using[me] = 0; waiting[me] = 0; at = END }
    :: atomic { at == END -> running--; break }
    od
}
#undef WHO

/* janitor.sweep at any time, and if an endpoint died once more at the end. It may use the directory first, to take a
 * dead producer out of its list; whoever has used it must ask afterwards whether it was the last. */
#define WHO Janitor
proctype janitor(byte me)
{
    mtype at = VISIT;
    byte file;
    bit again;
    do
    :: STEP(VISIT) file = name; at = (file == 0 -> OPEN : VISIT_JOIN) }
    :: d_step { at == VISIT -> at = OPEN }
    :: d_step { at == VISIT_JOIN && CAN_SHARE -> SHOW users[file] = users[file] | ME; at = VISITED }
    :: STEP(VISITED) LET_GO; at = OPEN }
    :: STEP(OPEN) file = name; at = (file == 0 -> END : ALONE) }
    REMOVE_STEPS
    :: STEP(CLOSE) LET_GO; at = END }
    :: d_step { at == END && running == 0 && died && !again -> again = 1; at = VISIT }
    :: atomic { at == END && running == 0 && (again || !died) -> assert(name == 0); break }
    od
}
#undef WHO

init {
    atomic {
        select (deaths : 0 .. DEATHS);
        maker[1] = NOBODY; maker[2] = NOBODY; maker[FILES] = NOBODY;
        remover[1] = NOBODY; remover[2] = NOBODY; remover[FILES] = NOBODY;
        running = ENDPOINTS;
        run endpoint(0); run endpoint(1);
        if :: ENDPOINTS > 2 -> run endpoint(2) :: else fi;
        run janitor(ENDPOINTS)
    }
}
