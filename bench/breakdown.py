"""Where `put` and `get` of omni_fastshm spend their time: ``python -m bench.breakdown S2 S4 S8``.

Prints, per load, medians of each step called by hand, then the functions that take most of the time by
`cProfile` (whose own cost inflates what is called often; compare shares, not times).
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import payloads
from bench.peers import ours

TURNS = {"S5": 100, "S6": 30, "S7": 60}
MANY = 3000


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    start = time.perf_counter_ns()
    result = function(*arguments)
    return time.perf_counter_ns() - start, result


def steps(load: str) -> dict[str, float]:
    """Median microseconds of put, get and dropping the result, and of the codec's steps alone."""
    from omni_fastshm import codec

    data = payloads.make(load)
    end = ours.open(f"bench{os.getpid()}-breakdown", "both", load, 1)
    target = np.empty(codec.plan(data).size + 4096, dtype=np.uint8)
    times: dict[str, list[int]] = {}

    def note(step: str, nanoseconds: int) -> None:
        times.setdefault(step, []).append(nanoseconds)

    for _ in range(TURNS.get(load, MANY)):
        spent, sent = timed(ours.put, end, data)
        note("put", spent)
        spent, got = timed(ours.get, end, sent)
        note("get", spent)
        start = time.perf_counter_ns()
        del got
        note("drop the result", time.perf_counter_ns() - start)
        spent, plan = timed(codec.plan, data)
        note("of it: plan", spent)
        spent, _ = timed(plan.pack_into, target.ctypes.data)
        note("of it: pack into warm memory", spent)
        spent, frame = timed(plan.to_bytes) if load in ("S1", "S2") else (0, None)
        if frame is not None:
            note("of it: plan to bytes", spent)
            note("of it: decode inline", timed(codec.decode, frame)[0])
    end.close()
    return {step: float(np.median(values)) / 1e3 for step, values in times.items()}


def profile(load: str, which: str) -> pstats.Stats:
    """`cProfile` of many puts or gets of one load."""
    data = payloads.make(load)
    profiler = cProfile.Profile()
    end = ours.open(f"bench{os.getpid()}-profile", "both", load, 1)
    for _ in range(TURNS.get(load, MANY)):
        if which == "put":
            sent = profiler.runcall(ours.put, end, data)
            ours.get(end, sent)
        else:
            profiler.runcall(ours.get, end, ours.put(end, data))
    end.close()
    return pstats.Stats(profiler)


def main(loads: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    gc.disable()
    for load in loads or ["S2", "S4", "S8"]:
        print(f"== {load} {payloads.LOADS[load]}")
        for step, micro in steps(load).items():
            print(f"  {step:32s} {micro:10.2f} µs")
        for which in ("put", "get"):
            print(f"-- {which}, by function")
            profile(load, which).strip_dirs().sort_stats("tottime").print_stats(14)


if __name__ == "__main__":
    main(sys.argv[1:])
