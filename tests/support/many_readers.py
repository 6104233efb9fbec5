"""More processes read from one producer, at the same time, than it has reader slots."""

from __future__ import annotations

import os
import sys

import numpy as np
from support import leftovers
from support.forking import barrier, fork, join

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

WANT = np.arange(50_000)


def main(readers: int) -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    with barrier() as (go, go_open), barrier() as (answers, answer), barrier() as (end, end_open):

        def child() -> None:
            os.close(go_open)
            os.close(end_open)
            assert os.read(go, 1) == b""  # until the parent has put
            with os.fdopen(os.dup(handed_over), "rb") as pipe:
                count = int.from_bytes(os.pread(pipe.fileno(), 4, 0), "little")
                metadata = eval(os.pread(pipe.fileno(), count, 4))
            connector = SharedMemoryConnector({})
            got, _ = connector.get("a", "b", "r", metadata)
            assert np.array_equal(got, WANT)
            os.write(answer, b"+")
            assert os.read(end, 1) == b""  # all hold their view at the same time
            assert np.array_equal(got, WANT)

        handed_over = os.memfd_create("metadata")
        pids = [fork(child) for _ in range(readers)]  # before there are locks and threads to inherit
        producer = SharedMemoryConnector({})
        _, _, metadata = producer.put("a", "b", "r", WANT, consumers=readers)
        text = repr(metadata).encode()
        os.pwrite(handed_over, len(text).to_bytes(4, "little") + text, 0)
        os.close(go_open)
        arrived = b""
        while len(arrived) < readers:
            arrived += os.read(answers, readers)
        assert producer.get("a", "b", "r", metadata) is None
        os.close(end_open)
        for pid in pids:
            join(pid)
        assert producer.health()["live_blocks"] == 0
        os.close(handed_over)
        producer.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main(int(sys.argv[1]))
