"""Rings in virtual time: the library's own allocator and its rules of growth, driven by an arrival trace.

Nothing is mapped and nothing waits, so that an hour of traffic takes seconds and no memory.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from omni_fastshm._core import BLOCK_LIMIT, RingAllocator
from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import describe
from omni_fastshm.sizing import LARGEST, Edge, Load, rounded

__all__ = [
    "MOST_ARRIVALS",
    "Arrival",
    "EdgeResult",
    "RingResult",
    "SimulatedRing",
    "SimulatedStore",
    "arrivals_of",
    "read_trace",
    "simulate",
]

MOST_ARRIVALS = 5_000_000
"""So many are replayed at most: that takes about a minute."""
_MANY = 16  # as in omni_fastshm.producer
_MOST_LOOKS = 5_000_000_000  # at segments: some ten seconds
_TRIM_LOOKS = 25  # to look at one from here takes as long as so many from the allocator
_LATEST = 10**10  # 300 years; also what time.time() says is below
_LONGEST_LINE = 1 << 16
COLUMNS = 60


class Arrival(NamedTuple):
    """One put.

    Attributes:
        t: when, in seconds.
        edge: on which edge.
        size: bytes.
        hold_s: seconds from the put until the last view is dropped.
    """

    t: float
    edge: Edge
    size: int
    hold_s: float


@dataclass
class _Arena:
    size: int
    used: int = 0
    idle_since: float = 0.0


class SimulatedRing:
    """A producer's data segments: `omni_fastshm.producer.Producer` without the memory.

    Args:
        segment_bytes: usual size of a segment.
        max_bytes: limit for all of them.
        idle_segment_s: how long a segment beyond the first may be unused before it goes.

    Raises:
        ConfigError: (from `take`) so many payloads went through so many segments that to go on would take for ever.
    """

    def __init__(self, segment_bytes: int, max_bytes: int, idle_segment_s: float = 2.0) -> None:
        self.ring = RingAllocator()
        self.max_bytes = max_bytes
        self.high_capacity = 0
        self._segment_bytes = segment_bytes
        self._idle_s = idle_segment_s
        self._arenas: dict[int, _Arena] = {}
        self._trim_at = 0.0
        self._live = 0
        self._looks = 0

    @property
    def capacity(self) -> int:
        """Bytes of all segments there are now."""
        size: int = self.ring.capacity
        return size

    def can_fit(self, size: int) -> bool:
        """Could an idle ring take this?"""
        return rounded(size) <= self.max_bytes

    def prepare(self, size: int, now: float) -> None:
        """What every put does before it looks for room."""
        extra = len(self._arenas) > 1 or self.capacity > self._segment_bytes
        if extra and now >= self._trim_at:
            self._trim_at = now + self._idle_s / 2
            self._trim(self._idle_s, now)
        if len(self._arenas) > 1 and self.capacity + self._segment_bytes > self.max_bytes:
            self._reshape(size, now)

    def take(self, size: int, now: float, *, grow: bool = True) -> tuple[int, int] | None:
        """Room for `size` bytes, or None."""
        if self._live >= BLOCK_LIMIT:
            return None
        self._count(len(self._arenas))
        place: tuple[int, int] | None = self.ring.allocate(size)
        if place is None and grow and self._grow(size, now):
            place = self.ring.allocate(size)
        if place is not None:
            self._arenas[place[0]].used += rounded(size)
            self._live += 1
        return place

    def give(self, place: tuple[int, int], size: int) -> None:
        """The bytes are free again."""
        self.ring.free(*place, size)
        self._arenas[place[0]].used -= rounded(size)
        self._live -= 1

    def _count(self, looks: int) -> None:
        self._looks += looks
        if self._looks > _MOST_LOOKS:
            number = len(self._arenas)
            raise ConfigError(
                f"segment_bytes: {self._segment_bytes} makes {number} segments, too many to replay this traffic: give "
                f"a larger one (--segment-bytes), such as {-(-self.capacity // 1000 // 4096) * 4096}, or less traffic"
            )

    def _grow(self, size: int, now: float) -> bool:
        need = rounded(size)
        wanted = self._usual_size(need, max(self.max_bytes - self.capacity, 0) // 64 * 64)
        if wanted < need:
            self._trim(0, now)
            wanted = self._usual_size(need, max(self.max_bytes - self.capacity, 0) // 64 * 64)
        if wanted < need:
            return False
        self._arenas[self.ring.add(wanted)] = _Arena(wanted, idle_since=now)
        self.high_capacity = max(self.high_capacity, self.capacity)
        return True

    def _usual_size(self, need: int, room: int) -> int:
        size = min(max(self._segment_bytes // 64 * 64, need), room)
        return size // need * need if size < _MANY * need else size

    def _trim(self, idle_s: float, now: float) -> None:
        self._count(_TRIM_LOOKS * len(self._arenas))
        for number, arena in list(self._arenas.items()):
            if arena.used:
                arena.idle_since = now
            elif now - arena.idle_since >= idle_s and (
                idle_s == 0 or len(self._arenas) > 1 or arena.size > self._segment_bytes
            ):
                self.ring.remove(number)
                del self._arenas[number]

    def _reshape(self, size: int, now: float) -> None:
        if self.ring.used:
            return
        need = rounded(size)
        sizes = [arena.size for arena in self._arenas.values()]
        held = sum(each // need for each in sizes) + (self.max_bytes - sum(sizes)) // need
        usual = self._usual_size(need, self.max_bytes)
        if usual and held < self.max_bytes // usual * (usual // need) + self.max_bytes % usual // need:
            self._trim(0, now)


class SimulatedStore:
    """Room in Mooncake's store for what one stage has untaken: a `MooncakeConnector`'s count of it, without the store.

    Nothing is evicted (``hard_pin``): what does not fit waits, as in a ring.

    Args:
        limit: most bytes, that is `max_bytes`, or `segment` where that is not set.
    """

    def __init__(self, limit: int) -> None:
        self.max_bytes = limit
        self.high_capacity = limit
        self.used = 0
        self.peak = 0

    @property
    def ring(self) -> SimulatedStore:
        """Has `used` and `peak`, as a ring's allocator has."""
        return self

    def can_fit(self, size: int) -> bool:
        """Could it ever take this?"""
        return rounded(size) <= self.max_bytes

    def prepare(self, size: int, now: float) -> None:
        """Nothing grows or shrinks."""

    def take(self, size: int, now: float) -> tuple[int, int] | None:
        """Room for `size` bytes, or None."""
        if self.used + rounded(size) > self.max_bytes:
            return None
        self.used += rounded(size)
        self.peak = max(self.peak, self.used)
        return 0, 0

    def give(self, place: tuple[int, int], size: int) -> None:
        """The bytes are free again."""
        self.used -= rounded(size)


@dataclass
class EdgeResult:
    """What happened on one edge.

    Attributes:
        puts: payloads that found room.
        refused: payloads that did not within `put_timeout_s`.
        waited: of the puts: those that had to wait.
        longest_wait_s: the longest of these waits.
        inline: payloads below `shm_threshold_bytes`: they need no room.
    """

    puts: int = 0
    refused: int = 0
    waited: int = 0
    longest_wait_s: float = 0.0
    inline: int = 0


@dataclass
class RingResult:
    """What happened in one ring, or in the store.

    Attributes:
        from_stage: whose.
        max_bytes: its limit.
        high_water: the most bytes that payloads took at a time.
        high_capacity: the most bytes that its segments had.
        occupancy: the most bytes in use in each of `COLUMNS` equal parts of the time.
        refusals: how many payloads were refused in each.
        edges: by receiving stage.
        kind: "ring" or "store".
    """

    from_stage: str
    max_bytes: int
    high_water: int = 0
    high_capacity: int = 0
    occupancy: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    refusals: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    edges: dict[str, EdgeResult] = field(default_factory=dict)
    kind: str = "ring"


class _Waiting(NamedTuple):
    number: int
    arrival: Arrival
    deadline: float


_RELEASE, _ARRIVE, _GIVE_UP = range(3)  # what is at the same moment happens in this order


class _Run:
    """One ring's events in order."""

    def __init__(self, stage: str, settings: Mapping[str, Any], end: float) -> None:
        self.ring: SimulatedRing | SimulatedStore
        if "segment" in settings:
            self.ring = SimulatedStore(settings["max_bytes"])
        else:
            self.ring = SimulatedRing(settings["segment_bytes"], settings["max_bytes"], settings["idle_segment_s"])
        self.result = RingResult(stage, settings["max_bytes"], kind="store" if "segment" in settings else "ring")
        self._timeout = settings["put_timeout_s"]
        self._threshold = 0 if settings.get("key_lookup") else settings.get("shm_threshold_bytes", 0)
        self._end = end
        self._queue: deque[_Waiting] = deque()
        self._gone: set[int] = set()
        self._events: list[tuple[float, int, int, Any]] = []
        self._numbers = count()
        self._since = 0.0
        self._used = 0

    def play(self, arrivals: Iterable[Arrival]) -> RingResult:
        for arrival in arrivals:
            self._until(arrival.t)
            self._arrive(arrival)
        self._until(math.inf)
        self.result.high_water = self.ring.ring.peak
        self.result.high_capacity = self.ring.high_capacity
        return self.result

    def _until(self, moment: float) -> None:
        while self._events and self._events[0][0] <= moment:
            now, kind, _, what = heapq.heappop(self._events)
            if kind == _RELEASE:
                self.ring.give(*what)
                self._note(now)
                self._serve(now)
            elif what.number not in self._gone:
                self._queue.remove(what)
                self._refuse(what.arrival, now)
                self._serve(now)
            else:
                self._gone.discard(what.number)

    def _edge(self, arrival: Arrival) -> EdgeResult:
        return self.result.edges.setdefault(arrival.edge[1], EdgeResult())

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.size < self._threshold:
            self._edge(arrival).inline += 1
            return
        self.ring.prepare(arrival.size, arrival.t)
        if not self.ring.can_fit(arrival.size):
            self._refuse(arrival, arrival.t)
        elif not self._queue and self._place(arrival, arrival.t):
            pass
        elif self._timeout == 0:
            self._refuse(arrival, arrival.t)
        else:
            waiting = _Waiting(next(self._numbers), arrival, arrival.t + self._timeout)
            self._queue.append(waiting)
            self._push(waiting.deadline, _GIVE_UP, waiting)

    def _place(self, arrival: Arrival, now: float) -> bool:
        place = self.ring.take(arrival.size, now)
        if place is None:
            return False
        self._edge(arrival).puts += 1
        self._push(now + arrival.hold_s, _RELEASE, (place, arrival.size))
        self._note(now)
        return True

    def _serve(self, now: float) -> None:
        while self._queue and self._place(self._queue[0].arrival, now):
            waiting = self._queue.popleft()
            self._gone.add(waiting.number)
            edge = self._edge(waiting.arrival)
            edge.waited += 1
            edge.longest_wait_s = max(edge.longest_wait_s, now - waiting.arrival.t)

    def _push(self, moment: float, kind: int, what: Any) -> None:
        heapq.heappush(self._events, (moment, kind, next(self._numbers), what))

    def _column(self, now: float) -> int:
        if now < self._end:
            return int(now / self._end * COLUMNS)
        return COLUMNS - 1 if self._end else 0

    def _note(self, now: float) -> None:
        """From the last change until now so much was in use; from now on something else."""
        first, last = self._column(self._since), self._column(now)
        for column in range(first, last + 1):
            self.result.occupancy[column] = max(self.result.occupancy[column], self._used)
        self._since, self._used = now, self.ring.ring.used
        self.result.occupancy[last] = max(self.result.occupancy[last], self._used)

    def _refuse(self, arrival: Arrival, now: float) -> None:
        self._edge(arrival).refused += 1
        self.result.refusals[self._column(now)] += 1


def simulate(
    rings: Mapping[tuple[str, tuple[str, ...]], Mapping[str, Any]],
    trace: Iterable[Arrival],
    seconds: float | None = None,
) -> list[RingResult]:
    """Replay arrivals against rings, and against Mooncake's store.

    Args:
        rings: by producing stage and its receivers: `segment_bytes`, `max_bytes`, `put_timeout_s`, `idle_segment_s`,
            and if wanted `shm_threshold_bytes` and `key_lookup`. With `segment` it is the store, whose limit is
            `max_bytes`.
        trace: in any order. Edges that belong to no ring are left out.
        seconds: what `occupancy` and `refusals` divide into columns; None takes the time of the last arrival.

    Returns:
        What happened in each ring, in their order.
    """
    of_edge = {(stage, to): index for index, (stage, targets) in enumerate(rings) for to in targets}
    ordered = sorted(trace)
    end = seconds if seconds is not None else ordered[-1].t if ordered else 0.0
    runs = [_Run(stage, settings, end) for (stage, _), settings in rings.items()]
    parts: list[list[Arrival]] = [[] for _ in runs]
    for arrival in ordered:
        if arrival.edge in of_edge:
            parts[of_edge[arrival.edge]].append(arrival)
    return [run.play(part) for run, part in zip(runs, parts, strict=True)]


def arrivals_of(
    loads: Mapping[Edge, Load], seconds: float, *, kind: str = "poisson", hold: str = "fixed", seed: int = 0
) -> Iterator[Arrival]:
    """A made-up trace.

    Args:
        loads: by edge.
        seconds: how long it lasts.
        kind: "poisson": at random moments; "even": at equal distances. Bursts come as a load's `burst` says.
        hold: "fixed": each stays for `hold_s`; "exponential": for that on average.
        seed: the same gives the same trace.
    """
    for number, (edge, load) in enumerate(loads.items()):
        chance = random.Random(f"{seed} {number}")
        rate = load.per_s / load.burst
        t = 0.0 if kind == "even" else (chance.expovariate(rate) if rate else seconds)
        while rate and t < seconds:
            for _ in range(load.burst):
                hold_s = load.hold_s
                if hold == "exponential" and hold_s:
                    hold_s = chance.expovariate(1 / hold_s)
                yield Arrival(t, edge, load.size, hold_s)
            t += 1 / rate if kind == "even" else chance.expovariate(rate)


def read_trace(path: Path) -> list[Arrival]:
    """A trace from a file: a JSON object a line with `t`, `edge` (``[from, to]``), `bytes` and `hold_s`.

    Raises:
        ConfigError: the file cannot be read, or a line is something else; the message names the line.
    """
    found = []
    try:
        with path.open() as file:
            for number in count(1):
                line = file.readline(_LONGEST_LINE)
                if not line:
                    break
                if number > MOST_ARRIVALS:
                    raise ConfigError(f"{path}: more than {MOST_ARRIVALS:,} lines are too many to replay")
                if len(line) == _LONGEST_LINE and not line.endswith("\n"):
                    raise ConfigError(
                        f"{path}, line {number}: has more than {_LONGEST_LINE} characters: give a JSON object a line"
                    )
                if line.strip():
                    found.append(_arrival_of(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


def _arrival_of(line: str, place: str) -> Arrival:
    try:
        return _arrival(json.loads(line))
    except RecursionError:
        what = "is nested too deeply"
    except (ValueError, TypeError, KeyError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    raise ConfigError(f"{place}: {what}")


def _arrival(row: Any) -> Arrival:
    if not isinstance(row, dict):
        raise ValueError("a line must be a JSON object")
    edge = row["edge"]
    if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(stage, str | int) for stage in edge):
        raise ValueError('edge must be a list of two stages, as ["thinker", "talker"]')
    numbers = {key: row[key] for key in ("t", "bytes", "hold_s")}
    for key, most in (("t", _LATEST), ("bytes", LARGEST["size"]), ("hold_s", LARGEST["hold_s"])):
        value = numbers[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{key} must be a number from 0 on, not {describe(value)}")
        if value > most:
            raise ValueError(f"{key} is too large: {describe(value)}, the most is {most:,}")
    return Arrival(float(numbers["t"]), (str(edge[0]), str(edge[1])), int(numbers["bytes"]), float(numbers["hold_s"]))
