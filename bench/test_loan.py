"""Producing in place: `allocate`, `put` and `get` of 64 MiB that nobody copies."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from bench import payloads
from bench.conftest import PLACE
from bench.test_two_process import percentiles
from bench.two_process import Pair, Samples

LOAD = "S6"
MESSAGES = 60


def test_loan(record: dict[str, Any], quick: bool, pinned: int | None) -> None:
    allocated: list[int] = []
    samples, warm = Samples(), Samples()
    with Pair("ours", PLACE, pinned) as pair:
        pair.open(LOAD)
        source: torch.Tensor = pair.data["x"]

        def prepare() -> dict[str, Any]:
            start = time.monotonic_ns()
            loan = pair.end.connector.allocate(source.shape, source.dtype)
            allocated.append(time.monotonic_ns() - start)
            loan.copy_(source)  # the producer's work
            return {**pair.data, "x": loan}

        gc.collect()
        gc.disable()
        try:
            pair.check(prepare)
            pair.run(1 if quick else 5, warm, prepare=prepare)
            del allocated[:]
            pair.run(2 if quick else MESSAGES, samples, prepare=prepare)
        finally:
            gc.enable()
            pair.close_ends()
    record["loan"] = {
        "bytes": payloads.tensor_bytes(payloads.make(LOAD)),
        "messages": len(samples.usable),
        "allocate": percentiles(allocated),
        "put": percentiles(samples.put),
        "usable": percentiles(samples.usable),
    }
