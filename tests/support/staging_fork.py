"""A fork while segments are page-locked and copies run: the child touches no device, and the parent goes on."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from support.fake_device import FakeDevices
from support.forking import fork, join
from support.waiting import until

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ForkedConnector
from omni_fastshm.staging import devices, parked, pinned_bytes

BIG = torch.arange(60_000, dtype=torch.float32)


def main() -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    fake = FakeDevices()
    devices.use(fake)
    producer = SharedMemoryConnector({})
    consumer = SharedMemoryConnector({})
    first = producer.put("a", "b", 1, fake.tensor(BIG))[2]
    view = consumer.get("a", "b", 0, producer.put("a", "b", 0, BIG)[2])[0]
    with fake.held():
        uploaded = consumer.get("a", "b", 1, first, device="meta")[0]
        waiting = producer.put("a", "b", 2, fake.tensor(BIG + 1), wait=False)

        def child() -> None:
            nonlocal uploaded, view, producer, consumer
            assert pinned_bytes() == 0
            assert not len(parked)
            with pytest.raises(ForkedConnector):
                producer.put("a", "b", 3, BIG)
            with pytest.raises(ForkedConnector):
                consumer.get("a", "b", 1, first, device="meta")
            assert torch.equal(view, BIG)
            own = SharedMemoryConnector({})
            assert np.array_equal(
                own.get("a", "b", 4, own.put("a", "b", 4, np.arange(90_000))[2])[0], np.arange(90_000)
            )
            own.close()
            producer.close()
            consumer.close()
            del uploaded, view
            producer = consumer = None  # type: ignore[assignment]
            gc.collect()

        for _ in range(3):
            join(fork(child), 20)
        assert len(parked) == 1
        assert len(fake.registered) == 2
    metadata = waiting.result(20)[2]
    assert torch.equal(consumer.get("a", "b", 2, metadata)[0], BIG + 1)
    assert torch.equal(fake.read(uploaded), BIG)
    assert torch.equal(view, BIG)
    fake.run_all()
    parked.poll()
    del uploaded, view
    until(lambda health=consumer.health: not health()["leases"])  # the helper thread may be the one that lets go
    producer.close()
    consumer.close()
    del producer, consumer
    gc.collect()
    assert not fake.registered
    assert not fake.violations
    print("ok")
    # The helper thread of the parked copies is a daemon: a normal exit must not wait for it.
    assert os.getpid() == fake.pid


if __name__ == "__main__":
    main()
