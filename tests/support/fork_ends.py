"""Forked children beside threads at work, ended in every manner: nothing of the parent's goes with them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from support import leftovers
from support.forking import wait

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConnectorClosed, ForkedConnector

WANT = np.arange(20_000)
SMALL = {"segment_bytes": 1 << 20}


class Boom(Exception):
    """What ends a child."""


def fail() -> NoReturn:
    raise Boom


# How a child ends: what it does, its exit code, and whether it takes its own names along.
ENDS: dict[str, tuple[Callable[[], object], int, bool]] = {
    "os._exit": (lambda: os._exit(5), 5, False),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, False),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM, False),
    "SIGABRT": (os.abort, -signal.SIGABRT, False),
    "sys.exit": (lambda: sys.exit(6), 6, True),
    "exception": (fail, 1, True),
    "KeyboardInterrupt": (lambda: os.kill(os.getpid(), signal.SIGINT), -signal.SIGINT, True),
}


class Busy:
    """Threads that put and get all the time, as at the moment of a fork."""

    def __init__(self, connector: Any, waiter: Any) -> None:
        self.rounds = 0
        self.ending = False
        self._connector, self._waiter = connector, waiter
        self._threads = [threading.Thread(target=run) for run in (self._put_and_get, self._wait_for_what_never_comes)]
        for thread in self._threads:
            thread.start()

    def _put_and_get(self) -> None:
        while not self.ending:
            future = self._connector.put("a", "b", "busy", WANT, wait=False)
            assert np.array_equal(self._connector.get("a", "b", "busy", future.result()[2])[0], WANT)
            self.rounds += 1

    def _wait_for_what_never_comes(self) -> None:
        with pytest.raises(ConnectorClosed):
            self._waiter.get("a", "b", "never", timeout=None)

    def end(self) -> None:
        self.ending = True
        self._waiter.close()
        for thread in self._threads:
            thread.join()


def endpoints(namespace: str) -> set[str]:
    return {name.split(".")[3] for name in leftovers.names(namespace) if not name.endswith(".dir")}


def main(ends: list[str]) -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    keyed = {**SMALL, "key_lookup": True, "namespace": namespace, "orphan_ttl_s": 0}
    parent: Any = SharedMemoryConnector(SMALL)
    waiter: Any = SharedMemoryConnector(keyed)
    held = {"view": parent.get("a", "b", "held", parent.put("a", "b", "held", WANT)[2])[0]}
    busy = Busy(parent, waiter)
    parents_main = os.getpid()

    def child(end: Callable[[], object]) -> None:
        with pytest.raises(ForkedConnector):
            parent.put("a", "b", "r", WANT)
        with pytest.raises(ForkedConnector):
            parent.get("a", "b", "waiting", waiting)
        assert np.array_equal(held["view"], WANT)
        own: Any = SharedMemoryConnector(keyed)
        assert own.put("a", "b", "own", WANT + 1)[0]
        globals().update(own=own, seen=own.get("a", "b", "own")[0])
        assert own.put("a", "b", "left", WANT + 2)[0]
        parent.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where it ends by an exception, nobody wants the traceback
        end()

    try:
        for name in ends:
            end, code, tidy = ENDS[name]
            waiting = parent.put("a", "b", "waiting", WANT + 7)[2]
            before, rounds = endpoints(namespace), busy.rounds
            pid = os.fork()
            if pid == 0:
                busy.ending = True  # the copy: this process has no other threads
                child(end)
                os._exit(9)
            assert wait(pid, 20) == code, name
            assert before <= endpoints(namespace), f"{name}: the child took its parent's segments along"
            assert (endpoints(namespace) == before) is tidy, f"{name}: {endpoints(namespace) - before}"
            janitor.sweep(namespace)
            assert endpoints(namespace) == before, f"{name}: the janitor took {before - endpoints(namespace)}"
            assert np.array_equal(held["view"], WANT)
            assert np.array_equal(parent.get("a", "b", "waiting", waiting)[0], WANT + 7)
            while busy.rounds < rounds + 3:
                assert busy._threads[0].is_alive()
    finally:
        if os.getpid() == parents_main:
            busy.end()
    assert parent.health()["leases"] == 1
    held.clear()
    assert parent.health()["live_blocks"] == 0
    parent.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ENDS))
