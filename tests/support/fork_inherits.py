"""A forked child has nothing of its parent's connector, and takes nothing away from it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest
from support import leftovers
from support.forking import fork, join

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConnectorClosed, ForkedConnector

WANT = np.arange(20_000)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(ForkedConnector, match="fork") as caught:
        call()
    assert isinstance(caught.value, ConnectorClosed)


def main() -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    producer = SharedMemoryConnector({"key_lookup": True, "namespace": namespace})
    consumer = SharedMemoryConnector({"key_lookup": True, "namespace": namespace})
    producer.put("a", "b", "held", WANT)
    view, _ = consumer.get("a", "b", "held")
    producer.put("a", "b", "waiting", WANT + 1)
    loan = producer.allocate((20_000,), np.int64)
    loan[:] = WANT + 2
    names = leftovers.names(namespace)

    def child() -> None:
        nonlocal view, loan
        refused(lambda: producer.put("a", "b", "r", WANT))
        refused(lambda: producer.put("a", "b", "r", 1))
        refused(lambda: consumer.get("a", "b", "waiting"))
        refused(lambda: consumer.get("a", "b", "waiting", timeout=None))
        refused(lambda: producer.allocate(10, np.uint8))
        assert np.array_equal(view, WANT)
        view = loan = None
        gc.collect()
        producer.cleanup("waiting")
        producer.close()
        consumer.close()
        with SharedMemoryConnector({"key_lookup": True, "namespace": namespace}) as own:
            own.put("a", "b", "own", WANT + 5)
            assert np.array_equal(own.get("a", "b", "own")[0], WANT + 5)

    for _ in range(3):
        join(fork(child))
        assert leftovers.names(namespace) == names, "the child removed what is the parent's"
        assert producer.health()["live_blocks"] >= 2
        assert consumer.health()["leases"] == 1
        for n in range(30):
            producer.put("a", "b", "x", WANT * 0 + n)
            assert (consumer.get("a", "b", "x")[0] == n).all()
        assert np.array_equal(view, WANT)
        assert np.array_equal(loan, WANT + 2)

    assert np.array_equal(consumer.get("a", "b", "waiting")[0], WANT + 1)
    producer.put("a", "b", "loan", loan)
    assert np.array_equal(consumer.get("a", "b", "loan")[0], WANT + 2)
    del view, loan
    assert producer.health()["live_blocks"] == 0
    consumer.close()
    producer.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main()
