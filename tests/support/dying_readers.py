"""More readers than there are slots take a payload each, one after the other, and are killed while they hold it."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
from support import leftovers
from support.forking import fork, join

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

MIB = 1 << 20


def main(readers: int) -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    producer = SharedMemoryConnector({"segment_bytes": MIB, "max_bytes": 8 * MIB, "put_timeout_s": 30})
    for n in range(readers):
        _, _, metadata = producer.put("a", "b", n, np.arange(12_500) + n)

        def die(n: int = n, metadata: object = metadata) -> None:
            view, _ = SharedMemoryConnector({}).get("a", "b", n, metadata)
            assert view[0] == n
            os.kill(os.getpid(), signal.SIGKILL)

        _, status = os.waitpid(fork(die), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    ok, _, metadata = producer.put("a", "b", "last", np.arange(7 * MIB // 8))
    assert ok, "what the dead held was not given back"

    def look() -> None:
        connector = SharedMemoryConnector({})
        view, _ = connector.get("a", "b", "last", metadata)
        assert view[-1] == 7 * MIB // 8 - 1
        assert connector.health()["leases"] == 1, "no slot was free: it had to copy"

    join(fork(look))
    assert producer.health()["live_blocks"] == 0
    producer.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main(int(sys.argv[1]))
