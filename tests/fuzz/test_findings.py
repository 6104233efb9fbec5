"""What the fuzzer found outside the codec, each as the shortest way to it; the codec's are in test_codec_damage.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from support import leftovers, payloads
from support.child import Children
from support.steps import PUT_BIG, big

from omni_fastshm import janitor, segments
from omni_fastshm.connectors.in_process import InProcessConnector
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.directory import open_directory
from omni_fastshm.errors import MetadataError

HOLE = 256 << 20


def plant(name: str, size: int = 0) -> None:
    descriptor = os.open(leftovers.MOUNT / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, size)
    os.close(descriptor)


def memory_of(name: str) -> int:
    return os.stat(leftovers.MOUNT / name).st_blocks * 512


@pytest.mark.parametrize(
    "end", ["d\u00b2", "d\u0661", "d\udcff", "dx", "d", "d" + "9" * 80, "d0\n", "dir", "\udcff.dir"]
)
@pytest.mark.parametrize("orphan", [False, True], ids=["alone", "beside an orphan"])
def test_odd_names_keep_nobody_from_work(connect: Any, namespace: str, end: str, orphan: bool) -> None:
    stem = segments.control_name(namespace, 5).removesuffix("ctl")
    plant(stem + end)
    if orphan:
        plant(stem + "ctl")
    janitor.sweep(namespace, force=True)
    connector = connect(SharedMemoryConnector, shm_threshold_bytes=0)
    _, _, metadata = connector.put("a", "b", "r", [1])
    assert connector.get("a", "b", "r", metadata)[0] == [1]
    leftovers.remove(namespace)


def test_a_hole_gets_no_memory(connect: Any, children: Children, namespace: str) -> None:
    """To map it with its pages would take the memory from everybody else on the mount."""
    child, consumer = children.with_connector(segment_bytes=2 << 20), connect(SharedMemoryConnector)
    metadata = child.run(PUT_BIG, rid="r", seed=1)[2]
    name = segments.data_name(metadata["shm"]["name"], 0)
    os.unlink(leftovers.MOUNT / name)
    plant(name, HOLE)
    with pytest.raises(MetadataError, match="memory for 0"):
        consumer.get("0", "1", "r", metadata)
    assert memory_of(name) == 0
    child.kill()
    leftovers.remove(namespace)


def test_a_directory_that_is_a_hole_gets_no_memory(namespace: str) -> None:
    name = segments.directory_name(namespace)
    with SharedMemoryConnector({"key_lookup": True, "namespace": namespace}):
        magic = (leftovers.MOUNT / name).read_bytes()[:8]
    plant(name, HOLE)
    with open(leftovers.MOUNT / name, "r+b") as file:
        file.write(magic)
    with pytest.raises(MetadataError, match="another version"):
        open_directory(namespace)
    assert memory_of(name) < HOLE // 2
    leftovers.remove(namespace)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_living_producer_keeps_its_memory_when_its_name_is_gone(
    children: Children, connect: Any, namespace: str, replaced: bool
) -> None:
    """As when somebody tidies up the mount, takes the control segment first, and one of us starts just then."""
    child, consumer = children.with_connector(segment_bytes=2 << 20), connect(SharedMemoryConnector)
    metadata = child.run(PUT_BIG, rid="r", seed=1)[2]
    view = consumer.get("0", "1", "r", metadata)[0]
    control = metadata["shm"]["name"]
    with open(leftovers.MOUNT / segments.data_name(control, 0), "rb") as data:
        os.unlink(leftovers.MOUNT / control)
        if replaced:
            plant(control)
        connect(SharedMemoryConnector)
        janitor.sweep(namespace, force=True)
        assert os.fstat(data.fileno()).st_blocks > 0  # else the next line would be this process's last
    assert payloads.same(view, big(1))
    child.kill()
    leftovers.remove(namespace)


def test_a_name_that_is_taken_is_passed_over(connect: Any, namespace: str) -> None:
    connector = connect(SharedMemoryConnector, segment_bytes=1 << 16, max_bytes=1 << 20, shm_threshold_bytes=0)
    sent = [connector.put("a", "b", "r0", np.zeros(4000))[2]]
    plant(segments.data_name(sent[0]["shm"]["name"], 1))
    sent += [connector.put("a", "b", f"r{i}", np.zeros(7000))[2] for i in range(1, 5)]
    for number, metadata in enumerate(sent):
        assert connector.get("a", "b", f"r{number}", metadata, copy=True) is not None
    leftovers.remove(namespace)


NESTED: Any = []
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize("where", ["size", "process", "namespace", "from_stage", "request_id"])
@pytest.mark.parametrize("value", [10**5000, NESTED, np.arange(3), None], ids=["long", "nested", "array", "none"])
def test_metadata_of_a_process_with_values_that_cannot_be_shown(connect: Any, where: str, value: Any) -> None:
    connector = connect(InProcessConnector)
    _, _, metadata = connector.put("a", "b", "r", [1])
    inner = {**metadata["in_process"], where: value}
    for bad in ({**metadata, "in_process": inner}, {**metadata, "size": value} if where == "size" else {}):
        with pytest.raises(MetadataError):
            connector.get("a", "b", "r", bad)
    assert connector.get("a", "b", "r", metadata)[0] == [1]


def test_inline_bytes_that_were_released(connect: Any) -> None:
    connector = connect(SharedMemoryConnector)
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(MetadataError, match="released"):
        connector.get("a", "b", "r", {"inline_bytes": view, "size": 3})
