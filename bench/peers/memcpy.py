"""The physical limit: the payload's bytes copied by one `memmove` into a mapping that both sides have warm.

There is no message: both ends know the load beforehand, its bytes lie side by side already, and `get` hands
out tensors that were built over the mapping when it was opened. No transport that copies once can do less
work.

Where the bytes go decides what the copy costs. Within one process the same place again and again is best: it
stays in the cache. Between two it is worst while the payload fits the cache of the core that reads it: each
line has to be taken back from there, which costs several times the copy. There the places rotate, so that the
other core has forgotten them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import msgspec
import torch

from bench import payloads

label = "memcpy, warm (limit)"
differs = "No transport: nothing is said, nothing is checked."
role = "limit"

ALIGNMENT = 64
ROTATE_SIZES = range(64 * payloads.KIB, 4 * payloads.MIB)
ROTATE_OVER = 64 * payloads.MIB


class Mapping:
    def __init__(self, place: str, side: str, load: str, depth: int, rotates: bool = True) -> None:
        template = payloads.make(load)
        pieces = [payloads.raw(t).tobytes() for t in payloads.leaves(template)]
        pieces.append(msgspec.msgpack.encode(template, enc_hook=lambda tensor: None))
        joined = bytearray().join(piece + bytes(-len(piece) % ALIGNMENT) for piece in pieces)
        # As aligned as a tensor's own memory: an odd address can double a copy's time.
        self.source = torch.frombuffer(joined, dtype=torch.uint8).clone()
        self.address = self.source.data_ptr()
        self.size = self.source.numel()
        rotates = rotates and side != "both" and self.size in ROTATE_SIZES
        places = max(depth, ROTATE_OVER // self.size if rotates else 1)
        total = places * self.size
        self.owner = side != "get"
        self.segment = SharedMemory(f"{place}-copies", create=self.owner, size=total if self.owner else 0)
        buffer = payloads.buffer_of(self.segment)
        anchor = ctypes.c_char.from_buffer(buffer)
        base = ctypes.addressof(anchor)
        del anchor
        if self.owner:
            ctypes.memset(base, 0, total)
        starts = range(0, total, self.size)
        self.trees = [_over(template, buffer, _places(start, pieces)) for start in starts]
        self.targets = itertools.cycle((number, base + start) for number, start in enumerate(starts))
        payloads.read_all(self.trees)  # this side's page table now knows every page

    def close(self) -> None:
        self.trees = []
        self.segment.close()
        if self.owner:
            self.segment.unlink()


def open(place: str, side: str, load: str, depth: int) -> Mapping:
    return Mapping(place, side, load, depth)


def put(end: Mapping, data: Any) -> int:
    number, target = next(end.targets)
    ctypes.memmove(target, end.address, end.size)
    return number


def get(end: Mapping, note: int) -> Any:
    return end.trees[note]


def _places(start: int, pieces: list[bytes]) -> Iterator[int]:
    for piece in pieces:
        yield start
        start += -(-len(piece) // ALIGNMENT) * ALIGNMENT


def _over(data: Any, buffer: memoryview, places: Iterator[int]) -> Any:
    """The same tree with its tensors replaced by tensors over the mapping."""
    if isinstance(data, torch.Tensor):
        flat = torch.frombuffer(buffer, dtype=data.dtype, count=data.numel(), offset=next(places))
        return flat.reshape(data.shape)
    if isinstance(data, dict):
        return {key: _over(value, buffer, places) for key, value in data.items()}
    if isinstance(data, list):
        return [_over(value, buffer, places) for value in data]
    return data
