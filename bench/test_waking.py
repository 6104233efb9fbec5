"""One way to a consumer that waits: asleep in the kernel, or spinning for as long as it takes.

The smallest load, so that waking is what is measured. A bare futex wake takes turns with the rest, between two
processes of the same kind.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.conftest import PLACE, peers
from bench.peers import load_peer
from bench.test_two_process import percentiles
from bench.two_process import Pair, Samples

LOAD = "S1"
ASLEEP = ("futex", "ours_by_key", "pipe_pickle", "iceoryx2_event", "zmq_ipc")
AWAKE = ("ours_awake",)
ROUNDS = 8
PER_ROUND = 50
GAP_NS = 300_000  # before each message: longer than any spinning before sleep, and a core is idle by then


def test_waking(request: pytest.FixtureRequest, record: dict[str, Any], quick: bool, pinned: int | None) -> None:
    wanted = {*peers(request.config), "futex", "ours_awake"}
    names = [name for name in (*ASLEEP, *AWAKE) if name in wanted]
    samples = {name: Samples() for name in names}
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair(name, PLACE, pinned)) for name in names}
        gc.collect()
        gc.disable()
        try:
            for pair in pairs.values():
                pair.open(LOAD)
                pair.check()
            for _ in range(1 if quick else ROUNDS):
                for name, pair in pairs.items():
                    pair.run(1)
                    pair.run(2 if quick else PER_ROUND, samples[name], prepare=waiting(pair, name in ASLEEP))
        finally:
            gc.enable()
            for pair in pairs.values():
                pair.close_ends()
    record["waking"] = {
        name: {"label": load_peer(name).label, "messages": len(each.usable), **percentiles(each.usable)}
        for name, each in samples.items()
    }


def waiting(pair: Pair, asleep: bool) -> Callable[[], Any]:
    """Gives the payload once the consumer has waited for a while."""

    def prepare() -> Any:
        if asleep:
            pair.asleep()
        until = time.monotonic_ns() + GAP_NS
        while time.monotonic_ns() < until:
            pass
        return pair.data

    return prepare
