"""A data segment takes its memory piece by piece while it is in use."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children

from omni_fastshm import producer, segments
from omni_fastshm.connectors import shared_memory
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConnectorClosed, SegmentError

MIB = 1 << 20
SEGMENT = 16 * MIB


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: connect(SharedMemoryConnector, **{"segment_bytes": SEGMENT, **settings})


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread: a segment grows when a test, or a put without room, takes more."""
    monkeypatch.setattr(producer.Producer, "_grow_on", lambda self: None)


def put(connector: Any, request: Any, nbytes: int) -> Any:
    ok, _, metadata = connector.put("a", "b", request, np.full(nbytes, int(request), np.uint8))
    return metadata if ok else None


def take(connector: Any, request: Any, metadata: Any) -> np.ndarray:
    got = connector.get("a", "b", request, metadata)[0]
    assert (got == int(request)).all()
    return got


def reserved(connector: Any) -> int:
    return int(connector._producer.outbox.ring.capacity)


def test_the_first_payload_waits_for_its_own_part_only(make: Any, by_hand: None, namespace: str) -> None:
    sender = make()
    put(sender, 1, 100_000)
    assert reserved(sender) == producer._FIRST < SEGMENT
    assert sender.health()["capacity_bytes"] == SEGMENT
    [name] = leftovers.data_names(namespace)
    found = os.stat(Path("/dev/shm") / name)
    assert found.st_size == found.st_blocks * 512 == producer._FIRST, "a hole is somebody's SIGBUS"
    while sender._producer._take_more():
        found = os.stat(Path("/dev/shm") / name)
        assert found.st_size == found.st_blocks * 512 == reserved(sender)
    assert reserved(sender) == SEGMENT


def test_a_thread_takes_the_rest_and_ends(make: Any) -> None:
    sender = make()
    put(sender, 1, 100_000)
    for thread in threading.enumerate():
        if thread.name == "omni-fastshm-memory":
            thread.join(20)
            assert not thread.is_alive()
    assert reserved(sender) == SEGMENT
    assert sender._producer._growing is None


def test_where_no_thread_can_be_had_it_is_taken_at_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    sender = make()
    put(sender, 1, 100_000)
    assert reserved(sender) == SEGMENT


def test_a_put_without_room_takes_what_it_needs(make: Any, by_hand: None) -> None:
    sender, consumer = make(max_bytes=SEGMENT, put_timeout_s=0), make()
    views = [take(consumer, n, put(sender, n, MIB + 1)) for n in range(3)]
    assert reserved(sender) == producer._FIRST
    views += [take(consumer, n, put(sender, n, MIB + 1)) for n in range(3, 15)]
    assert reserved(sender) > SEGMENT - MIB - 8192
    assert put(sender, 99, MIB + 1) is None, "max_bytes holds"
    assert [int(view[-1]) for view in views] == list(range(15))


def test_a_put_whose_new_memory_another_one_takes(make: Any, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = make(max_bytes=SEGMENT, put_timeout_s=0)
    put(sender, 0, 100_000)
    sender.cleanup(0)
    sender._producer._trim(0)
    add, others = sender._producer._add_segment, []

    def taken_meanwhile(*args: Any) -> None:
        add(*args)
        others.append(put(sender, 1, 3 * MIB))

    monkeypatch.setattr(sender._producer, "_add_segment", taken_meanwhile)
    assert put(sender, 2, 5 * MIB) is not None
    assert len(others) == 1


def test_closed_by_a_signal_handler_while_it_joins_the_directory(
    make: Any, monkeypatch: pytest.MonkeyPatch, shm_names: Any
) -> None:
    sender = make()
    join = shared_memory.open_directory

    def closed_meanwhile(*args: Any, **more: Any) -> Any:
        sender.close()
        return join(*args, **more)

    monkeypatch.setattr(shared_memory, "open_directory", closed_meanwhile)
    with pytest.raises(ConnectorClosed):
        put(sender, 1, 100_000)
    assert shm_names() == []


def test_readers_that_mapped_it_early_see_what_comes_later(make: Any, by_hand: None) -> None:
    sender, consumer = make(), make()
    early = take(consumer, 1, put(sender, 1, 3 * MIB))
    late = take(consumer, 2, put(sender, 2, 3 * MIB))  # behind what the reader has mapped
    loan = sender.allocate(3 * MIB, np.uint8)
    loan[:] = 3
    metadata = sender.put("a", "b", 3, {"loan": loan})[2]
    lent = consumer.get("a", "b", 3, metadata)[0]["loan"]
    assert reserved(sender) > 2 * producer._FIRST
    assert (int(early[-1]), int(late[-1]), int(lent[-1])) == (1, 2, 3)


def test_when_the_mount_fills_up_it_stays_as_it_is(make: Any, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, consumer = make(max_bytes=SEGMENT, put_timeout_s=0), make()
    view = take(consumer, 1, put(sender, 1, 3 * MIB))
    monkeypatch.setattr(segments, "mount_free", lambda: 0)
    assert put(sender, 2, 3 * MIB) is None
    health = sender.health()
    assert (health["capacity_bytes"], health["refused"]) == (producer._FIRST, 1)
    monkeypatch.undo()
    metadata = put(sender, 3, 3 * MIB)
    assert metadata is not None, "with room again another segment is added"
    take(consumer, 3, metadata)
    assert int(view[-1]) == 1


def test_a_segment_larger_than_what_is_free_is_not_even_begun(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before there were pieces: it would take all there is, and from whoever else lives on the mount."""
    sender = make(max_bytes=SEGMENT)
    monkeypatch.setattr(segments, "mount_free", lambda: SEGMENT - 1)
    put(sender, 1, 100_000)
    assert sender.health()["capacity_bytes"] < MIB


def test_given_back_while_it_grows(make: Any, by_hand: None, namespace: str) -> None:
    sender, consumer = make(), make()
    take(consumer, 1, put(sender, 1, 100_000))
    sender._producer._trim(0)
    assert leftovers.data_names(namespace) == []
    assert not sender._producer._take_more()
    assert sender.health()["capacity_bytes"] == 0
    take(consumer, 2, put(sender, 2, 100_000))


def test_closed_while_it_grows(make: Any, namespace: str) -> None:
    for n in range(10):
        sender = make(segment_bytes=256 * MIB)
        view = take(sender, n, put(sender, n, 100_000))
        sender.close()
        assert leftovers.data_names(namespace) == []
        assert int(view[-1]) == n


def test_killed_while_it_grows(children: Children, make: Any, shm_names: Any) -> None:
    child = children.with_connector(segment_bytes=512 * MIB, orphan_ttl_s=0)
    child.run("result = c.put('a', 'b', 1, np.arange(20_000))[2]")
    child.kill()
    make().close()
    assert [name for name in shm_names() if not name.endswith(".dir")] == []


def test_forked_while_it_grows(make: Any) -> None:
    sender, consumer = make(segment_bytes=256 * MIB), make()
    metadata = put(sender, 1, 100_000)
    pid = os.fork()
    if pid == 0:
        os._exit(sender.health()["status"] != "forked")
    assert os.waitpid(pid, 0)[1] == 0
    take(consumer, 1, metadata)


def test_extending_checks_its_numbers(make: Any, by_hand: None) -> None:
    sender = make()
    put(sender, 1, 100_000)
    [segment] = sender._producer.outbox.data_segments()
    for size in (0, segment.size - 1, SEGMENT + 1):
        with pytest.raises(ValueError, match="room for"):
            segment.extend(size)
    with pytest.raises(SegmentError):
        sender._producer.outbox.ring.extend(7, 64)


def test_large_segments_ask_for_huge_pages(make: Any) -> None:
    sender = make()
    put(sender, 1, 100_000)
    [segment] = sender._producer.outbox.data_segments()
    part = Path("/proc/self/smaps").read_text().split(segment.name, 1)[1]
    if not Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").exists():
        pytest.skip("this kernel has no huge pages for shared memory")
    assert "hg" in part[part.index("VmFlags:") :].splitlines()[0].split()


def test_page_tables_are_filled_whatever_the_first_payload_needs(make: Any) -> None:
    """Not only from whole pages on: the first payload ends anywhere, and with it what the segment begins with."""
    sender = make()
    put(sender, 1, 5 * MIB + 100)
    for thread in threading.enumerate():
        if thread.name == "omni-fastshm-memory":
            thread.join(20)
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("this kernel fills no page tables of what is mapped already")
    [segment] = sender._producer.outbox.data_segments()
    part = Path("/proc/self/smaps").read_text().split(segment.name, 1)[1]
    resident = int(part[part.index("Rss:") :].split()[1]) * 1024
    assert resident > reserved(sender) - 8192 > 2 * producer._FIRST


class Door:
    """Counts the steps of the other thread from the moment on in which this one has it."""

    def __init__(self, lock: Any, steps: list[str]) -> None:
        self._lock, self._steps = lock, steps

    def __enter__(self) -> None:
        self._lock.acquire()
        if threading.current_thread() is threading.main_thread():
            self._steps.clear()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_put_that_needs_more_waits_for_one_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until the thread has all: it must not take the lock again and again while somebody waits for it."""
    steps: list[str] = []
    begun, needed = threading.Event(), threading.Event()
    take = producer.Producer._take_more

    def counted(self: Any) -> bool:
        if threading.current_thread() is threading.main_thread():
            needed.set()
            return take(self)
        steps.append("step")
        begun.set()
        return not needed.is_set()

    monkeypatch.setattr(producer.Producer, "_take_more", counted)
    sender = make()
    put(sender, 1, 3 * MIB)
    assert begun.wait(20)
    sender._producer._door = Door(sender._producer._door, steps)
    put(sender, 2, 3 * MIB)
    assert len(steps) <= 2


@pytest.mark.parametrize("during", ["health", "put"])
def test_closed_by_a_signal_handler_while_it_looks_for_idle_segments(
    make: Any, monkeypatch: pytest.MonkeyPatch, namespace: str, during: str
) -> None:
    sender = make(segment_bytes=MIB, idle_segment_s=0)
    for n in range(2):  # two segments, so that puts look for idle ones as well
        put(sender, n, MIB - 4096)
    trim = sender._producer._trim

    def closed_meanwhile(idle_ns: int) -> None:
        sender.close()
        trim(idle_ns)

    monkeypatch.setattr(sender._producer, "_trim", closed_meanwhile)
    if during == "health":
        sender.health()
    else:
        with pytest.raises(ConnectorClosed):
            put(sender, 2, 100_000)
    assert leftovers.data_names(namespace) == []
