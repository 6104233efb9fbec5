"""What each process is told to do next: drawn from the seed and from what happened so far."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torture.ledger import Ledger
from torture.worker import Spec

KIB = 1 << 10
CREDIT = 40  # payloads of one producer that are under way

Command = tuple[Any, ...]


@dataclass
class Life:
    """One worker as the referee sees it."""

    spec: Spec
    pid: int
    commands: int
    mortal: bool
    up: bool = False
    stopped: bool = False
    dies_at: int | None = None
    queued: int = 0
    work: Counter[str] = field(default_factory=Counter)  # what it was told to do, by request
    vitals: dict[str, Any] = field(default_factory=dict)

    @property
    def makes(self) -> bool:
        return self.spec.role in ("producer", "both")

    @property
    def takes(self) -> bool:
        return self.spec.role in ("consumer", "both")


@dataclass
class Parcel:
    """A request on its way: one payload, or two where the second replaces the first."""

    rid: str
    edge_uid: int  # decides the edge
    keyed: bool
    tries: int  # gets that it is worth
    busy: int = 0  # puts, gets and cleanups that somebody was told to make
    asks: int = 0  # gets that somebody shall be told to make
    metadata: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)


def random_sizes(rng: random.Random) -> tuple[int, ...]:
    """Sizes of leaves: for the metadata, for the ring, with and without copying out, for a segment of its own."""
    kind = rng.random()
    if kind < 0.08:
        return (rng.randrange(250),)  # with its frame below the threshold
    if kind < 0.4:
        return tuple(rng.randrange(1, 6 * KIB) for _ in range(rng.randint(1, 4)))
    if kind < 0.85:
        return tuple(rng.randrange(1, 64 * KIB) for _ in range(rng.randint(1, 3)))
    return (rng.randrange(64 * KIB, 256 * KIB if kind < 0.97 else 700 * KIB),)


class Schedule:
    """Payloads under way, and who shall ask for them."""

    def __init__(self, rng: random.Random, ledger: Ledger, backlog: int, first_uid: int) -> None:
        self.next_uid = first_uid
        self.putting = True
        self.disturbing = True  # cleanups, closes, and gets for nothing
        self._rng = rng
        self._ledger = ledger
        self._backlog = backlog
        self._next_token = 1
        self._parcels: dict[str, Parcel] = {}
        self._pool: list[Parcel] = []  # one entry per ask
        self._under_way: Counter[int] = Counter()  # by producer
        self.gets: dict[int, tuple[str, int | None, float]] = {}  # commanded: request, payload or None by key, timeout

    # ---- what to do

    def next_command(self, life: Life) -> Command | None:
        chance = self._rng.random()
        if self.disturbing and chance < 0.02 and self._pool:
            parcel = self._rng.choice(self._pool)
            self._begin(parcel, life)
            return "cleanup", parcel.rid
        if self.disturbing and chance < 0.022 and life.mortal:
            return ("reopen",)
        if life.makes and self.putting and (not life.takes or chance < 0.5):
            return self._put(life)
        return self._get(life) if life.takes else None

    def _put(self, life: Life) -> Command | None:
        if self._under_way[life.spec.serial] >= CREDIT:
            return None
        rng, uid = self._rng, self.next_uid
        self.next_uid += 1
        sizes, takers = random_sizes(rng), rng.choice((1, 1, 1, 2, 3))
        parcel = self._parcel_for(uid, life, takers)
        parcel.makers.append(life.spec.serial)
        self._under_way[life.spec.serial] += 1
        self._begin(parcel, life)
        if life.spec.keyed and rng.random() < 0.3:
            self._ask(parcel)  # by key, perhaps before it is there
        lend = rng.getrandbits(len(sizes)) if rng.random() < 0.3 else 0
        return "put", uid, parcel.rid, parcel.edge_uid, sizes, lend, takers

    def _parcel_for(self, uid: int, life: Life, takers: int) -> Parcel:
        if life.spec.keyed and self._pool and self._rng.random() < 0.1:
            older = self._rng.choice(self._pool)
            if older.keyed and len(older.makers) == 1 and len(older.metadata) == 1:  # a put that is over
                older.tries += 2 * takers
                return older
        parcel = Parcel(f"r{uid}", uid, life.spec.keyed, tries=2 + 2 * takers)
        self._parcels[parcel.rid] = parcel
        return parcel

    def _get(self, life: Life) -> Command | None:
        rng = self._rng
        if not self._pool or (self.putting and len(self._pool) < self._backlog and rng.random() < 0.7):
            return None
        at = rng.randrange(len(self._pool))
        parcel = self._pool[at]
        by_key = parcel.keyed and life.spec.keyed and (not parcel.metadata or rng.random() < 0.5)
        if not by_key and not parcel.metadata:
            return None
        self._pool[at] = self._pool[-1]
        self._pool.pop()
        parcel.asks -= 1
        self._begin(parcel, life)
        uid, metadata = None, None
        if by_key:
            parcel.tries -= 1
        else:
            uid, metadata = self._one_of(parcel)
        timeout = 0.0 if parcel.metadata else rng.choice((0.0, 0.05, 0.4))
        token = self._next_token
        self._next_token += 1
        self.gets[token] = parcel.rid, uid, timeout
        return "get", token, parcel.rid, parcel.edge_uid, metadata, timeout

    def _one_of(self, parcel: Parcel) -> tuple[int, dict[str, Any]]:
        """Mostly what is still there; sometimes what was taken or replaced."""
        open_puts = self._ledger.open_puts(parcel.rid)
        there = [each for each in parcel.metadata if each[0] in open_puts]
        if there and self._rng.random() < 0.1:
            return self._rng.choice(parcel.metadata)
        parcel.tries -= 1
        return self._rng.choice(there or parcel.metadata)

    def _begin(self, parcel: Parcel, life: Life) -> None:
        parcel.busy += 1
        life.work[parcel.rid] += 1

    def _ask(self, parcel: Parcel) -> None:
        parcel.asks += 1
        self._pool.append(parcel)

    # ---- what happened

    def put_ended(self, life: Life, rid: str, uid: int, takers: int, metadata: dict[str, Any] | None) -> None:
        parcel = self._parcels[rid]
        if metadata is not None:
            parcel.metadata.append((uid, metadata))
            for _ in range(takers + (self._rng.random() < 0.15)):  # sometimes one more than can get it
                self._ask(parcel)
        self._ended(parcel, life)

    def get_ended(self, life: Life, token: int) -> None:
        self._ended(self._parcels[self.gets.pop(token)[0]], life)

    def cleaned(self, life: Life, rid: str) -> None:
        parcel = self._parcels[rid]
        if parcel.metadata and self._rng.random() < 0.5:
            self._ask(parcel)
        self._ended(parcel, life)

    def died(self, life: Life) -> None:
        """Its commands are void; what it may have begun, others ask for."""
        for rid, count in life.work.items():
            parcel = self._parcels[rid]
            parcel.busy -= count
            parcel.tries += count
            self._consider(parcel)

    def _ended(self, parcel: Parcel, life: Life) -> None:
        life.work[parcel.rid] -= 1
        if not life.work[parcel.rid]:
            del life.work[parcel.rid]
        parcel.busy -= 1
        self._consider(parcel)

    def _consider(self, parcel: Parcel) -> None:
        """When nobody is at it any more: ask again, or let it be forgotten."""
        if parcel.busy or parcel.asks:
            return
        reachable = parcel.keyed or parcel.metadata
        if reachable and parcel.tries > 0 and self._ledger.open_puts(parcel.rid):
            self._ask(parcel)
        elif self.disturbing and parcel.metadata and self._rng.random() < 0.02:
            self._ask(parcel)  # for nothing: all is taken
        else:
            self._ledger.settle(parcel.rid)
            del self._parcels[parcel.rid]
            for serial in parcel.makers:
                self._under_way[serial] -= 1

    @property
    def under_way(self) -> int:
        """Requests that have no fate yet."""
        return len(self._parcels)
