"""The space allocator as Python sees it, against an oracle that knows every 64-byte cell."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from omni_fastshm._core import RingAllocator
from omni_fastshm.errors import SegmentError

CELL = 64


def rounded(size: int) -> int:
    return max(-(-size // CELL) * CELL, CELL)


class Oracle:
    """Which cells of which arena are in use."""

    def __init__(self) -> None:
        self.arenas: dict[int, list[bool]] = {}

    def mark(self, arena: int, offset: int, size: int, used: bool) -> None:
        assert offset % CELL == 0
        first, last = offset // CELL, (offset + rounded(size)) // CELL
        cells = self.arenas[arena]
        assert last <= len(cells), "outside the arena"
        assert cells[first:last] == [not used] * (last - first), "overlaps"
        cells[first:last] = [used] * (last - first)

    @property
    def used(self) -> int:
        return CELL * sum(sum(cells) for cells in self.arenas.values())

    @property
    def longest(self) -> int:
        best = 0
        for cells in self.arenas.values():
            run = 0
            for used in cells:
                run = 0 if used else run + CELL
                best = max(best, run)
        return best


class AllocatorMachine(RuleBasedStateMachine):
    """Arenas come and go, pieces are taken and given back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = RingAllocator()
        self.oracle = Oracle()

    pieces = Bundle("pieces")

    @precondition(lambda self: len(self.oracle.arenas) < 4)
    @rule(cells=st.integers(0, 40))
    def add(self, cells: int) -> None:
        arena = self.ring.add(cells * CELL)
        assert arena not in self.oracle.arenas
        assert arena <= len(self.oracle.arenas), "the number of a removed arena is used again"
        self.oracle.arenas[arena] = [False] * cells

    @rule(target=pieces, size=st.integers(0, 1500))
    def allocate(self, size: int) -> object:
        fits = rounded(size) <= self.oracle.longest
        place = self.ring.allocate(size)
        assert (place is not None) == fits
        if place is None:
            return multiple()
        self.oracle.mark(*place, size, True)
        return (*place, size)

    @rule(piece=consumes(pieces))
    def free(self, piece: tuple[int, int, int]) -> None:
        self.ring.free(*piece)
        self.oracle.mark(*piece, False)
        with pytest.raises(SegmentError):
            self.ring.free(*piece)

    @precondition(lambda self: self.oracle.arenas)
    @rule(data=st.data(), cells=st.integers(-2, 20))
    def extend(self, data: st.DataObject, cells: int) -> None:
        arena = data.draw(st.sampled_from(sorted(self.oracle.arenas)))
        size = len(self.oracle.arenas[arena]) + cells
        if cells < 0:
            with pytest.raises((SegmentError, OverflowError)):
                self.ring.extend(arena, size * CELL)
        else:
            self.ring.extend(arena, size * CELL)
            self.oracle.arenas[arena] += [False] * cells

    @precondition(lambda self: self.oracle.arenas)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        arena = data.draw(st.sampled_from(sorted(self.oracle.arenas)))
        if any(self.oracle.arenas[arena]):
            with pytest.raises(SegmentError):
                self.ring.remove(arena)
        else:
            self.ring.remove(arena)
            del self.oracle.arenas[arena]

    @rule(arena=st.integers(0, 6), offset=st.integers(0, 3000), size=st.integers(1, 3000))
    def wrong_free(self, arena: int, offset: int, size: int) -> None:
        """Whatever overlaps a gap or an edge is refused, and nothing changes."""
        cells = self.oracle.arenas.get(arena)
        first, last = offset // CELL, -(-(offset + rounded(size)) // CELL)
        if cells is not None and last <= len(cells) and all(cells[first:last]):
            return
        with pytest.raises(SegmentError):
            self.ring.free(arena, offset, size)

    @invariant()
    def counts_agree(self) -> None:
        assert self.ring.used == self.oracle.used
        assert self.ring.capacity == CELL * sum(map(len, self.oracle.arenas.values()))
        assert self.ring.longest == self.oracle.longest


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, database=None)
TestAllocator = AllocatorMachine.TestCase


def test_blocks_never_overlap_in_a_small_ring() -> None:
    """Field fault R22: a ring of 4096 bytes, 100,000 random steps, frees out of order."""
    ring, oracle, live = RingAllocator(), Oracle(), []
    oracle.arenas[ring.add(4096)] = [False] * 64
    rng = random.Random(22)
    for _ in range(100_000):
        if rng.random() < 0.55 or not live:
            size = rng.randint(1, 1500)
            place = ring.allocate(size)
            if place is not None:
                oracle.mark(*place, size, True)
                live.append((*place, size))
        else:
            piece = live.pop(rng.randrange(len(live)))
            ring.free(*piece)
            oracle.mark(*piece, False)
        assert ring.used <= 4096
    assert ring.used == oracle.used
    for piece in live:
        ring.free(*piece)
    assert ring.used == 0
    assert ring.allocate(4096) == (0, 0)
    assert ring.allocate(1) is None


def test_sizes_beyond_four_gib() -> None:
    ring = RingAllocator()
    ring.add(12 << 30)
    assert ring.allocate(5 << 30) == (0, 0)
    assert ring.allocate(5 << 30) == (0, 5 << 30)
    assert ring.allocate(5 << 30) is None
    ring.free(0, 0, 5 << 30)
    assert ring.longest == 5 << 30


@pytest.mark.parametrize("size", [1, 63, 65, 4095])
def test_an_arena_is_a_multiple_of_64(size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 64, got {size}"):
        RingAllocator().add(size)


@pytest.mark.parametrize("size", [-1, 2**64, "1", None])
def test_sizes_are_sizes(size: object) -> None:
    ring = RingAllocator()
    ring.add(4096)
    with pytest.raises((TypeError, OverflowError)):
        ring.allocate(size)  # type: ignore[arg-type]
    assert ring.used == 0


@pytest.mark.parametrize("size", [2**64 - 1, 2**64 - 63, 2**63])
def test_sizes_near_the_end_of_the_range_find_no_room(size: int) -> None:
    ring = RingAllocator()
    ring.add(4096)
    assert ring.allocate(size) is None
    assert ring.used == 0
