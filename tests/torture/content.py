"""What the torture sends: every byte follows from a payload's id, so that torn, shifted, mixed or stale bytes show."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = 1 << 17  # leaves are pieces of this many random words, so at most 1 MiB
PATTERN: NDArray[np.uint64] = np.random.Generator(np.random.PCG64(7)).integers(0, 2**64, WORDS, dtype=np.uint64)

Bytes = NDArray[np.uint8]


def _mixed(number: int) -> int:
    """64 bits that depend on all bits of `number` (the finaliser of SplitMix64)."""
    z = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def leaf(uid: int, index: int, nbytes: int) -> Bytes:
    """The bytes of leaf `index`: where they start in the pattern and what they are combined with depend on both."""
    key = _mixed(uid * 64 + index)
    words = -(-nbytes // 8)
    start = key % (WORDS - words)
    mixed: Bytes = (PATTERN[start : start + words] ^ np.uint64(key)).view(np.uint8)[:nbytes]
    return mixed


def tree(uid: int, sizes: tuple[int, ...], leaves: list[Bytes]) -> dict[str, Any]:
    """A payload around leaves that are filled already."""
    return {"uid": uid, "sizes": sizes, "leaves": leaves, "end": uid}


def uid_of(data: Any) -> int:
    """The id that a received payload carries, or -1 when its frame is not one of ours."""
    try:
        return int(data["uid"]) if data["uid"] == data["end"] and len(data["leaves"]) == len(data["sizes"]) else -1
    except (TypeError, KeyError):
        return -1


def wrong(uid: int, sizes: tuple[int, ...], leaves: list[Bytes], skip: int = 0) -> str:
    """What is wrong with leaves of which the first `skip` bytes were cut off; "" when every byte is right."""
    for index, (size, given) in enumerate(zip(sizes, leaves, strict=True)):
        want = leaf(uid, index, size)[skip:]
        if given.dtype != np.uint8 or given.shape != want.shape:
            return f"leaf {index} of {uid} is {given.dtype}{given.shape} instead of {want.shape}"
        if not np.array_equal(given, want):
            bad = np.flatnonzero(given != want)
            return f"leaf {index} of {uid}: {bad.size} of {size} bytes differ, from {bad[0] + skip} to {bad[-1] + skip}"
    return ""
