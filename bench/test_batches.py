"""put_many and get_many beside as many puts and gets, within one process: what a batch saves per message."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from typing import Any

from bench import payloads
from bench.conftest import PLACE
from bench.peers.ours import FROM, TO
from omni_fastshm import SharedMemoryConnector

LOADS = ("S1", "S2", "S3")
BATCH = 32
ROUNDS = 200
Times = dict[str, list[int]]


def test_batches(record: dict[str, Any], quick: bool, pinned: int | None) -> None:
    found = {}
    for load in LOADS:
        data, numbers = payloads.make(load), itertools.count()
        times: Times = {"put": [], "put_many": [], "get": [], "get_many": []}
        with SharedMemoryConnector({"namespace": f"{PLACE}-batches"}) as connector:
            gc.collect()
            gc.disable()
            try:
                for turn in range(2 if quick else ROUNDS):
                    requests = [f"chatcmpl-{next(numbers):012d}" for _ in range(BATCH)]
                    (_one_by_one if turn % 2 else _together)(connector, requests, data, times)
            finally:
                gc.enable()
        found[load] = {what: statistics.median(each) / 1e3 / BATCH for what, each in times.items()}
    record["batches"] = {"messages in a batch": BATCH, "µs per message": found}


def _one_by_one(connector: SharedMemoryConnector, requests: list[str], data: Any, times: Times) -> None:
    start = time.monotonic_ns()
    sent = [connector.put(FROM, TO, request, data)[2] for request in requests]
    put = time.monotonic_ns()
    got = [connector.get(FROM, TO, request, metadata) for request, metadata in zip(requests, sent, strict=True)]
    times["get"].append(time.monotonic_ns() - put)
    times["put"].append(put - start)
    assert None not in got


def _together(connector: SharedMemoryConnector, requests: list[str], data: Any, times: Times) -> None:
    start = time.monotonic_ns()
    sent = [answer[2] for answer in connector.put_many(FROM, TO, [(request, data) for request in requests])]
    put = time.monotonic_ns()
    got = connector.get_many(FROM, TO, list(zip(requests, sent, strict=True)))
    times["get_many"].append(time.monotonic_ns() - put)
    times["put_many"].append(put - start)
    assert None not in got
