"""A fork of a process that has page-locked segments: the child makes no use of CUDA, the parent goes on."""

from __future__ import annotations

import gc
import os

import torch
from support.forking import fork, join

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.staging import parked, pinned_bytes


def main() -> None:
    producer = SharedMemoryConnector({})
    consumer = SharedMemoryConnector({})
    sent = torch.arange(3_000_000, device="cuda")
    uploaded = consumer.get("a", "b", 1, producer.put("a", "b", 1, sent)[2], device="cuda")[0]
    assert pinned_bytes() > 0

    def child() -> None:
        assert pinned_bytes() == 0
        assert not len(parked)
        own = SharedMemoryConnector({"pin": False})
        assert own.put("a", "b", "r", b"x" * 100_000)[0]
        own.close()
        os._exit(0)  # as children of multiprocessing end: torch itself cannot free CUDA tensors here

    join(fork(child), 20)
    assert torch.equal(uploaded, sent)
    assert torch.equal(consumer.get("a", "b", 2, producer.put("a", "b", 2, sent)[2], device="cuda")[0], sent)
    torch.cuda.synchronize()
    producer.close()
    consumer.close()
    del producer, consumer, uploaded
    gc.collect()
    parked.poll()
    assert pinned_bytes() == 0
    print("ok")


if __name__ == "__main__":
    main()
