"""Which state spaces are searched, which weakenings must be found in them, and what is known not to hold."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """A model with its sizes.

    Attributes:
        name: of the case.
        model: its file.
        settings: ``NAME=value`` pairs, other sizes are as the model has them.
        states: about how many there are; a search that sees far fewer has lost something on the way.
        what: what this one is for.
        slow: too large for every run of the tests.
        cycles: no run goes on for ever, so that what must happen in the end does.
    """

    name: str
    model: str
    settings: str
    states: int
    what: str
    slow: bool = False
    cycles: bool = False


class Weakening:
    """Something that the model, and the code, must not do.

    Args:
        what: in words.
        case: whose search must find it.
        fault: part of what is then violated, as spin writes it.
        changes: old texts, each found exactly once in the model, each followed by the new one.
    """

    def __init__(self, what: str, case: Case, fault: str, *changes: str) -> None:
        self.what, self.case, self.fault = what, case, fault
        self.changes = list(zip(changes[::2], changes[1::2], strict=True))


ROUND = Case(
    "block: generations come round",
    "block.pml",
    "GENERATION_BITS=2 PUBLICATIONS=5 CONSUMERS=1 OWN_SLOTS=1 CANCELS=4",
    370_000,
    "a reader sleeps through all generations of a block",
)
SLEEPER = Case(
    "block: a canceller sleeps",
    "block.pml",
    "GENERATION_BITS=2 PUBLICATIONS=5 CONSUMERS=1 OWN_SLOTS=1 GETS=4 DEATHS=0",
    46_000,
    "through all generations of a block",
)
TWO = Case("block: two readers", "block.pml", "CANCELS=0", 200_000, "two processes want the same payloads")
CANCEL = Case(
    "block: two readers and a cancellation",
    "block.pml",
    "PUBLICATIONS=2",
    1_450_000,
    "two processes want the same payloads, a third cancels",
)
TAKERS = Case(
    "block: two takers",
    "block.pml",
    "TAKERS=2 PUBLICATIONS=2 CANCELS=0",
    150_000,
    "each payload is for two, who may be one process twice",
)
LATE = Case(
    "block: late-comers",
    "block.pml",
    "OWN_SLOTS=0 NESTED=1 TAKERS=2 PUBLICATIONS=2 GETS=2",
    290_000,
    "all readers share the last slot; a get may run inside another",
)
LATER = Case(
    "block: one slot, three readers",
    "block.pml",
    "OWN_SLOTS=1 CONSUMERS=3 PUBLICATIONS=2 CANCELS=0",
    820_000,
    "one reader has a slot of its own, the others share one",
)
NESTED = Case(
    "block: gets within gets",
    "block.pml",
    "CONSUMERS=1 OWN_SLOTS=1 TAKERS=2 GETS=3 NESTED=1 PUBLICATIONS=2",
    65_000,
    "one process has several leases on one block",
)
BLOCKS = Case("block: two blocks", "block.pml", "BLOCKS=2 CANCELS=0", 800_000, "bits of dead readers in several blocks")
ENDS = Case(
    "block: the producer's end",
    "block.pml",
    "ENDS=1 PUBLICATIONS=2 CANCELS=0",
    1_150_000,
    "it closes or dies among readers; an heir tidies up",
)
HEIRS = Case(
    "block: the heir's end",
    "block.pml",
    "ENDS=1 PUBLICATIONS=2 CANCELS=0 CONSUMERS=1 OWN_SLOTS=1 BLOCKS=2 DEATHS=2",
    310_000,
    "the producer dies, then its heir at any step, then the next heir goes on",
)
FINITE = Case(
    "block: every run ends", "block.pml", "CANCELS=0", 400_000, "with TWO: what must happen does", cycles=True
)

SPACE = Case("bell: room", "bell.pml", "ROOM=1", 1_470_000, "two puts wait, three processes make room and may die")
ARRIVAL = Case("bell: arrival", "bell.pml", "ROOM=0 DEATHS=2", 105_000, "two gets wait for two puts, all may die")

REPLACE = Case("keys: replace", "keys.pml", "", 136_000, "three puts under two keys, with one chain in the table")
RIVALS = Case(
    "keys: rivals",
    "keys.pml",
    "PRODUCERS=2 BLOCKS=1 PLACES=1 PUTS=1 KEYS=1",
    2_190_000,
    "two producers replace each other's payload",
)
CLEANUP = Case(
    "keys: cleanup",
    "keys.pml",
    "CLEANUPS=2 BLOCKS=1 PLACES=2",
    2_200_000,
    "somebody cleans up; one block has three lives",
)
AWAITED = Case("keys: awaited", "keys.pml", "WAITS=1 DEATHS=1", 324_000, "a get sleeps until its key arrives")
STRICT = Case(
    "keys: found",
    "keys.pml",
    "STRICT=1",
    136_000,
    "a get that does not wait finds something if there is something all the time",
)
IN_ORDER = Case(
    "keys: in order",
    "keys.pml",
    "IN_ORDER=1 GETS=2 DEATHS=1",
    1_380_000,
    "no payload is handed over after a newer one of its key, though the put that replaces it may have died",
)

DIRECTORY = Case(
    "directory",
    "directory.pml",
    "FILES=2",
    1_500_000,
    "three endpoints make, join and leave it; a janitor uses and removes it",
)
NO_ROOM = Case(
    "directory: no room",
    "directory.pml",
    "FILES=2 ENDPOINTS=2 DEATHS=2 NO_ROOM=1",
    100_000,
    "a maker gets no memory for it",
)
CONTROL = Case("control", "control.pml", "", 53_000, "a producer's names, and two janitors")

LARGE = [
    replace(ROUND, name="block: everybody sleeps", settings=f"{ROUND.settings} GETS=4", states=3_470_000, slow=True),
    Case(
        "block: two readers and all generations",
        "block.pml",
        "GENERATION_BITS=2 PUBLICATIONS=5 CANCELS=3 DEATHS=0",
        3_170_000,
        "nobody dies",
        slow=True,
    ),
    replace(CANCEL, name="block: three lives and a cancellation", settings="", states=4_000_000, slow=True),
    replace(
        TWO, name="block: three readers", settings="CONSUMERS=3 PUBLICATIONS=2 CANCELS=0", states=9_220_000, slow=True
    ),
    replace(ENDS, name="block: two deaths", settings=f"{ENDS.settings} DEATHS=2", states=8_740_000, slow=True),
    replace(
        ENDS,
        name="block: an end and a cancellation",
        settings="ENDS=1 PUBLICATIONS=2 DEATHS=0",
        states=1_000_000,
        slow=True,
    ),
    replace(
        ENDS,
        name="block: two deaths and a cancellation",
        settings="ENDS=1 PUBLICATIONS=2 CONSUMERS=1 OWN_SLOTS=1 DEATHS=2",
        states=1_000_000,
        slow=True,
    ),
    replace(DIRECTORY, name="directory: three files", settings="FILES=3", states=6_000_000, slow=True),
    *(
        replace(case, name=f"{case.name}: every run ends", states=2 * case.states, slow=True, cycles=True)
        for case in (ROUND, TAKERS, LATE, NESTED, HEIRS, REPLACE, CONTROL)
    ),
]

CASES = [
    ROUND,
    SLEEPER,
    TWO,
    CANCEL,
    TAKERS,
    LATE,
    LATER,
    NESTED,
    BLOCKS,
    ENDS,
    HEIRS,
    FINITE,
    SPACE,
    ARRIVAL,
    REPLACE,
    RIVALS,
    CLEANUP,
    AWAITED,
    STRICT,
    IN_ORDER,
    DIRECTORY,
    NO_ROOM,
    CONTROL,
    *LARGE,
]

# What is violated, by the assertion's text.
STUCK = "invalid end state"
UNDER_A_READER = "holds["
LOST = "left[sequence]==0"
TOO_OFTEN = "left[sequence]>0"
UNMARKED = "~(readers)"
REUSED = "left[current[block]]==0"
WRONG = "(current[block]==sequence)||"
MIXED = "key_of[s]==key"
MISSED = "there[must]"
WRONG_KEY = "key_of[(word/2)]==key"
SEVERAL = "newest[key_of[n]]==n"
SPLIT = "name==file"
LEFT = "name==0"
UNDER_A_USER = "using["
STRAY = "!(data[file])"
NAMELESS = "control[file]&&data[file]"

_TAKE_BACK = "words[block] = words[block] & ~BIT(slot)"

BLOCK = [
    Weakening(
        "hold does not look at the sequence number again after the swap",
        ROUND,
        "contents[block]==sequence",
        "if :: sequences[block] == sequence -> HOLDS(me, block)++; at = READ :: else -> at = HOLD_BACK fi",
        "HOLDS(me, block)++; at = READ",
    ),
    Weakening(
        "hold sets its bit whatever became of the word",
        TWO,
        UNDER_A_READER,
        "if :: words[block] == word -> words[block] = word | BIT(slot); MARKED",
        "if :: true -> words[block] = words[block] | BIT(slot); MARKED",
    ),
    Weakening(
        "hold leaves its bit in another publication's word",
        ROUND,
        UNMARKED,
        f"assert(left[sequence] == 0); {_TAKE_BACK}; GET_ENDS",
        "GET_ENDS",
    ),
    Weakening(
        "take is a load and a store",
        TWO,
        UNMARKED,
        "if :: words[block] == word -> words[block] = word - ONE_TAKE;",
        "if :: true -> words[block] = word - ONE_TAKE;",
    ),
    Weakening(
        "take that lost the swap does not look whether a take is left",
        TWO,
        TOO_OFTEN,
        """left[sequence]--
           :: else -> word = words[block]; at = ((word & PENDING) -> TAKE_SWAP : RELEASE) fi""",
        """left[sequence]--
           :: else -> word = words[block]; at = TAKE_SWAP fi""",
    ),
    Weakening(
        "the bit goes before decoding ends",
        TWO,
        "bytes[block]==sequence",
        "assert(contents[block] == sequence); at = DECODE",
        f"assert(contents[block] == sequence); HOLDS(me, block)--; {_TAKE_BACK}; at = DECODE",
        f"""STEP(RELEASE) HOLDS(me, block)--;
        if :: HOLDS(me, block) == 0 -> {_TAKE_BACK} :: else fi; GET_ENDS""",
        "STEP(RELEASE) GET_ENDS",
    ),
    Weakening(
        "the first of several leases takes the bit away",
        NESTED,
        UNDER_A_READER,
        f"if :: HOLDS(me, block) == 0 -> {_TAKE_BACK} :: else fi",
        _TAKE_BACK,
    ),
    Weakening(
        "a late-comer inside a get claims the shared slot anew, and clears it",
        LATE,
        UNDER_A_READER,
        "at = (slot == NO_SLOT -> LOCK : HOLD_LOOK) }",
        "at = (slot == NO_SLOT || slot == SHARED_SLOT -> LOCK : HOLD_LOOK) }",
    ),
    Weakening(
        "late-comers do not wait for each other",
        LATE,
        UNDER_A_READER,
        "at == LOCK && i == SHARED_SLOT && (lock[i] == 0 || lock[i] == me + 1)",
        "at == LOCK && i == SHARED_SLOT",
    ),
    Weakening(
        "a slot is claimed without its lock",
        TWO,
        UNDER_A_READER,
        "if :: lock[i] == 0 -> LOCKED",
        "if :: true -> LOCKED",
    ),
    Weakening(
        "a claimed slot keeps the dead one's bits",
        TWO,
        UNMARKED,
        "readers = readers | BIT(slot); at = CLEAR_LOOK",
        "readers = readers | BIT(slot); at = HOLD_LOOK",
    ),
    Weakening(
        "the mark comes after the first bit",
        TWO,
        UNMARKED,
        "i = 0; at = MARK\n",
        "i = 0; at = CLEAR_LOOK\n",
        "STEP(READ) assert",
        "STEP(READ) readers = readers | BIT(slot); assert",
    ),
    Weakening(
        "a leaving reader unlocks its slot before it unmarks it",
        TWO,
        UNMARKED,
        "STEP(UNMARK) readers = readers & ~BIT(slot); MARKED(words[0]); at = UNLOCK }",
        "STEP(UNMARK) lock[slot] = 0; at = UNLOCK }",
        "STEP(UNLOCK) lock[slot] = 0; slot = NO_SLOT",
        "STEP(UNLOCK) readers = readers & ~BIT(slot); MARKED(words[0]); slot = NO_SLOT",
    ),
    Weakening(
        "a reap does not ask for the slot's lock",
        TWO,
        UNDER_A_READER,
        "if :: lock[slot] == 0 -> lock[slot] = me + 1; at = REAP_CLEAR_LOOK",
        "if :: true -> at = REAP_CLEAR_LOOK",
    ),
    Weakening(
        "a reap unmarks before it clears",
        HEIRS,
        UNMARKED,
        "lock[slot] = me + 1; at = REAP_CLEAR_LOOK",
        "lock[slot] = me + 1; at = REAP_UNMARK",
        "MARKED(words[0]); at = REAP_UNLOCK",
        "MARKED(words[0]); at = REAP_CLEAR_LOOK",
        "REAP_CLEAR, REAP_UNMARK)",
        "REAP_CLEAR, REAP_UNLOCK)",
    ),
    Weakening(
        "a reap unlocks before it unmarks",
        TWO,
        UNMARKED,
        "STEP(REAP_UNMARK) readers = readers & ~BIT(slot); MARKED(words[0]); at",
        "STEP(REAP_UNMARK) lock[slot] = 0; at",
        "STEP(REAP_UNLOCK) lock[slot] = 0;",
        "STEP(REAP_UNLOCK) readers = readers & ~BIT(slot); MARKED(words[0]);",
    ),
    Weakening(
        "cancel does not look at the sequence number",
        CANCEL,
        WRONG,
        "(word & PENDING) == 0 || sequences[block] != sequence -> word = 0; at = next",
        "(word & PENDING) == 0 -> word = 0; at = next",
    ),
    Weakening(
        "cancel is a load and a store",
        CANCEL,
        UNDER_A_READER,
        "if :: words[block] == word -> words[block] = word & ~PENDING;",
        "if :: true -> words[block] = word & ~PENDING;",
    ),
    Weakening(
        "a block is used anew once nobody holds it",
        TWO,
        REUSED,
        "(words[block] & IN_USE) == 0",
        "(words[block] & HOLDERS) == 0",
    ),
    Weakening(
        "a block is used anew once no take is left",
        TWO,
        UNDER_A_READER,
        "(words[block] & IN_USE) == 0",
        "(words[block] & PENDING) == 0",
    ),
    Weakening(
        "a block is published before its bytes are written",
        TWO,
        "bytes[block]==sequence",
        "bytes[block] = TORN; at = WRITTEN",
        "bytes[block] = TORN; at = PUBLISH_LOOK",
        "bytes[block] = sequence; at = PUBLISH_LOOK",
        "bytes[block] = sequence; block = 0; at = RESERVE",
        "left[sequence] = TAKERS; block = 0; at = RESERVE",
        "left[sequence] = TAKERS; at = WRITTEN",
    ),
    Weakening(
        "a block is published before its sequence number",
        TWO,
        LOST,
        "& GENERATIONS; at = PUBLISH_SEQUENCE",
        "& GENERATIONS; at = PUBLISH_CONTENT",
        "sequences[block] = sequence; at = PUBLISH_CONTENT",
        "sequences[block] = sequence; block = 0; at = RESERVE",
        "left[sequence] = TAKERS; block = 0; at = RESERVE",
        "left[sequence] = TAKERS; at = PUBLISH_SEQUENCE",
    ),
    Weakening(
        "a block is published before its other fields",
        TWO,
        "contents[block]==sequence",
        "sequences[block] = sequence; at = PUBLISH_CONTENT",
        "sequences[block] = sequence; at = PUBLISH_WORD",
        "contents[block] = sequence; at = PUBLISH_WORD",
        "contents[block] = sequence; block = 0; at = RESERVE",
        "left[sequence] = TAKERS; block = 0; at = RESERVE",
        "left[sequence] = TAKERS; at = PUBLISH_CONTENT",
    ),
    Weakening(
        "a new publication keeps the generation",
        CANCEL,
        WRONG,
        "(words[block] + ONE_GENERATION) & GENERATIONS",
        "words[block] & GENERATIONS",
    ),
    Weakening(
        "a janitor is the heir of the living",
        HEIRS,
        LOST,
        "at == OWN && owner == 0 && !removed",
        "at == OWN && !removed",
    ),
    Weakening("memory goes whoever looks at it", ENDS, UNDER_A_READER, "kept[i] = !FREE(i);", "kept[i] = 0;"),
    Weakening(
        "hold that lost the swap compares with what it had",
        FINITE,
        "non-progress cycle",
        """at = HOLD_AGAIN
           :: else -> word = words[block]; at = HOLD_SEQUENCE fi""",
        """at = HOLD_AGAIN
           :: else -> at = HOLD_SEQUENCE fi""",
    ),
]

BELL = [
    Weakening(
        "a put looks for room, then says that it waits",
        SPACE,
        STUCK,
        "STEP(ANNOUNCE) bell = bell | ASLEEP; seen = bell; at = (FIRST == me -> LOOK : SLEEP) }",
        "STEP(ANNOUNCE) at = (FIRST == me -> LOOK : HEARD) }\n"
        "    :: STEP(HEARD) bell = bell | ASLEEP; seen = bell; at = SLEEP }",
        "ROOM_STEPS(LOOK_AGAIN, AGAIN_ON, SLEEP)",
        "ROOM_STEPS(LOOK_AGAIN, AGAIN_ON, HEARD)",
    ),
    Weakening(
        "whoever makes room looks at the bell, then makes it",
        SPACE,
        STUCK,
        "STEP(CHANGE) rooms[block] = rooms[block] & ~bits; at = (rooms[block] == 0 -> HEARD : NEXT) }",
        "STEP(CHANGE) word = bell; at = HEARD }",
        "STEP(HEARD) at = ((bell & ASLEEP) -> RING_LOOK : NEXT) }",
        "STEP(HEARD) rooms[block] = rooms[block] & ~bits; "
        "at = (rooms[block] == 0 && (word & ASLEEP) -> RING_LOOK : NEXT); word = 0 }",
    ),
    Weakening(
        "the last take's cancellation does not ring",
        replace(SPACE, settings="DEATHS=0"),
        STUCK,
        "at = (rooms[block] == 0 -> HEARD : NEXT)",
        "at = (rooms[block] == 0 && bits != TAKE -> HEARD : NEXT)",
    ),
    Weakening(
        "a put that got room does not wake the next",
        SPACE,
        STUCK,
        "at = (got[0] && got[1] -> OUT : RING_LOOK)",
        "at = OUT",
    ),
    Weakening("a ring is not counted", SPACE, STUCK, "bell = (word + ONE_RING) & ~ASLEEP", "bell = word & ~ASLEEP"),
    Weakening("a ring is a load and a store", SPACE, STUCK, "if :: bell == word -> bell =", "if :: true -> bell ="),
    Weakening(
        "a ring wakes one of the sleepers",
        ARRIVAL,
        STUCK,
        "STEP(WAKE) sleeps[0] = 0; sleeps[1] = 0;",
        "STEP(WAKE) if :: sleeps[0] -> sleeps[0] = 0 :: else -> sleeps[1] = 0 fi;",
    ),
    Weakening(
        "the kernel does not compare", ARRIVAL, STUCK, "if :: bell == (seen | ASLEEP) -> sleeps", "if :: true -> sleeps"
    ),
    Weakening(
        "a sleeper does not say that it sleeps",
        ARRIVAL,
        STUCK,
        "at = ((seen & ASLEEP) -> SLEEP : MARK)",
        "at = SLEEP",
        "if :: bell == (seen | ASLEEP) -> sleeps",
        "if :: bell == seen -> sleeps",
    ),
    Weakening(
        "a get looks for its payload, then reads the bell",
        ARRIVAL,
        STUCK,
        "mtype at = LISTEN;",
        "mtype at = LOOK;",
        "STEP(LISTEN) seen = bell; at = LOOK }",
        "STEP(LISTEN) seen = bell; at = ((seen & ASLEEP) -> SLEEP : MARK) }",
        ":: else -> at = ((seen & ASLEEP) -> SLEEP : MARK) fi",
        ":: else -> at = LISTEN fi",
        "SLEEP_STEPS(LISTEN)",
        "SLEEP_STEPS(LOOK)",
    ),
    Weakening(
        "a put rings, then publishes",
        ARRIVAL,
        STUCK,
        """mtype at = CHANGE;
    byte word;
    do
    :: STEP(CHANGE) rooms[me] = 1; at = RING_LOOK }
    RING_STEPS(OUT)""",
        """mtype at = RING_LOOK;
    byte word;
    do
    :: STEP(CHANGE) rooms[me] = 1; at = OUT }
    RING_STEPS(CHANGE)""",
    ),
]

KEYS = [
    Weakening(
        "a look-up asks whether a take is left, then reads the sequence number",
        CLEANUP,
        MIXED,
        "STEP(SEQUENCE) s = sequences[block]; at = IS_PENDING }",
        "STEP(SEQUENCE) at = ((words[block] & 1) -> IS_PENDING : NEXT) }",
        "STEP(IS_PENDING) at = ((words[block] & 1) -> KEY : NEXT) }",
        "STEP(IS_PENDING) s = sequences[block]; at = KEY }",
    ),
    Weakening(
        "a look-up does not read the sequence number again",
        REPLACE,
        MIXED,
        "if :: sequences[block] != s -> at = NEXT\n           :: else -> assert(key_of[s] == key",
        "if :: false -> at = NEXT\n           :: else -> assert(key_of[s] == key",
    ),
    Weakening(
        "a block's key is stored before its sequence number",
        CLEANUP,
        MIXED,
        "block = BLOCK(me, room); at = PUT_SEQUENCE }",
        "block = BLOCK(me, room); at = PUT_KEY }",
        "keys[block] = key; at = PUT_STAMP",
        "keys[block] = key; at = PUT_SEQUENCE",
        "sequences[block] = mine; at = PUT_KEY",
        "sequences[block] = mine; at = PUT_STAMP",
    ),
    Weakening(
        "a removed entry ends the chain",
        REPLACE,
        MISSED,
        "PLACE(me, j) = DELETED; at = EMPTY",
        "PLACE(me, j) = VACANT; at = EMPTY",
    ),
    Weakening(
        "a put cancels newer ones, too",
        RIVALS,
        WRONG_KEY,
        "at = (t < mine -> CANCEL_LOOK : NEXT)",
        "at = (t != mine -> CANCEL_LOOK : NEXT)",
    ),
    Weakening("a put leaves older ones", REPLACE, SEVERAL, "at = (t < mine -> CANCEL_LOOK : NEXT)", "at = NEXT"),
    Weakening("a put stays beside a newer one", RIVALS, SEVERAL, "if :: best > mine ->", "if :: false ->"),
    Weakening(
        "a put rings before it publishes",
        AWAITED,
        STUCK,
        "STEP(DRAW) stamp++;",
        "STEP(DRAW) bell++; stamp++;",
        "STEP(RING) bell++; at = (s ->",
        "STEP(RING) at = (s ->",
    ),
    Weakening(
        "a get reads the bell after it looked",
        AWAITED,
        STUCK,
        "if :: WAITS -> at = ASLEEP",
        "if :: WAITS -> seen = bell; at = ASLEEP",
    ),
    Weakening(
        "a get does not look again when the bell rang",
        STRICT,
        "gap[key]",
        "if :: bell != seen -> at = LISTEN",
        "if :: false -> at = LISTEN",
    ),
    Weakening(
        "a put cancels before it rings",
        STRICT,
        "gap[key]",
        "block = 0; at = RING }",
        "block = 0; at = REPLACE }",
    ),
    Weakening(
        "a get leaves what its payload replaces",
        IN_ORDER,
        "best>taken[key]",
        "(older -> RING : TAKE)",
        "TAKE",
    ),
]

DIRECTORIES = [
    Weakening(
        "whoever leaves asks for the maker's lock before it asks whether it is alone",
        DIRECTORY,
        LEFT,
        "remover[file] = me; at = LOCK_OLD :: else",
        "remover[file] = me; at = CHECK_OLD :: else",
        "maker[file] = me; at = CHECK_OLD :: else",
        "maker[file] = me; at = ALONE :: else",
        "users[file] = users[file] & ~ME; at = ALONE }",
        "users[file] = users[file] & ~ME; at = LOCK_OLD }",
        "at = (file == 0 -> END : ALONE)",
        "at = (file == 0 -> END : LOCK_OLD)",
    ),
    Weakening(
        "a janitor that used it does not ask whether it was the last",
        DIRECTORY,
        LEFT,
        "STEP(VISITED) LET_GO; at = OPEN }",
        "STEP(VISITED) LET_GO; at = END }",
    ),
    Weakening(
        "whoever finds it being removed waits until nobody uses it",
        DIRECTORY,
        STUCK,
        "at == WAIT && CAN_SHARE -> SHOW users[file] = users[file] | ME; waiting[me] = 0; at = JOINED",
        "at == WAIT && CAN_OWN -> SHOW waiting[me] = 0; at = CLOSE_AND_RETRY",
    ),
    Weakening(
        "a file without memory is closed before its name is taken away",
        NO_ROOM,
        SPLIT,
        "refusals++; at = REFUSED",
        "refusals++; LET_GO; at = REFUSED",
    ),
    Weakening(
        "whoever joins does not look whether the name still leads there",
        DIRECTORY,
        SPLIT,
        "at = (name == file -> LOOK : CLOSE_AND_RETRY)",
        "at = LOOK",
    ),
    Weakening(
        "it is removed without the maker's lock",
        DIRECTORY,
        SPLIT,
        "remover[file] = me; at = LOCK_OLD :: else",
        "remover[file] = me; at = CHECK_OLD :: else",
    ),
    Weakening(
        "it is removed whoever uses it",
        DIRECTORY,
        SPLIT,
        "if :: CAN_OWN -> remover[file] = me;",
        "if :: true -> remover[file] = me;",
    ),
    Weakening(
        "the maker gives up its lock before it is a user",
        DIRECTORY,
        SPLIT,
        "STEP(RESERVE) at = USE_NEW }",
        "STEP(RESERVE) at = FILL }",
        "users[file] = users[file] | ME; at = FILL :: else",
        "users[file] = users[file] | ME; using[me] = file; at = USE :: else",
        "STEP(MADE) maker[file] = NOBODY; using[me] = file; at = USE }",
        "STEP(MADE) maker[file] = NOBODY; at = USE_NEW }",
    ),
    Weakening(
        "what is half-made is not looked at again under the maker's lock",
        DIRECTORY,
        UNDER_A_USER,
        "waiting[me] = 0; at = LOOK_AGAIN",
        "waiting[me] = 0; at = BROKEN",
    ),
    Weakening(
        "the maker does not look whether the name still leads to its file",
        DIRECTORY,
        SPLIT,
        "at = (name == file -> RESERVE : CLOSE_AND_RETRY)",
        "at = RESERVE",
    ),
]

CONTROLS = [
    Weakening(
        "an heir goes by names listed before it had the lock",
        CONTROL,
        STRAY,
        "STEP(LIST_AGAIN) listed_data = data[file];",
        "STEP(LIST_AGAIN)",
    ),
    Weakening(
        "the maker does not look whether its name is still there",
        CONTROL,
        NAMELESS,
        "if :: control[file] -> at = RESERVE",
        "if :: true -> at = RESERVE",
    ),
    Weakening(
        "a janitor removes what is locked",
        CONTROL,
        NAMELESS,
        "if :: owner[file] == NOBODY -> owner[file] = me; at = LIST_AGAIN",
        "if :: true -> at = LIST_AGAIN",
    ),
    Weakening(
        "a janitor takes data for strays by the list alone",
        CONTROL,
        NAMELESS,
        "if :: listed_data && !listed && !control[file] ->",
        "if :: listed_data && !listed ->",
    ),
]

WEAKENINGS = [*BLOCK, *BELL, *KEYS, *DIRECTORIES, *CONTROLS]

LIMITS = [
    Weakening(
        "a canceller that slept through all generations cancels another publication",
        SLEEPER,
        "current[block]==sequence",
        "assert(current[block] == sequence || CAME_ROUND(current[block] - sequence))",
        "assert(current[block] == sequence)",
    ),
]

# What a check is not for: without it all is well, as long as something else holds.
HARMLESS = [
    Weakening(
        "hold does not look at the sequence number again, and no generation comes round",
        replace(ROUND, settings=ROUND.settings.replace("GENERATION_BITS=2", "GENERATION_BITS=3")),
        "",
        "if :: sequences[block] == sequence -> HOLDS(me, block)++; at = READ :: else -> at = HOLD_BACK fi",
        "HOLDS(me, block)++; at = READ",
    ),
    Weakening(
        "hold looks at the sequence number only after the swap",
        replace(TWO, settings="PUBLICATIONS=2 CONSUMERS=1 OWN_SLOTS=1"),
        "",
        "(word & PENDING) == 0 || sequences[block] != sequence -> assert(left[sequence] == 0); GET_ENDS",
        "(word & PENDING) == 0 -> assert(left[sequence] == 0); GET_ENDS",
    ),
]
