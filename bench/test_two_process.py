"""One way from `put` in one process to usable tensors in another, all peers in turn within one run.

The clock is CLOCK_MONOTONIC, which is the same in all processes. A message is "usable" when `get` has
returned, and "read" when the consumer has then read every byte once: a transport that leaves work for later
shows it there.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bench import payloads
from bench.conftest import PLACE, peers
from bench.peers import load_peer
from bench.two_process import Pair, Samples

ROUNDS = 8
AT_MOST = 4000


class ReplayClock:
    """A timer that moves by what was measured, so that one-way times enter the ordinary tables and
    statistics.

    No clock can be read around a one-way trip in a single process; pytest-benchmark takes any timer instead.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def replay(self, samples: list[int]) -> Callable[[], None]:
        steps = iter(samples)

        def step() -> None:
            self.now += next(steps) * 1e-9

        return step


CLOCK = ReplayClock()


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest, pinned: int | None) -> Iterator[dict[str, Pair]]:
    """A consumer process per peer, all idle but the one whose turn it is."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Pair(name, PLACE, pinned)) for name in peers(request.config)}


@pytest.fixture(scope="module")
def measured(pairs: dict[str, Pair], quick: bool, seconds: float) -> Callable[[str], dict[str, Samples]]:
    """One-way times by peer for a load; measured when first asked for, so that all peers share one run."""
    done: dict[str, dict[str, Samples] | Exception] = {}

    def ask(load: str) -> dict[str, Samples]:
        if load not in done:
            done.clear()
            try:
                done[load] = measure(pairs, load, 0.0 if quick else seconds)
            except Exception as error:  # not again for each peer of this load: it may have taken a minute
                done[load] = error
        found = done[load]
        if isinstance(found, Exception):
            raise found
        return found

    return ask


def measure(pairs: dict[str, Pair], load: str, seconds: float) -> dict[str, Samples]:
    """Check each peer once, then let them take turns, `ROUNDS` times."""
    pairs = {name: pair for name, pair in pairs.items() if pair.peer.takes(load)}
    samples = {name: Samples() for name in pairs}
    gc.collect()
    gc.disable()
    try:
        for pair in pairs.values():
            pair.open(load)
            pair.check()
        turns = {name: _messages_per_round(pair, seconds) for name, pair in pairs.items()}
        for _ in range(ROUNDS if seconds else 1):
            for name, pair in pairs.items():
                pair.run(1)  # the first message after a pause pays for the pause
                pair.run(turns[name], samples[name])
    finally:
        gc.enable()
        for pair in pairs.values():
            pair.close_ends()
    return samples


def _messages_per_round(pair: Pair, seconds: float) -> int:
    if not seconds:
        return 1
    pair.run(2)
    start = time.monotonic()
    pair.run(3)
    each = (time.monotonic() - start) / 3
    return max(3, min(AT_MOST, int(seconds / each)) // ROUNDS)


@pytest.mark.benchmark(timer=CLOCK)
def test_one_way(benchmark: Any, measured: Callable[[str], dict[str, Samples]], load: str, name: str) -> None:
    benchmark.group = f"two processes {load}: {payloads.LOADS[load]}"
    samples = measured(load)[name]
    benchmark.extra_info.update(
        kind="two_process",
        load=load,
        peer=name,
        label=load_peer(name).label,
        tensor_bytes=payloads.tensor_bytes(payloads.make(load)),
        messages=len(samples.usable),
        preempted_per_s=samples.preempted / samples.seconds,
        put=percentiles(samples.put),
        usable=percentiles(samples.usable),
        read=percentiles(samples.read),
    )
    benchmark.pedantic(CLOCK.replay(samples.usable), rounds=len(samples.usable))


def percentiles(nanoseconds: list[int]) -> dict[str, float | None]:
    """Median, p99 and p99.9 in microseconds; a tail that too few messages cannot show is None."""
    micro = np.asarray(nanoseconds) / 1e3
    count = len(nanoseconds)
    return {
        "median": float(np.median(micro)),
        "p99": float(np.percentile(micro, 99)) if count >= 100 else None,
        "p99.9": float(np.percentile(micro, 99.9)) if count >= 1000 else None,
    }
