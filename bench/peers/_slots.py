"""One kept segment of the standard library's shared memory with room for a few messages, used in turn."""

from __future__ import annotations

import itertools
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from bench import payloads
from bench.peers import _pickle5

ALIGNMENT = 64


class Slots:
    def __init__(self, place: str, side: str, load: str, depth: int) -> None:
        self.owner = side != "get"
        # Room for the tensors, their alignment, and what pickle says about everything else.
        self.size = payloads.tensor_bytes(payloads.make(load)) + 256 * payloads.KIB
        total = self.size * depth if self.owner else 0
        self.segment = SharedMemory(f"{place}-slots", create=self.owner, size=total)
        self.buffer = payloads.buffer_of(self.segment)
        self.starts = itertools.cycle(range(0, self.size * depth, self.size))

    def close(self) -> None:
        self.segment.close()
        if self.owner:
            self.segment.unlink()


def put(end: Slots, data: Any) -> tuple[int, list[int]]:
    pieces = _pickle5.take_apart(data)
    target = end.buffer
    slot = start = next(end.starts)
    for piece in pieces:
        target[start : start + piece.nbytes] = piece
        start += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return slot, [piece.nbytes for piece in pieces]


def pieces_of(end: Slots, note: tuple[int, list[int]]) -> list[memoryview]:
    start, sizes = note
    pieces = []
    for size in sizes:
        pieces.append(end.buffer[start : start + size])
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return pieces
