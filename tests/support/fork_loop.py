"""Fork fifty times while another thread puts; parent and children each use their own connector."""

from __future__ import annotations

import os
import threading

import numpy as np
from support import leftovers
from support.forking import fork, join

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

WANT = np.arange(131_072.0)
SETTINGS = {"segment_bytes": 4 << 20}  # making larger ones would be most of the time


def main() -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    parent = SharedMemoryConnector(SETTINGS)
    stop = threading.Event()
    rounds = 0

    def keep_putting() -> None:
        nonlocal rounds
        while not stop.is_set():
            _, _, metadata = parent.put("0", "1", "loop", WANT)
            assert parent.get("0", "1", "loop", metadata)
            rounds += 1

    def child() -> None:
        own = SharedMemoryConnector(SETTINGS)
        assert own.put("0", "1", "r2", WANT)[0]

    thread = threading.Thread(target=keep_putting)
    thread.start()
    try:
        n = 0
        while n < 50 or rounds <= 50:  # both must have had their turns
            n += 1
            _, _, metadata = parent.put("0", "1", "r1", WANT + n)
            join(fork(child))
            assert np.array_equal(parent.get("0", "1", "r1", metadata)[0], WANT + n)
    finally:
        stop.set()
        thread.join()
    # What the children put went with them; only the parent's names are there.
    endpoints = {name.split(".")[3] for name in leftovers.names(namespace) if not name.endswith(".dir")}
    assert len(endpoints) == 1, endpoints
    parent.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main()
