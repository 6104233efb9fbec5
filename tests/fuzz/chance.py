"""Choices that a seed, a target and an index decide alone, so that every input can be made again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_POWERS = (0, 3, 7, 8, 12, 15, 16, 24, 31, 32, 33, 40, 47, 48, 61, 62, 63, 64)
EDGES = sorted({max(0, (1 << bits) + by) for bits in _POWERS for by in (-65, -64, -16, -9, -8, -1, 0, 1, 8)})
"""Numbers next to where sizes wrap, change sign, or leave a page."""

TEXTS: list[str] = [
    "", "a", "x" * 31, "x" * 32, "\0", "a\0b", "\ud800", "é✓", "../..", "/", ".", "1e999999999", "9" * 5000, "-1", "%s",
    "<f4", "|O", "V2000000000", "B", "L", "RGB", "int", "load", "cpu", "builtins:tuple", ":", "torch:Tensor",
]  # fmt: skip


class Chance(random.Random):
    """The source of all choices for one input.

    Args:
        seed: of the run.
        target: name of what is fuzzed.
        index: number of the input.
    """

    def __init__(self, seed: int = 0, target: str = "", index: int = 0) -> None:
        self.index = index
        super().__init__(f"{seed}/{target}/{index}")

    def __reduce__(self) -> Any:
        raise TypeError("made from seed, target and index, never copied")

    def one_in(self, count: int) -> bool:
        return self.randrange(count) == 0

    def pick(self, items: Sequence[T]) -> T:
        return items[self.randrange(len(items))]

    def number(self, bits: int) -> int:
        """An unsigned number of that many bits: an edge, a small one, or any."""
        kind = self.randrange(4)
        if kind == 0:
            return self.randrange(20)
        if kind == 1:
            return self.getrandbits(bits)
        return self.pick(EDGES) & ((1 << bits) - 1)

    def signed(self, bits: int) -> int:
        value = self.number(bits)
        return value - (1 << bits) if value >> (bits - 1) else value

    def near(self, value: int, bits: int) -> int:
        """A number that has something to do with `value`."""
        kind = self.randrange(4)
        if kind == 0:
            return (value ^ (1 << self.randrange(bits))) & ((1 << bits) - 1)
        if kind == 1:
            return (value + self.pick((-64, -8, -1, 1, 8, 64))) & ((1 << bits) - 1)
        return self.number(bits)

    def text(self) -> str:
        kind = self.randrange(8)
        if kind == 0:
            return "".join(chr(self.pick((0, 9, 46, 47, 57, 65, 127, 233, 0x660, 0x2713, 0xD800, 0x1F600)))
                           for _ in range(self.randrange(40)))  # fmt: skip
        return self.pick(TEXTS)

    def blob(self, limit: int = 64) -> bytes:
        return self.randbytes(self.randrange(limit))

    def changed(self, data: bytes) -> bytes:
        """`data` with some bytes flipped, overwritten, moved, doubled, or taken away."""
        raw = bytearray(data)
        for _ in range(self.pick((1, 1, 1, 2, 3, 8))):
            kind = self.randrange(7)
            at = self.randrange(len(raw) + 1)
            if kind == 0 and at < len(raw):
                raw[at] ^= 1 << self.randrange(8)
            elif kind == 1 and at < len(raw):
                raw[at] = self.pick((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, self.randrange(256)))
            elif kind == 2:
                width = self.pick((2, 4, 8))
                raw[at : at + width] = self.number(width * 8).to_bytes(width, self.pick(("little", "big")))
            elif kind == 3:
                del raw[at : at + self.pick((1, 4, 8, 1 << 16))]
            elif kind == 4:
                raw[at:at] = raw[at : at + self.randrange(1, 65)]
            elif kind == 5:
                raw[at:at] = self.blob(16)
            elif raw:
                start = self.randrange(len(raw))
                piece = raw[start : start + self.randrange(1, 33)]
                raw[at : at + len(piece)] = piece
        return bytes(raw)
