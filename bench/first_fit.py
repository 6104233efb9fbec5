"""Why space is found first fit: copying into memory just used against memory used longest ago.

Run: ``python -m bench.first_fit``; prints one JSON object, kept as ``bench/results/kernels/first_fit.json``. Both ways
copy the same bytes with the same kernel into one warm mapping, in turns, so that a slow minute hits both.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import statistics
import time

RING = 64 << 20


def measure(size: int, rounds: int = 9) -> dict[str, float]:
    ring = mmap.mmap(-1, RING, mmap.MAP_SHARED)
    ring.write(b"\1" * RING)
    base = ctypes.addressof(ctypes.c_char.from_buffer(ring))
    source = ctypes.create_string_buffer(size)
    blocks = RING // size

    def run(step: int) -> float:
        start = time.perf_counter()
        for i in range(blocks):
            ctypes.memmove(base + i * step, source, size)
        return (time.perf_counter() - start) / blocks * 1e6

    run(size)
    cycling, reusing = [], []
    for _ in range(rounds):
        cycling.append(run(size))
        reusing.append(run(0))
    return {
        "bytes": size,
        "cycling_us": round(statistics.median(cycling), 2),
        "reusing_us": round(statistics.median(reusing), 2),
        "ratio": round(statistics.median(c / r for c, r in zip(cycling, reusing, strict=True)), 2),
    }


if __name__ == "__main__":
    figures = [measure(size) for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)]
    print(json.dumps({"machine": platform.machine(), "kernel": platform.release(), "figures": figures}))
