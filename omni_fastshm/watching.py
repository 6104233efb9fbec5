"""A running namespace seen from outside: two looks at its control segments, and what happened in between.

Like `inventory`, this reads what is there and touches nothing: no process notices that somebody watches.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from omni_fastshm import segments
from omni_fastshm.errors import FastShmError
from omni_fastshm.inventory import Endpoint, Oddity, Snapshot, take_snapshot
from omni_fastshm.keys import edge_hash
from omni_fastshm.reading import BlockRow, Holder, read_rows

CELLS = 40

Names = Mapping[int, tuple[str, str]]
"""Edges by their hash: shared memory knows no names."""


def edge_names(edges: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> dict[int, tuple[str, str]]:
    """The names of these edges, for `compare`."""
    return {edge_hash(*edge): edge for edge in edges}


@dataclass(frozen=True)
class Look:
    """What was there at one moment.

    Attributes:
        at_ns: when, by CLOCK_MONOTONIC.
        snapshot: as `take_snapshot` gives it.
        rows: block descriptors of each endpoint, by the name of its control segment.
        waiting: names of those where puts wait for room.
    """

    at_ns: int
    snapshot: Snapshot
    rows: dict[str, list[BlockRow]]
    waiting: frozenset[str]


@dataclass(frozen=True)
class RingView:
    """A data segment.

    Attributes:
        number: k of ``….d<k>``.
        length: in bytes.
        used: bytes of the payloads in it; loans that wait to be sent are not seen.
        cells: share of each fortieth of it that is in use, 0 to 1.
    """

    number: int
    length: int
    used: int
    cells: tuple[float, ...]


@dataclass(frozen=True)
class EdgeView:
    """What one producer has sent over one edge, as far as its descriptors still show.

    Attributes:
        edge: hash of the edge, 16 hex digits.
        from_stage: its start; None where the names are not known.
        to_stage: its end.
        pending: payloads with takes left.
        held: payloads that somebody looks at.
        bytes: of both.
        last_s: seconds since the last put.
        puts_per_s: estimated: the producer's rate, divided as its latest payloads are.
    """

    edge: str
    from_stage: str | None
    to_stage: str | None
    pending: int
    held: int
    bytes: int
    last_s: float
    puts_per_s: float


@dataclass(frozen=True)
class EndpointView:
    """A producer.

    Attributes:
        namespace, endpoint, pid, state, age_s, orphan_left_s, memory: as in `inventory.Endpoint`.
        puts: payloads published since it was made.
        puts_per_s: since the last look.
        bytes_per_s: the same times the mean size of its latest payloads.
        puts_wait: does a put wait for room at this moment?
        pending, held: payloads with takes left; payloads that somebody looks at.
        oldest_s: age of the oldest payload with takes left; None without any.
        rings: its data segments.
        edges: by the time of their last put, latest first.
        readers: who reads from it.
    """

    namespace: str
    endpoint: str
    pid: int
    state: str
    age_s: float
    orphan_left_s: float | None
    memory: int
    puts: int
    puts_per_s: float
    bytes_per_s: float
    puts_wait: bool
    pending: int
    held: int
    oldest_s: float | None
    rings: tuple[RingView, ...]
    edges: tuple[EdgeView, ...]
    readers: tuple[Holder, ...]


@dataclass(frozen=True)
class View:
    """What happened between two looks, and what there is now.

    Attributes:
        mount, size, free: the shm mount and its bytes; `size` 0 where it has no limit.
        namespace: which one was asked for; None for all.
        seconds: between the looks.
        endpoints: by namespace, oldest first.
        oddities: what else lies there.
    """

    mount: str
    size: int
    free: int
    namespace: str | None
    seconds: float
    endpoints: tuple[EndpointView, ...]
    oddities: tuple[Oddity, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``omni-fastshm top --json`` prints it."""
        return asdict(self)


def look(namespace: str | None = None) -> Look:
    """Look once.

    Args:
        namespace: only this one; None means all of this user.

    Raises:
        SegmentError: there is no shm mount.
    """
    snapshot = take_snapshot(namespace)
    rows: dict[str, list[BlockRow]] = {}
    waiting = set()
    for endpoint in snapshot.endpoints:
        try:
            with segments.no_fork:
                fd = segments.open_descriptor(endpoint.name)
                if fd is None:
                    continue  # gone meanwhile
                try:
                    rows[endpoint.name], waits = read_rows(fd)
                finally:
                    os.close(fd)
        except (FastShmError, OSError):
            continue
        if waits:
            waiting.add(endpoint.name)
    return Look(time.monotonic_ns(), snapshot, rows, frozenset(waiting))


def compare(before: Look, now: Look, names: Names | None = None) -> View:
    """What happened between two looks.

    Args:
        before: the earlier one.
        now: the later one.
        names: edges by hash, see `edge_names`; others are shown by their hash.
    """
    seconds = max(now.at_ns - before.at_ns, 1) / 1e9
    snapshot = now.snapshot
    endpoints = [
        _endpoint(each, now, before, seconds, names or {}) for each in snapshot.endpoints if each.name in now.rows
    ]
    return View(
        snapshot.mount,
        snapshot.size,
        snapshot.free,
        snapshot.namespace,
        seconds,
        tuple(endpoints),
        snapshot.oddities,
    )


def _endpoint(endpoint: Endpoint, now: Look, before: Look, seconds: float, names: Names) -> EndpointView:
    rows = now.rows[endpoint.name]
    puts = _count(rows)
    known = before.rows.get(endpoint.name)
    since = _count(known) if known is not None else 0  # one that was not there before began in between
    rate = max(puts - since, 0) / seconds
    fresh = [row for row in rows if row.sequence > since] if rate else []
    mean = sum(row.total_size for row in fresh) / len(fresh) if fresh else 0.0
    control = endpoint.control
    return EndpointView(
        endpoint.namespace,
        endpoint.endpoint,
        control.pid,
        endpoint.state,
        control.age_s,
        endpoint.orphan_left_s,
        endpoint.memory,
        puts,
        rate,
        rate * mean,
        endpoint.name in now.waiting and endpoint.state == "alive",
        control.blocks.untaken,
        control.blocks.held + control.blocks.held_untaken,
        control.blocks.oldest_s,
        tuple(_ring(each.number, each.length, rows) for each in endpoint.data),
        _edges(rows, fresh, rate, now.at_ns, names),
        control.holders,
    )


def _count(rows: list[BlockRow]) -> int:
    """How many payloads were published: the last one's number."""
    return max((row.sequence for row in rows), default=0)


def _ring(number: int, length: int, rows: list[BlockRow]) -> RingView:
    cells = [0.0] * CELLS
    used = 0
    width = max(length / CELLS, 1.0)
    for row in rows:
        if not row.in_use or row.segment != number:
            continue
        used += row.frame_size
        start, end = row.offset, min(row.offset + row.frame_size, length)
        for cell in range(min(int(start / width), CELLS - 1), min(int(end / width), CELLS - 1) + 1):
            cells[cell] += max(min(end, (cell + 1) * width) - max(start, cell * width), 0.0) / width
    return RingView(number, length, used, tuple(min(cell, 1.0) for cell in cells))


def _edges(rows: list[BlockRow], fresh: list[BlockRow], rate: float, now: int, names: Names) -> tuple[EdgeView, ...]:
    shares = Counter(row.edge for row in fresh)
    by_edge: dict[int, list[BlockRow]] = {}
    for row in rows:
        if row.sequence:
            by_edge.setdefault(row.edge, []).append(row)
    views = []
    for edge, all_rows in by_edge.items():
        start, end = names.get(edge, (None, None))
        live = [row for row in all_rows if row.in_use]
        views.append(
            EdgeView(
                f"{edge:016x}",
                start,
                end,
                sum(row.takes > 0 for row in live),
                sum(row.holders > 0 for row in live),
                sum(row.total_size for row in live),
                max(now - max(row.published_ns for row in all_rows), 0) / 1e9,
                rate * shares[edge] / len(fresh) if fresh else 0.0,
            )
        )
    return tuple(sorted(views, key=lambda each: (each.last_s, each.edge)))
