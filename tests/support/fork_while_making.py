"""Fork again and again while another thread makes segments, then kill the parent: no child may stand in for it.

A descriptor that exists only inside a call of the other thread at the moment of the fork is in no list yet; the child
has it all the same, and with it the lock that says "this producer lives".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

import numpy as np
from support import leftovers
from support.forking import wait

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector


def parent(forks: int, namespace: str, go: int, go_open: int) -> NoReturn:
    """Make producers in one thread and children in the other, then die by SIGKILL; the children wait for `go`."""
    # The key table of a control segment is megabytes that are reserved while it is made.
    settings = {"key_lookup": True, "namespace": namespace, "segment_bytes": 1 << 20, "orphan_ttl_s": 0}
    made: list[SharedMemoryConnector] = []

    def make() -> None:
        while len(made) < 200:
            made.append(SharedMemoryConnector(settings))
            made[-1].put("a", "b", len(made), np.zeros(10))

    threading.Thread(target=make, daemon=True).start()
    ready, tell = os.pipe()
    done, end = 0, time.monotonic() + 100
    while done < forks or len(made) < 8:
        assert time.monotonic() < end, (done, len(made))
        done += 1
        if os.fork() == 0:
            os.close(go_open)
            os.write(tell, b"+")
            os.read(go, 1)
            os._exit(0)
    while done:  # until each has disowned what it inherited
        done -= len(os.read(ready, done))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def main(forks: int) -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    go, go_open = os.pipe()
    living, children = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(living)
            parent(forks, namespace, go, go_open)
        finally:
            os._exit(1)
    os.close(children)
    try:
        assert wait(pid, 120) == -signal.SIGKILL
        swept = janitor.sweep(namespace)
    finally:
        os.close(go_open)
        assert os.read(living, 1) == b""  # until the last child is gone
        janitor.sweep(namespace, force=True)
    assert swept.alive == [], f"{len(swept.alive)} of its producers count as alive for as long as its children live"
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main(int(sys.argv[1]))
