"""How to copy into shared memory that a process on another core has just read: by which stores, asking for what ahead.

Run: ``python -m bench.copy_kernels``; prints one JSON object, kept as ``bench/results/kernels/copy.json``. A forked
reader spins on a word, sums the bytes when it changes, and answers; the writer copies into the same place each time.
These ways take turns:

- ``streaming``: by streaming stores, in one call; from 8 MiB on that is the kernel for what is not in the cache;
- ``as_cached``, from 8 MiB on: the same in calls of 4 MiB, for which it is the kernel for what is in the cache;
- ``memcpy``: by ordinary stores.

"usable" ends when the reader saw the word, "read" when it had read every byte. ``source_summed_us`` is what the core of
the writer takes to read the source once and to write nothing: no copy by one core can take less.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from omni_fastshm import _codec

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 28 << 20, 64 << 20)
FAR_FROM = 8 << 20  # OFS_FAR_FROM
ROUNDS = 60
FEW = 31  # from FAR_FROM on
NEVER = (1 << 64) - 1


class Piece(ctypes.Structure):
    _fields_ = (("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("size", ctypes.c_size_t))


copy_pieces = ctypes.CDLL(_codec.__file__).ofs_copy_pieces
copy_pieces.argtypes = [ctypes.POINTER(Piece), ctypes.c_size_t, ctypes.c_size_t]


def ways(target: int, source: int, size: int) -> dict[str, tuple[list[Piece], int]]:
    """By name: the calls that copy all of it, and the size from which they stream."""

    def cut(step: int) -> list[Piece]:
        return [Piece(target + at, source + at, min(step, size - at)) for at in range(0, size, step)]

    both = {"streaming": (cut(size), 1 << 10), "memcpy": (cut(size), NEVER)}
    return {**both, "as_cached": (cut(FAR_FROM // 2), 1 << 10)} if size >= FAR_FROM else both


def rounds(size: int) -> int:
    return FEW if size >= FAR_FROM else ROUNDS


def spin_until(ready: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("the other process does not answer")


def reader(words: np.ndarray, data: np.ndarray) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    for turn in range(1, sum(len(ways(0, 0, size)) * rounds(size) for size in SIZES) + 1):
        spin_until(lambda turn=turn: words[0] == turn)
        words[2] = time.monotonic_ns()
        data[: int(words[1]) // 8].sum()
        words[3] = time.monotonic_ns()
        words[4] = turn


def main() -> None:
    words = np.frombuffer(mmap.mmap(-1, 4096), dtype=np.int64)
    memory = mmap.mmap(-1, SIZES[-1])
    data = np.frombuffer(memory, dtype=np.int64)
    data[:] = 1
    source = np.random.default_rng(1).integers(0, 255, SIZES[-1], np.uint8)  # untouched pages are all one page of zeros
    words_of_source = source.view(np.int64)
    child = os.fork()
    if child == 0:
        try:
            reader(words, data)
        finally:
            os._exit(0)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures, turn = [], 0
    for size in SIZES:
        times: dict[tuple[str, str], list[float]] = {}
        each = list(ways(data.ctypes.data, source.ctypes.data, size).items())
        for index in range(rounds(size)):
            if size >= FAR_FROM:
                start = time.monotonic_ns()
                words_of_source[: size // 8].sum()
                times.setdefault(("source", "summed"), []).append((time.monotonic_ns() - start) / 1e3)
            for way, (pieces, limit) in each[index % len(each) :] + each[: index % len(each)]:
                turn += 1
                words[1] = size
                start = time.monotonic_ns()
                for piece in pieces:
                    copy_pieces(piece, 1, limit)
                words[0] = turn
                spin_until(lambda turn=turn: words[4] == turn)
                times.setdefault((way, "usable"), []).append((words[2] - start) / 1e3)
                times.setdefault((way, "read"), []).append((words[3] - start) / 1e3)
        row = {f"{way}_{what}_us": round(statistics.median(found), 1) for (way, what), found in times.items()}
        figures.append({"bytes": size, **row})
    os.waitpid(child, 0)
    machine = {"machine": platform.machine(), "kernel": platform.release().partition("-")[0], "cores": os.cpu_count()}
    print(json.dumps({**machine, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
