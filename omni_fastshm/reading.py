"""What control segments and directories say, read without touching them.

Everything is read with `pread`, never through a mapping: reading a hole of a sparse object through a mapping takes
memory, and on a full mount it is a SIGBUS. Locks are asked about (F_OFD_GETLK), never taken, so no process notices.
While others work, figures are of slightly different moments.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from omni_fastshm._core import BLOCK_LIMIT, CONTROL_SIZE, LAYOUT_VERSION, READER_SLOTS, Segment, layout

# As in src/ofs_layout.h; a test compares them.
MAGIC_CONTROL = 0x314C54434D4E4F
MAGIC_DIRECTORY = 0x315249444D4E4F
LOCK_READER0 = 1
FLAG_EXTERNAL = 2
_IN_USE = (1 << 40) - 1  # of a block's word: takes left in bits 39..32, holders below
_TAKES = 0xFF << 32

_FIELDS = {(structure, field): (offset, size) for structure, field, offset, size in layout()}
_SIZES = {name: max(o + n for (s, _), (o, n) in _FIELDS.items() if s == name) for name, _ in _FIELDS}
_BLOCKS_OFFSET = CONTROL_SIZE - BLOCK_LIMIT * _SIZES["ofs_block"]
_CHUNK = 4096  # descriptors read at a time
_ANYWHERE = -1  # instead of a data segment's number: also elsewhere

ENDPOINT_LIMIT = _FIELDS["ofs_directory", "endpoint"][1] // 8
HALF_MADE = "its maker died before it was finished"


@dataclass(frozen=True)
class Holder:
    """A process that has read from an endpoint.

    Attributes:
        slot: its place; 31 is shared by all that found no other free.
        pid: as it called itself, perhaps in another PID namespace. For people: whether it lives says `alive`.
        alive: does it hold the slot's lock? What a dead one held is freed when its producer needs room.
        since_s: seconds since it took the slot.
        blocks: payloads that its views keep.
    """

    slot: int
    pid: int
    alive: bool
    since_s: float
    blocks: int


@dataclass(frozen=True)
class Blocks:
    """Block descriptors by state.

    Attributes:
        pending: payloads with takes left that nobody looks at.
        held_untaken: looked at, with takes left.
        held: looked at, all takes used up.
        free: the rest of the descriptors that exist.
        takes: takes left, in all.
        pending_bytes: serialized size of the payloads with takes left.
        held_bytes: of those that are looked at.
        oldest_s: age of the oldest payload with takes left; None when there is none.
    """

    pending: int
    held_untaken: int
    held: int
    free: int
    takes: int
    pending_bytes: int
    held_bytes: int
    oldest_s: float | None

    @property
    def untaken(self) -> int:
        """Payloads with takes left."""
        return self.pending + self.held_untaken


@dataclass(frozen=True)
class Control:
    """What a control segment says.

    Attributes:
        pid: of the producer, as it called itself. For people only.
        closed: will nothing more come, for it closed or an heir tidied up?
        age_s: seconds since it was made.
        dead_s: seconds since somebody first found the producer dead; None when nobody has.
        orphan_ttl_s: how long from then on its untaken payloads are kept.
        blocks: its payloads.
        holders: who reads from it.
        held_segments: numbers of the data segments that living holders look at; None when these may be any.
    """

    pid: int
    closed: bool
    age_s: float
    dead_s: float | None
    orphan_ttl_s: float
    blocks: Blocks
    holders: tuple[Holder, ...]
    held_segments: tuple[int, ...] | None

    @property
    def orphan_left_s(self) -> float:
        """Seconds that untaken payloads are still kept if the producer is dead; 0 once a sweep may drop them."""
        if self.closed or not self.blocks.untaken:
            return 0.0
        return max(self.orphan_ttl_s - (self.dead_s or 0.0), 0.0)


def read_control(fd: int, name: str) -> Control | str:
    """What a control segment says, or in words why it says nothing.

    Args:
        fd: a descriptor of it.
        name: for messages.
    """
    head = os.pread(fd, _SIZES["ofs_control"], 0)
    problem = _problem(head, "ofs_control", MAGIC_CONTROL)
    if problem:
        return problem
    now = time.monotonic_ns()
    if not os.fstat(fd).st_size == _get(head, "ofs_control", "size")[0] == CONTROL_SIZE:
        return "its sizes disagree"
    ready, pid, created, ttl, closed, died = _get(
        head, "ofs_control", "blocks_ready", "pid", "created_ns", "orphan_ttl_ns", "closed", "died_ns"
    )
    blocks, held = _read_blocks(fd, min(ready, BLOCK_LIMIT), now)
    holders = tuple(_holders(fd, name, held, now))
    held_in = {number for each in holders if each.alive for number in held[each.slot]}
    return Control(
        pid,
        bool(closed),
        _seconds(now, created),
        _seconds(now, died) if died else None,
        ttl / 1e9,
        blocks,
        holders,
        None if _ANYWHERE in held_in else tuple(sorted(held_in)),
    )


class BlockRow(NamedTuple):
    """A block descriptor: its last publication, of which nothing may be left."""

    takes: int
    """How many are left."""
    holders: int
    """A bit for each reader slot that looks at it."""
    sequence: int
    """Number of the publication, counted from 1 by each producer."""
    edge: int
    """Hash of the edge: `omni_fastshm.keys.edge_hash`."""
    offset: int
    """Of the frame in its data segment, in bytes."""
    frame_size: int
    """Bytes that it takes there."""
    total_size: int
    """Serialized size of the payload."""
    published_ns: int
    """CLOCK_MONOTONIC."""
    segment: int
    """Number of the data segment."""

    @property
    def in_use(self) -> bool:
        """Is somebody to come, or looking?"""
        return bool(self.takes or self.holders)


def read_rows(fd: int) -> tuple[list[BlockRow], bool]:
    """All descriptors in a control segment that were ever used, and whether puts wait for room there.

    Args:
        fd: a descriptor of a segment that `read_control` found sound.
    """
    head = os.pread(fd, _SIZES["ofs_control"], 0)
    ready, space = _get(head, "ofs_control", "blocks_ready", "space")
    size = _SIZES["ofs_block"]
    rows = []
    for data in _blocks(fd, ready):
        for index, (sequence,) in enumerate(_columns(data, "sequence")):
            if sequence:
                rows.append(_row(data[index * size : (index + 1) * size]))
    return rows, bool(space & 1)


def read_untaken(fd: int) -> dict[int, tuple[int, int]]:
    """Payloads with takes left, and their bytes, by the hash of their edge.

    Args:
        fd: a descriptor of a segment that `read_control` found sound, or of one's own.
    """
    ready = _get(os.pread(fd, _SIZES["ofs_control"], 0), "ofs_control", "blocks_ready")[0]
    found: dict[int, tuple[int, int]] = {}
    for data in _blocks(fd, ready):
        for word, edge, total in _columns(data, "word", "edge", "total_size"):
            if word & _TAKES:
                number, size = found.get(edge, (0, 0))
                found[edge] = number + 1, size + total
    return found


def _blocks(fd: int, ready: int) -> Iterator[bytes]:
    """The descriptors that have memory, piece by piece: a damaged segment may claim to have many."""
    size, ready = _SIZES["ofs_block"], min(ready, BLOCK_LIMIT)
    for first in range(0, ready, _CHUNK):
        data = os.pread(fd, min(_CHUNK, ready - first) * size, _BLOCKS_OFFSET + first * size)
        if len(data) >= size:
            yield data[: len(data) // size * size]


def _columns(blocks: bytes, *names: str) -> Iterator[tuple[int, ...]]:
    """These fields, of eight bytes each, of every descriptor."""
    words, step = memoryview(blocks).cast("Q"), _SIZES["ofs_block"] // 8
    return zip(*(words[_FIELDS["ofs_block", name][0] // 8 :: step].tolist() for name in names), strict=True)


def _row(block: bytes) -> BlockRow:
    word, *rest = _get(block, "ofs_block", "word", *BlockRow._fields[2:])
    return BlockRow(word >> 32 & 0xFF, word & 0xFFFFFFFF, *rest)


def read_directory(fd: int) -> list[int] | str:
    """The endpoint ids in a directory, or in words why there are none to be had."""
    head = os.pread(fd, _SIZES["ofs_directory"], 0)
    problem = _problem(head, "ofs_directory", MAGIC_DIRECTORY)
    if problem:
        return problem
    if not len(head) == _get(head, "ofs_directory", "size")[0] == os.fstat(fd).st_size:
        return "its sizes disagree"
    offset, size = _FIELDS["ofs_directory", "endpoint"]
    return [each for each in memoryview(head)[offset : offset + size].cast("Q").tolist() if each]


def _problem(head: bytes, structure: str, magic: int) -> str | None:
    if len(head) < _SIZES[structure]:
        return HALF_MADE
    found, version = _get(head, structure, "magic", "version")
    if found == 0:
        return HALF_MADE
    if found != magic:
        return "no segment of omni-fastshm, or overwritten"
    if version != LAYOUT_VERSION:
        return f"made by another version of omni-fastshm (layout {version}, this is {LAYOUT_VERSION})"
    return None


def _get(data: bytes, structure: str, *names: str) -> list[int]:
    """Fields of a structure that starts `data`."""
    places = [_FIELDS[structure, name] for name in names]
    return [int.from_bytes(data[offset : offset + size], sys.byteorder) for offset, size in places]


def _seconds(now: int, then: int) -> float:
    return max(now - then, 0) / 1e9


_Held = defaultdict[int, Counter[int]]
"""By reader slot: how many blocks are held in each data segment."""


def _read_blocks(fd: int, ready: int, now: int) -> tuple[Blocks, _Held]:
    size = _SIZES["ofs_block"]
    data = os.pread(fd, ready * size, _BLOCKS_OFFSET)
    data = data[: len(data) // size * size]
    held: _Held = defaultdict(Counter)
    counts = {(True, False): 0, (True, True): 0, (False, True): 0}  # by: takes left?, looked at?
    takes = pending_bytes = held_bytes = 0
    oldest = now
    first = _FIELDS["ofs_block", "word"][0] // 8
    for index, word in enumerate(memoryview(data).cast("Q")[first :: size // 8].tolist()):
        if not word & _IN_USE:
            continue
        block = data[index * size : (index + 1) * size]
        total, published, segment, flags = _get(block, "ofs_block", "total_size", "published_ns", "segment", "flags")
        left, bits = word >> 32 & 0xFF, word & 0xFFFFFFFF
        counts[left > 0, bits > 0] += 1
        takes += left
        pending_bytes += total if left else 0
        held_bytes += total if bits else 0
        oldest = min(oldest, published) if left else oldest
        for slot in range(READER_SLOTS):
            if bits >> slot & 1:
                held[slot][_ANYWHERE if flags & FLAG_EXTERNAL else segment] += 1
    pending, both, used = counts.values()
    free = ready - pending - both - used
    oldest_s = _seconds(now, oldest) if pending + both else None
    return Blocks(pending, both, used, free, takes, pending_bytes, held_bytes, oldest_s), held


def _holders(fd: int, name: str, held: _Held, now: int) -> Iterator[Holder]:
    """Whoever reads; to be asked after the blocks were read: a bit whose slot is free now was a dead one's then."""
    head = os.pread(fd, _SIZES["ofs_control"], 0)
    readers = _get(head, "ofs_control", "readers")[0]
    start, step = _FIELDS["ofs_control", "reader"][0], _SIZES["ofs_reader"]
    for slot in range(READER_SLOTS):
        blocks = held[slot].total() if slot in held else 0
        if readers >> slot & 1 or blocks:
            pid, since = _get(head[start + slot * step :], "ofs_reader", "pid", "since_ns")
            yield Holder(slot, pid, Segment.locked(fd, name, LOCK_READER0 + slot), _seconds(now, since), blocks)
