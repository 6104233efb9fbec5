"""A process that sends from and receives to devices is killed at each call into the driver: all or nothing is seen."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import torch
from support import leftovers
from support.fake_device import FakeDevices
from support.forking import fork, wait

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.staging import devices

BIG = torch.arange(30_000, dtype=torch.float32)
SMALL = {"segment_bytes": 1 << 20, "max_bytes": 4 << 20, "key_lookup": True}


def life(namespace: str, die_at: int) -> None:
    fake = FakeDevices(seed=die_at)
    devices.use(fake)
    fake.die_at = die_at
    own: Any = SharedMemoryConnector({**SMALL, "namespace": namespace})
    for n in range(2):
        answer = own.put("a", "b", f"here {n}", [fake.tensor(BIG + n), BIG, fake.tensor(BIG + n, 1)], wait=n == 0)
        got = own.get("c", "d", f"there {n}", device={"[0]": "meta", "[1]": "meta:1"})
        if n == 1:
            answer.result(20)
        if got is not None:
            assert torch.equal(fake.read(got[0][0]), BIG + n)
            assert torch.equal(got[0][2], BIG)
    own.close()


def main() -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    parent: Any = SharedMemoryConnector({**SMALL, "namespace": namespace})
    taken, deaths, die_at = 0, 0, 0
    while True:
        die_at += 1
        for n in range(2):
            assert parent.put("c", "d", f"there {n}", [BIG + n, BIG + n, BIG])[0]
        code = wait(fork(lambda at=die_at: life(namespace, at)), 30)
        for n in range(2):
            got = parent.get("a", "b", f"here {n}")
            if got is not None:
                assert all(torch.equal(*pair) for pair in zip(got[0], (BIG + n, BIG, BIG + n), strict=True))
                taken += 1
        del got
        janitor.sweep(namespace, force=True)
        parent._producer.outbox.reap()
        for n in range(2):
            parent.cleanup(f"there {n}")
        health = parent.health()
        assert health["leases"] == 0
        assert health["live_blocks"] == 0, "what the dead process held"
        assert health["used_bytes"] == 0
        assert len({name.split(".")[3] for name in leftovers.names(namespace) if "dir" not in name}) == 1
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        deaths += 1
    assert deaths > 30, deaths
    assert taken > 10, taken
    parent.close()
    gc.collect()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main()
