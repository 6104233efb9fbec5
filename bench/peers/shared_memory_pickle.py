"""The standard library at its best: pickle protocol 5, buffers out of band, through one kept shared memory
segment.

The segment is made once, so no message pays for fresh shared pages. The reader copies the payload out, because the
writer overwrites it with a later one.
"""

from __future__ import annotations

import pickle
from typing import Any

from bench.peers._slots import Slots, pieces_of, put

__all__ = ["differs", "get", "label", "open", "put"]

label = "shared_memory + pickle 5, copied out"
differs = "One fixed slot per message under way; nobody checks that it was read before it is written again."


def open(place: str, side: str, load: str, depth: int) -> Slots:
    return Slots(place, side, load, depth)


def get(end: Slots, note: tuple[int, list[int]]) -> Any:
    head, *buffers = [bytearray(piece) for piece in pieces_of(end, note)]
    return pickle.loads(head, buffers=buffers)
