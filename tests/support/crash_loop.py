"""Start again and again and be killed at a random moment: the mount never fills up, and in the end nothing is left."""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import sys

import numpy as np
from support import leftovers
from support.forking import fork

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

SETTINGS = {"segment_bytes": 256 << 10, "max_bytes": 1 << 20, "put_timeout_s": 0, "orphan_ttl_s": 0}


def life(rng: random.Random, key_lookup: bool, begun: int) -> None:
    """What a process does until it is killed: start, put, take some of it back, hold views, start another connector."""
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    first = SharedMemoryConnector({**SETTINGS, "key_lookup": key_lookup, "namespace": namespace})
    kept = []
    while True:
        second = SharedMemoryConnector({**SETTINGS, "namespace": namespace})
        for n in range(rng.randrange(10)):
            _, _, metadata = first.put(
                "a", "b", n, np.full(rng.randrange(100, 40_000), n), consumers=rng.choice([1, 2])
            )
            if metadata is not None and rng.random() < 0.6:
                kept.append(second.get("a", "b", n, metadata))
            os.write(begun, b"+")
        if rng.random() < 0.5:
            kept.clear()
        second.close()


def end_of(pid: int, seconds: float, begun: int | None) -> int:
    """Let a child live for so long, from its first put on when `begun` is given, kill it, and give its exit code."""
    descriptor = os.pidfd_open(pid)
    if begun is not None:
        select.select([descriptor, begun], [], [], 60)
    select.select([descriptor], [], [], seconds)  # not to wait for anything: a moment by chance
    os.close(descriptor)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(restarts: int, seed: int) -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    rng = random.Random(seed)
    # A full ring is part of this; anything else that is logged is not, and fails the test.
    logging.getLogger("omni_fastshm").addFilter(lambda record: not record.getMessage().startswith("put refused"))
    most = survivors = 0
    for n in range(restarts):
        key_lookup = rng.random() < 0.3
        hear, begun = os.pipe()
        pid = fork(lambda n=n, key_lookup=key_lookup, to=begun: life(random.Random(seed + n), key_lookup, to))  # type: ignore[misc]
        # How far it comes in so short a time is the machine's affair; every other one has put something before.
        code = end_of(pid, rng.choice([0.002, 0.01, 0.05]) * rng.random() * 2, hear if n % 2 else None)
        os.close(hear)
        os.close(begun)
        assert code == -signal.SIGKILL, f"restart {n} ended with {code}"
        names = leftovers.names(namespace)
        endpoints = {name.split(".")[3] for name in names if not name.endswith(".dir")}
        survivors += bool(endpoints)
        most = max(most, sum((leftovers.MOUNT / name).stat().st_blocks * 512 for name in names))
        # Each start sweeps before it makes anything, so what is there is of this life, or of the one before if this one
        # ended before its sweep did.
        assert len(endpoints) <= 2, f"after {n + 1} restarts: {names}"
    assert survivors > restarts / 4, "hardly any life got far enough to leave something"
    assert most < 4 << 20, most
    with SharedMemoryConnector({**SETTINGS, "key_lookup": True, "namespace": namespace}) as connector:
        assert connector.put("a", "b", "r", np.arange(50_000))[0]
        assert connector.get("a", "b", "r") is not None
    swept = janitor.sweep(namespace)
    assert swept == janitor.Swept(), swept
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
