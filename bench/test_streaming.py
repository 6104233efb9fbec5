"""Throughput with several messages under way: how many bytes per second a pipeline can move that never waits for
answers.

Each message is put as soon as there is room for it among those under way. "moved" means that the consumer drops what
it got at once; "read" that it first reads every byte, on its own core, while the next ones are being put.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from typing import Any

import pytest

from bench import payloads
from bench.conftest import PLACE, loads, peers
from bench.control import WINDOW
from bench.peers import load_peer
from bench.steady import settle
from bench.two_process import Pair

LOAD = "S5"
ROUNDS = 5
WAYS = {"moved": False, "read": True}


def test_streaming(
    request: pytest.FixtureRequest, record: dict[str, Any], quick: bool, seconds: float, pinned: int | None
) -> None:
    if LOAD not in loads(request.config):
        pytest.skip(f"streaming is measured with {LOAD} only")
    names = [each for each in peers(request.config) if load_peer(each).streams and load_peer(each).takes(LOAD)]
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair(name, PLACE, pinned)) for name in names}
        record["streaming"] = measure(pairs, 0.0 if quick else seconds)


def measure(pairs: dict[str, Pair], seconds: float) -> dict[str, Any]:
    """GB/s by peer and way, the median of rounds in which all take turns."""
    size = payloads.tensor_bytes(payloads.make(LOAD))
    rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in pairs}
    gc.collect()
    gc.disable()
    try:
        for pair in pairs.values():
            pair.open(LOAD, WINDOW)
            pair.check()
        counts = {name: _messages_per_round(pair, seconds) for name, pair in pairs.items()}
        for _ in range(ROUNDS if seconds else 1):
            for name, pair in pairs.items():
                for way, read in WAYS.items():
                    if seconds:
                        _warm_up(pair, read)
                    spent = pair.stream(counts[name], read)
                    rates[name][way].append(size * counts[name] / spent / 1e9)
    finally:
        gc.enable()
        for pair in pairs.values():
            pair.close_ends()
    return {
        "load": LOAD,
        "window": WINDOW,
        "GB/s": {name: {way: statistics.median(each) for way, each in ways.items()} for name, ways in rates.items()},
        "messages": {name: count * (ROUNDS if seconds else 1) for name, count in counts.items()},
    }


def _warm_up(pair: Pair, read: bool) -> None:
    """Bring back what was given back while others had their turns.

    A consumer that reads is slow: as many messages are under way as there may be, so all places that they need are
    there again. The thread that takes their memory shares the producer's core: it shall have ended.
    """
    pair.stream(2 * WINDOW, True)
    settle()
    pair.stream(2 * WINDOW, read)


def _messages_per_round(pair: Pair, seconds: float) -> int:
    if not seconds:
        return WINDOW + 1
    _warm_up(pair, True)
    each = pair.stream(2 * WINDOW, True) / (2 * WINDOW)
    return max(2 * WINDOW, min(2000, int(seconds / len(WAYS) / each)) // ROUNDS)
