"""How to copy into shared memory that a process on another core has just read: in which way, by which stores.

Run: ``python -m bench.copy_kernels``; prints one JSON object, kept as ``bench/results/kernels/copy*.json``. A forked
reader spins on a word, sums the bytes when it changes or leaves them alone, and answers; the writer copies into the
same place each time. These ways take turns:

- ``chosen``: as `put` copies, which is by one of the next two, whichever it finds to take less time;
- ``streaming``: by streaming stores;
- ``string``: by the CPU's own copy, ``rep movsb``;
- ``memcpy``: by the ordinary stores of the C library, or whatever it does instead for that size.

Each turn is a few copies in a row, and the last of them count: the first ones find the caches as the way before left
them. "usable" ends when the reader saw the word, "read" when it had read every byte; "unread" is "usable" with a reader
that reads none. ``round_trip_ns`` is the least that a word takes to the other process and back, before and after, with
some hundred nanoseconds of Python in it: it tells whether the two cores share a cache, which changes with where a
hypervisor puts them. ``source_summed_us`` is what the core of the writer takes to read the source once and to write
nothing.
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
STREAM_SHARED_FROM = 4 << 10  # OFS_STREAM_SHARED_FROM
STREAM, STRING = 0, 1  # enum ofs_way
NEVER = (1 << 64) - 1
ROUNDS = 12
FEW = 6  # from FAR_FROM on
IN_A_ROW, COUNTED = 7, 3
CHOOSING = 100  # copies until `chosen` has chosen
ROUND_TRIPS = 3000


class Piece(ctypes.Structure):
    _fields_ = (("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("size", ctypes.c_size_t))


_library = ctypes.CDLL(_codec.__file__)
copy_pieces = _library.ofs_copy_pieces
copy_pieces.argtypes = [ctypes.POINTER(Piece), ctypes.c_size_t, ctypes.c_size_t]
_copy_by = _library.ofs_copy_by
_copy_by.argtypes = [ctypes.c_int, ctypes.POINTER(Piece), ctypes.c_size_t, ctypes.c_size_t]

WAYS: dict[str, Callable[[Piece], None]] = {
    "chosen": lambda piece: copy_pieces(piece, 1, STREAM_SHARED_FROM),
    "streaming": lambda piece: _copy_by(STREAM, piece, 1, 1 << 10),
    "string": lambda piece: _copy_by(STRING, piece, 1, 1 << 10),
    "memcpy": lambda piece: copy_pieces(piece, 1, NEVER),
}

TURN, BYTES, SEEN, READ, ANSWER = 0, 8, 16, 17, 24  # numbers of words, what each side writes on lines of its own
END, UNREAD, ECHO = -1, -2, 0  # instead of a number of bytes to read


def spin_until(ready: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("the other process does not answer")


def reader(words: memoryview, data: np.ndarray) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    turn = 0
    while words[BYTES] != END:
        turn += 1
        spin_until(lambda turn=turn: words[TURN] >= turn)
        if words[BYTES] != ECHO:
            words[SEEN] = time.monotonic_ns()
            if words[BYTES] > 0:
                data[: words[BYTES] // 8].sum()
            words[READ] = time.monotonic_ns()
        words[ANSWER] = turn


class Writer:
    """The side that copies; the reader answers each turn."""

    def __init__(self, words: memoryview, target: int, source: int) -> None:
        self.words, self.target, self.source, self.turn = words, target, source, 0

    def send(self, what: int) -> None:
        self.words[BYTES] = what
        self.turn += 1
        self.words[TURN] = self.turn
        spin_until(lambda: self.words[ANSWER] >= self.turn)

    def round_trip_ns(self) -> int:
        least = 1 << 62
        for _ in range(ROUND_TRIPS):
            self.words[BYTES] = ECHO
            self.turn += 1
            turn, words = self.turn, self.words
            start = time.perf_counter_ns()
            words[TURN] = turn
            while words[ANSWER] != turn:
                pass
            least = min(least, time.perf_counter_ns() - start)
        return least

    def in_a_row(self, way: str, size: int, reads: bool, count: int = IN_A_ROW) -> list[tuple[float, float]]:
        """The last few of so many copies: microseconds until usable, and until read."""
        piece = Piece(self.target, self.source, size)
        copy, times = WAYS[way], []
        for _ in range(count):
            start = time.monotonic_ns()
            copy(piece)
            self.send(size if reads else UNREAD)
            times.append(((self.words[SEEN] - start) / 1e3, (self.words[READ] - start) / 1e3))
        return times[-COUNTED:]


def measure(writer: Writer, size: int, summed: Callable[[int], object]) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    trips = [writer.round_trip_ns()]
    for reads in (True, False):
        writer.in_a_row("chosen", size, reads, CHOOSING)
        for _ in range(FEW if size >= FAR_FROM else ROUNDS):
            if size >= FAR_FROM and reads:
                start = time.monotonic_ns()
                summed(size)
                times.setdefault("source_summed_us", []).append((time.monotonic_ns() - start) / 1e3)
            for way in WAYS:
                for usable, read in writer.in_a_row(way, size, reads):
                    times.setdefault(f"{way}_{'usable' if reads else 'unread'}_us", []).append(usable)
                    if reads:
                        times.setdefault(f"{way}_read_us", []).append(read)
    trips.append(writer.round_trip_ns())
    row = {name: round(statistics.median(found), 1) for name, found in times.items()}
    return {"bytes": size, "round_trip_ns": trips, **row}


def main() -> None:
    words = memoryview(mmap.mmap(-1, 4096)).cast("q")
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
    writer = Writer(words, data.ctypes.data, source.ctypes.data)
    try:
        figures = [measure(writer, size, lambda size: words_of_source[: size // 8].sum()) for size in SIZES]
    finally:
        words[BYTES] = END
        words[TURN] = writer.turn + 1
        os.waitpid(child, 0)
    machine = {"machine": platform.machine(), "kernel": platform.release().partition("-")[0], "cores": os.cpu_count()}
    print(json.dumps({**machine, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
