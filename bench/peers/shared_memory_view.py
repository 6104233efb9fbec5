"""The standard library without the copy out: as `shared_memory_pickle`, but the reader gets views of the slot."""

from __future__ import annotations

import pickle
from typing import Any

from bench.peers._slots import Slots, pieces_of, put

__all__ = ["differs", "get", "label", "open", "put"]

label = "shared_memory + pickle 5, views"
differs = "A view shows the next payload's bytes as soon as its slot is written again: nobody holds the writer back."


def open(place: str, side: str, load: str, depth: int) -> Slots:
    return Slots(place, side, load, depth)


def get(end: Slots, note: tuple[int, list[int]]) -> Any:
    head, *buffers = pieces_of(end, note)
    return pickle.loads(head, buffers=buffers)
