"""A frame written in parts by several threads is the frame written at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import payloads

from omni_fastshm import codec
from omni_fastshm.connectors import shared_memory
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.copiers import Copiers

TREES = {
    "one": {"x": payloads.array(300_000)},
    "many": {f"x{i}": payloads.array(1000 * i, i) for i in range(90)},
    "small": {"x": payloads.array(5000), "y": [1, 2, 3]},
    "nothing": {"y": 1},
}


def written(plan: codec.Plan, write: Callable[[int], object]) -> bytes:
    memory = np.full(plan.frame_size + 64, 0xEE, np.uint8)
    at = -memory.ctypes.data % 64
    write(memory.ctypes.data + at)
    assert (memory[:at] == 0xEE).all()
    assert (memory[at + plan.frame_size :] == 0xEE).all()
    return memory[at : at + plan.frame_size].tobytes()


@pytest.mark.parametrize("parts", [1, 2, 3, 16])
@pytest.mark.parametrize("tree", TREES)
def test_parts_in_any_order(tree: str, parts: int) -> None:
    plan = codec.plan(TREES[tree])

    def in_parts(address: int) -> None:
        for part in reversed(range(parts)):
            plan.pack_part(address, part, parts)

    assert written(plan, in_parts) == written(plan, plan.pack_into) == plan.to_bytes()


@pytest.mark.parametrize("threads", [2, 4])
def test_threads(threads: int) -> None:
    copiers = Copiers(threads)
    plan = codec.plan(TREES["one"])
    assert written(plan, lambda address: copiers.pack(plan, address)) == plan.to_bytes()
    copiers.close()
    assert written(plan, lambda address: copiers.pack(plan, address)) == plan.to_bytes(), "closed: by the caller"


def test_no_such_part() -> None:
    plan = codec.plan(TREES["one"])
    with pytest.raises(ValueError, match="no part"):
        plan.pack_part(0, 2, 2)


@pytest.mark.parametrize("key_lookup", [False, True])
def test_large_payloads_come_whole_and_small_ones_start_no_thread(
    connect: Any, namespace: str, key_lookup: bool
) -> None:
    more = {"key_lookup": True, "namespace": namespace} if key_lookup else {}
    sender = connect(SharedMemoryConnector, copy_threads=3, **more)
    before = threading.active_count()
    small = payloads.array(shared_memory._THREADS_FROM // 2)
    metadata = sender.put("a", "b", "s", small)[2]
    assert payloads.same(sender.get("a", "b", "s", metadata)[0], small)
    assert not [each for each in threading.enumerate() if each.name.startswith("omni-fastshm-copy")]
    large = {"x": payloads.array(shared_memory._THREADS_FROM), "y": [payloads.array(5 << 20, 1), "text"]}
    metadata = sender.put("a", "b", "l", large)[2]
    assert payloads.same(sender.get("a", "b", "l", metadata)[0], large)
    sender.close()
    for each in threading.enumerate():
        if each.name.startswith("omni-fastshm"):
            each.join(10)
    assert threading.active_count() <= before
