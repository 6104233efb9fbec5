"""Producing in place: `allocate`, `put` and `get` of 64 MiB that nobody copies.

"touched" writes one byte and reads nothing: the calls alone. "filled" writes and reads all of it, as a stage does, and
so leaves both processes with caches full of payload.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import payloads
from bench.conftest import PLACE
from bench.test_two_process import percentiles
from bench.two_process import Pair, Samples

LOAD = "S6"
MESSAGES = {"touched": 400, "filled": 60}
WARM = 5


def test_loan(record: dict[str, Any], quick: bool, pinned: int | None) -> None:
    found: dict[str, Any] = {"bytes": payloads.tensor_bytes(payloads.make(LOAD))}
    with Pair("ours", PLACE, pinned) as pair:
        pair.open(LOAD)
        gc.collect()
        gc.disable()
        try:
            pair.check(producing(pair, [], filled=True))
            for way, count in MESSAGES.items():
                found[way] = measure(pair, way == "filled", 2 if quick else count)
        finally:
            gc.enable()
            pair.close_ends()
    record["loan"] = found


def measure(pair: Pair, filled: bool, count: int) -> dict[str, Any]:
    allocated: list[int] = []
    samples = Samples()
    prepare = producing(pair, allocated, filled)
    pair.run(WARM, prepare=prepare, reads=filled)
    del allocated[:]
    pair.run(count, samples, prepare=prepare, reads=filled)
    return {
        "messages": count,
        "allocate": percentiles(allocated),
        "put": percentiles(samples.put),
        "usable": percentiles(samples.usable),
    }


def producing(pair: Pair, allocated: list[int], filled: bool) -> Callable[[], dict[str, Any]]:
    """Gives a payload made in place, and notes how long its memory took."""
    source: torch.Tensor = pair.data["x"]

    def prepare() -> dict[str, Any]:
        start = time.monotonic_ns()
        loan = pair.end.connector.allocate(source.shape, source.dtype)
        allocated.append(time.monotonic_ns() - start)
        if filled:
            loan.copy_(source)
        else:
            loan[0] = 1
        return {**pair.data, "x": loan}

    return prepare
