"""The referee's book: what became of every payload, and which outcomes nobody can excuse.

Reports come from all processes through one pipe, each written in one piece before or after a call. Times are
CLOCK_MONOTONIC in nanoseconds, which all processes share. A process that dies between "about to get" and the answer may
or may not have used up a take: that get counts as one that perhaps took, and excuses exactly one missing payload.
Everything else must add up.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

EXTRA_NS = 250_000_000  # a sleeping get must have looked again within this time of an arrival: five slices

Outcome = Literal["open", "ok", "refused", "died"]
Answer = Literal["open", "got", "none", "died"]


@dataclass(slots=True)
class Process:
    """One life of a worker: what decides how long its payloads may be asked for."""

    serial: int
    ttl_ns: int
    died_at: int | None = None
    closed_at: int | None = None  # began to close


@dataclass(slots=True)
class Get:
    token: int
    rid: str
    uid: int | None  # the payload asked for by its metadata; None: whatever is under the key
    serial: int
    start: int
    end: int = 0
    answer: Answer = "open"
    got: int | None = None
    awake: int = 0  # whatever came before this, the get must have noticed


@dataclass(slots=True)
class Put:
    uid: int
    rid: str
    takers: int
    maker: Process
    inline: bool = False
    outcome: Outcome = "open"
    ended: int = 0
    cancel_began: int | None = None  # from here on it may be gone
    cancel_ended: int | None = None  # from here on it must be gone
    taken: int = 0
    perhaps: int = 0


@dataclass(slots=True)
class Request:
    """All payloads ever put under one request id, and all gets of them."""

    puts: list[Put] = field(default_factory=list)
    gets: list[Get] = field(default_factory=list)
    doubts: list[Get] = field(default_factory=list)  # answered None; excusable by gets that are still under way
    cleaning: list[int] = field(default_factory=list)  # who is in a cleanup of it


@dataclass(frozen=True)
class Fault:
    """Something that must not happen."""

    kind: str
    text: str
    events: tuple[str, ...] = ()


class Ledger:
    """What was reported, and the faults found in it."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.faults: list[Fault] = []
        self.fates: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.processes: dict[int, Process] = {}
        self._puts: dict[int, Put] = {}
        self._gets: dict[int, Get] = {}
        self._events: deque[tuple[Any, ...]] = deque(maxlen=50_000)

    # ---- processes

    def born(self, serial: int, ttl_s: float) -> None:
        self.processes[serial] = Process(serial, int(ttl_s * 1e9))

    def closes(self, serial: int, at: int) -> None:
        """A producer begins to close: what it has not handed over may go."""
        self._note(at, "closes", serial)
        process = self.processes[serial]
        process.closed_at = at
        # What it makes after opening anew is another endpoint's.
        self.processes[serial] = Process(serial, process.ttl_ns)

    def dies(self, serial: int, at: int) -> None:
        """It was sent SIGKILL at `at` and is gone; all that it wrote has been read."""
        self._note(at, "dies", serial)
        self.processes.pop(serial).died_at = at
        for put in [put for put in self._puts.values() if put.outcome == "open" and put.maker.serial == serial]:
            put.outcome, put.maker.died_at = "died", at
        for request in self.requests.values():
            if serial in request.cleaning:
                request.cleaning.remove(serial)
        for get in [get for get in self._gets.values() if get.serial == serial]:
            get.answer = "died"
            get.end = at
            for put in self._asked(get):
                put.perhaps += 1
            self._answered(get)

    # ---- payloads

    def put_begins(self, uid: int, rid: str, takers: int, serial: int, at: int) -> None:
        self._note(at, "put begins", serial, rid, uid, takers)
        request = self.requests.setdefault(rid, Request())
        for older in request.puts:
            older.cancel_began = older.cancel_began or at  # the same key put again replaces what nobody has taken
        put = Put(uid, rid, takers, self.processes[serial])
        put.cancel_began = at if request.cleaning else None  # a cleanup under way may meet it, or not
        self._puts[uid] = put
        request.puts.append(put)

    def put_ends(self, uid: int, ok: bool, at: int, *, inline: bool = False) -> None:
        """`inline`: the payload is the metadata itself, which can be decoded as often as one likes."""
        put = self._puts[uid]
        put.inline = inline
        self._note(at, "put ok" if ok else "put refused", put.maker.serial, put.rid, uid)
        put.outcome, put.ended = "ok" if ok else "refused", at
        if ok:
            for older in self.requests[put.rid].puts:
                if older is not put and older.outcome == "ok":
                    older.cancel_ended = older.cancel_ended or at
        elif put.taken:
            self.fault("ghost", f"put of {uid} was refused, but somebody got it", put.rid)

    def cancel_begins(self, rid: str, serial: int, at: int) -> None:
        self._note(at, "cleanup begins", serial, rid)
        request = self.requests.setdefault(rid, Request())
        request.cleaning.append(serial)
        for put in request.puts:
            put.cancel_began = put.cancel_began or at

    def cancel_ends(self, rid: str, serial: int, start: int, at: int) -> None:
        self._note(at, "cleanup ends", serial, rid)
        request = self.requests[rid]
        request.cleaning.remove(serial)
        for put in request.puts:
            if put.outcome == "ok" and put.ended < start:
                put.cancel_ended = put.cancel_ended or at

    # ---- gets

    def get_begins(self, token: int, rid: str, uid: int | None, serial: int, at: int) -> None:
        self._note(at, "get begins", serial, rid, uid, token)
        get = Get(token, rid, uid, serial, at)
        self._gets[token] = get
        self.requests.setdefault(rid, Request()).gets.append(get)  # by key: perhaps before it is put

    def get_ends(self, token: int, got: int | None, times: tuple[int, int, int]) -> None:
        """An answer: `got` is the id that the payload carried, None where get answered None.

        `times`: when the call began and ended, and how long it waited for a processor in between.
        """
        start, at, queued_ns = times
        get = self._gets[token]
        self._note(at, "got" if got is not None else "got nothing", get.serial, get.rid, got, token)
        get.start, get.end, get.got = start, at, got
        get.awake = max(start, at - EXTRA_NS - queued_ns)
        get.answer = "none" if got is None else "got"
        if got is None:
            self.counts["misses"] += 1
        else:
            self._delivered(get, got)
        self._answered(get)

    def _asked(self, get: Get) -> list[Put]:
        puts = self.requests[get.rid].puts
        return [put for put in puts if get.uid in (None, put.uid)]

    def _delivered(self, get: Get, uid: int) -> None:
        self.counts["gets"] += 1
        put = next((put for put in self._asked(get) if put.uid == uid), None)
        if put is None:
            self.fault("corrupt", f"a get of {get.uid or get.rid} by process {get.serial} brought {uid}", get.rid)
            return
        put.taken += 1
        if put.inline:
            return
        if put.taken > put.takers:
            self.fault("double", f"{uid} was got {put.taken} times, {put.takers} were allowed", get.rid)
        if put.outcome == "refused":
            self.fault("ghost", f"put of {uid} was refused, but somebody got it", get.rid)
        if put.cancel_ended is not None and get.start > put.cancel_ended:
            self.fault("undead", f"{uid} was got after it had been cancelled or replaced", get.rid)

    def _answered(self, get: Get) -> None:
        self._gets.pop(get.token, None)
        request = self.requests[get.rid]
        if get.answer == "none":
            request.doubts.append(get)
        for doubt in list(request.doubts):
            if any(rival.answer == "open" and rival.start < doubt.end for rival in request.gets):
                continue  # it may have taken what the other one missed
            request.doubts.remove(doubt)
            for put in self._asked(doubt):
                if not self._excuse(put, doubt):
                    kind = "lost" if put.ended < doubt.start else "overslept"
                    self.fault(kind, f"{put.uid} was there for process {doubt.serial}, which got None", get.rid)

    def _excuse(self, put: Put, get: Get) -> str:
        """Why this get may have answered None although the payload was put; "" if there is no reason."""
        if put.outcome != "ok" or put.ended >= get.awake:
            return "not there yet"
        if put.inline:
            return ""
        if put.cancel_began is not None and put.cancel_began <= get.end:
            return "cancelled or replaced"
        if put.maker.closed_at is not None and put.maker.closed_at <= get.end:
            return "its producer closed"
        if put.maker.died_at is not None and get.end >= put.maker.died_at + put.maker.ttl_ns:
            return "its producer's time was over"
        used = sum(
            rival is not get and rival.start < get.end and (rival.got == put.uid or self._perhaps(rival, put))
            for rival in self.requests[put.rid].gets
        )
        return "used up" if used >= put.takers else ""

    @staticmethod
    def _perhaps(rival: Get, put: Put) -> bool:
        return rival.answer == "died" and rival.uid in (None, put.uid)

    # ---- what is over

    def open_puts(self, rid: str) -> list[int]:
        """Payloads of this request of which a get may find something."""
        request = self.requests.get(rid)
        return [
            put.uid
            for put in ([] if request is None else request.puts)
            if put.outcome in ("ok", "died") and put.cancel_ended is None and put.taken < put.takers
        ]

    def settle(self, rid: str) -> None:
        """Forget a request that nobody puts or asks for any more."""
        request = self.requests.get(rid)
        if request is None:
            return
        if request.doubts or any(get.answer == "open" for get in request.gets):
            self.fault("unsettled", f"request {rid} is still asked for", rid)
        for put in request.puts:
            fate = self.fate(put)
            self.fates[fate] += 1
            if fate == "left over":
                self.fault("lost", f"{put.uid} was there, its producer lives, and nobody could get it", rid)
            del self._puts[put.uid]
        del self.requests[rid]

    def fate(self, put: Put) -> str:
        """One word for what became of a payload."""
        if put.outcome == "refused":
            return "refused"
        if put.taken >= put.takers:
            return "delivered"
        if put.outcome == "died":
            return "producer died in put"
        if put.taken + put.perhaps >= put.takers:
            return "unknown"
        if put.cancel_began is not None:
            return "cancelled"
        if put.maker.closed_at is not None:
            return "dropped by close"
        return "expired" if put.maker.died_at is not None else "left over"

    # ---- faults

    def _note(self, *event: Any) -> None:
        self._events.append(event)

    def fault(self, kind: str, text: str, rid: str | None = None) -> None:
        """Keep a fault with the last things that happened to that request."""
        events = [str(event) for event in self._events if rid is not None and rid in event]
        request = self.requests.get(rid) if rid is not None else None
        if request is not None:
            events += [str(dataclasses.asdict(put)) for put in request.puts]
        self.faults.append(Fault(kind, text, tuple(events[-60:])))
