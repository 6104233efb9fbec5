"""A frame written in parts by several threads is the frame written at once."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import thread as futures
from typing import Any

import numpy as np
import pytest
from support import payloads

from omni_fastshm import codec, copiers
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
    pool: Any = Copiers(threads)
    plan = codec.plan(TREES["one"])
    assert written(plan, lambda address: pool.pack(plan, Room(address))) == plan.to_bytes()
    pool.close()
    assert written(plan, lambda address: pool.pack(plan, Room(address))) == plan.to_bytes(), "closed: by the caller"


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
            each.join(20)
    assert threading.active_count() <= before


def large(value: int) -> np.ndarray:
    return np.full(shared_memory._THREADS_FROM, value, np.uint8)


def test_a_thread_that_could_not_start_writes_nothing_later(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it should have copied was copied without it, and other payloads lie there by now."""
    sender = connect(SharedMemoryConnector, copy_threads=2)
    metadata = sender.put("a", "b", "warm", large(0)[:100_000])[2]  # starts the thread that takes memory
    sender.get("a", "b", "warm", metadata)

    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        metadata = sender.put("a", "b", "first", large(1))[2]
    assert (sender.get("a", "b", "first", metadata, copy=True)[0] == 1).all()
    metadata = sender.put("a", "b", "second", large(2)[:-4096])[2]  # too small for threads: where the first one was
    second = sender.get("a", "b", "second", metadata)[0]
    metadata = sender.put("a", "b", "third", large(3))[2]
    assert (sender.get("a", "b", "third", metadata)[0] == 3).all()
    assert (second == 2).all()


class Room:
    def __init__(self, address: int) -> None:
        self.address = address


class HeldUp:
    """A plan of which no thread but the caller's copies before the gate opens."""

    def __init__(self, plan: codec.Plan) -> None:
        self._plan = plan
        self._caller = threading.current_thread()
        self.begun, self.gate, self.done = threading.Event(), threading.Event(), threading.Event()

    def pack_part(self, address: int, part: int, parts: int) -> None:
        if threading.current_thread() is self._caller:
            assert self.begun.wait(20)
            self._plan.pack_part(address, part, parts)
        else:
            self.begun.set()
            assert self.gate.wait(20)
            self._plan.pack_part(address, part, parts)
            self.done.set()


def test_ctrl_c_while_others_copy_gives_no_memory_away(run_thread: Any) -> None:
    plan = codec.plan(TREES["one"])
    memory = np.zeros(plan.frame_size, np.uint8)
    pool: Any = Copiers(2)
    held_up, room = HeldUp(plan), Room(memory.ctypes.data)
    given_back, main = weakref.ref(room), threading.get_ident()

    def interrupt() -> None:
        assert held_up.begun.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = run_thread(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.pack(held_up, room)
        interrupting.result(20)
        del room
        assert given_back() is not None, "somebody still writes there"
        held_up.gate.set()
        assert held_up.done.wait(20)
    finally:
        pool.close()
        held_up.gate.set()
    for each in threading.enumerate():
        if each.name.startswith("omni-fastshm-copy"):
            each.join(20)
    assert given_back() is None


def test_a_signal_handler_puts_while_another_put_hands_out_parts(connect: Any) -> None:
    """At each line of it: whatever lock it holds there, the handler in the same thread must not need."""
    sender, payload = connect(SharedMemoryConnector, copy_threads=2), large(7)
    ours = {copiers.__file__, futures.__file__}
    found: list[bool] = []

    def handler(*_: Any) -> None:
        sys.settrace(None)
        found.append(sender.put("a", "b", "inner", payload)[0])
        sender.cleanup("inner")
        sys.settrace(trace)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_code.co_filename in ours:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        sys.settrace(trace)
        answer = sender.put("a", "b", "outer", payload)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    assert answer[0]
    assert len(found) > 3
    assert all(found)
