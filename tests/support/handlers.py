"""A signal handler that puts, gets and opens connectors, at random moments of a program that does the same."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from support import leftovers

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConnectorClosed, SegmentError

SMALL = {
    "segment_bytes": 1 << 18,
    "max_bytes": 1 << 20,
    "put_timeout_s": 0.02,
    "idle_segment_s": 0.001,
    "shm_threshold_bytes": 0,
}


class Pair:
    """A producer and a consumer; each payload is full of one number."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.keyed = "key_lookup" in settings
        self.sender: Any = SharedMemoryConnector(settings)
        self.receiver: Any = SharedMemoryConnector(settings)
        self.fresh: Any = None  # whose first put is just making its segments
        self.wrong: list[str] = []
        self.carried = self.refused = 0

    def transfer(self, request: str, value: int, size: int) -> Any:
        ok, _, metadata = self.sender.put("a", "b", request, np.full(size, value, np.uint8))
        if not ok:
            self.refused += 1
            return None
        got = self.receiver.get("a", "b", request, None if self.keyed else metadata)
        if got is None or not (got[0] == value).all():
            self.wrong.append(f"{request}: {'gone' if got is None else 'changed'}")
        self.carried += 1
        return got

    def begin(self, settings: dict[str, Any]) -> None:
        """A connector from its first put to its end; the handler joins in at any moment."""
        self.fresh = SharedMemoryConnector(settings)
        self.fresh.put("a", "b", "fresh", np.zeros(20_000))
        self.fresh.close()

    def borrow(self) -> None:
        try:
            self.sender.allocate(30_000, np.uint8)[:] = 1
        except SegmentError:
            self.refused += 1


class Handler:
    """Runs inside whatever it interrupts, also inside itself."""

    deepest = 2

    def __init__(self, pair: Pair, settings: dict[str, Any]) -> None:
        self.pair, self.settings = pair, settings
        self.calls = self.depth = 0

    def __call__(self, *_: object) -> None:
        if self.depth == self.deepest:
            return
        self.depth += 1
        self.calls += 1
        try:
            self.work(self.calls)
        finally:
            self.depth -= 1

    def work(self, number: int) -> None:
        self.pair.transfer(f"h{number}", number % 250, 20_000)
        self.pair.sender.health()
        self.pair.sender.cleanup("unknown")
        if number % 10 == 0:
            with SharedMemoryConnector(self.settings) as another:
                another.put("a", "b", "another", np.zeros(20_000))


class Joins(Handler):
    """Also puts through a connector that is just doing its first put, or closing."""

    def work(self, number: int) -> None:
        super().work(number)
        if self.pair.fresh is not None:
            with contextlib.suppress(ConnectorClosed):
                self.pair.fresh.put("a", "b", "joined", np.zeros(2_000))


class Forks(Handler):
    """Its children live for a moment only, and touch nothing."""

    deepest = 1  # the standard library's own hooks wait for themselves when a fork interrupts a fork

    def work(self, number: int) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def main(kind: str, keyed: bool, times: int) -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    settings = {**SMALL, "namespace": namespace, **({"key_lookup": True} if keyed else {})}
    logging.disable(logging.CRITICAL)  # a put that is refused says so, on stderr
    pair = Pair(settings)
    handler = {"puts": Handler, "joins": Joins, "forks": Forks}[kind](pair, settings)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.0011)
    held: list[Any] = []
    end = time.monotonic() + 120
    number = 0
    try:
        while min(handler.calls, pair.carried) < times:
            assert time.monotonic() < end, (handler.calls, pair.carried, pair.refused)
            number += 1
            held.append(
                pair.transfer(f"m{number}", number % 251, (1000, 60_000, 150_000, 250_000, 400_000)[number % 5])
            )
            pair.borrow()
            assert kind != "joins" or pair.sender.health()["capacity_bytes"] <= SMALL["max_bytes"]
            del held[: -(number % 3) or None]
            if number % 3 == 0:
                pair.begin(settings)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    held.clear()
    gc.collect()
    assert pair.wrong == []
    assert pair.sender.health()["live_blocks"] == pair.sender.health()["used_bytes"] == 0
    pair.sender.close()
    pair.receiver.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "keyed", int(sys.argv[3]))
