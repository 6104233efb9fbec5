"""Tasks that wait in `aget`: whatever becomes of threads, loops, connectors and forks, nobody is forgotten or kept."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import payloads

from omni_fastshm import ConnectorClosed, InProcessConnector, SharedMemoryConnector
from omni_fastshm.base import OmniConnectorBase
from omni_fastshm.connectors._spaces import Space
from omni_fastshm.errors import ForkedConnector

Connect = Callable[..., Any]


@pytest.fixture
def keyed(connect: Connect, namespace: str) -> Callable[..., Any]:
    return lambda **more: connect(SharedMemoryConnector, key_lookup=True, namespace=namespace, **more)


def in_child(body: Callable[[], object]) -> None:
    """Run it in a fork, which must end by itself; it exits with 0 unless something is raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        pytest.fail("the child is stuck")
    assert ended[1] == 0


def test_where_no_thread_can_be_had_it_looks_now_and_then(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = keyed(), keyed()
    producer.put("a", "b", "warm", 0)

    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def wait_for(request: str) -> Any:
        waiting = asyncio.create_task(consumer.aget("a", "b", request, timeout=20))
        await asyncio.sleep(0)  # it has looked in vain
        assert producer.put("a", "b", request, request)[0]
        return await waiting

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert asyncio.run(wait_for("first"))[0] == "first"
    assert asyncio.run(wait_for("second"))[0] == "second"


def test_a_close_that_lingers_wakes_them_first(keyed: Any, run_thread: Any) -> None:
    connector = keyed(linger_s=30)
    connector.put("a", "b", "untaken", np.zeros(1000))

    async def main() -> float:
        waiting = asyncio.create_task(connector.aget("a", "c", "never"))
        await asyncio.sleep(0)
        start = time.monotonic()
        closing = run_thread(connector.close)
        with pytest.raises(ConnectorClosed):
            await waiting
        assert not closing.done()
        return time.monotonic() - start

    try:
        assert asyncio.run(main()) < 10
    finally:
        connector._producer.outbox.cancel_all()
        connector._producer.outbox.wake()


def test_a_loop_that_is_closed_leaves_nothing(keyed: Any) -> None:
    consumer = keyed()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!", which is the point
    task = loop.create_task(consumer.aget("a", "b", "never"))
    for _ in range(3):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    gone = weakref.ref(task)
    del task
    deadline = time.monotonic() + 20
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    assert gone() is None


def test_a_connector_that_is_dropped_is_not_kept(keyed: Any) -> None:
    connector = SharedMemoryConnector(dict(keyed().config))
    assert asyncio.run(connector.aget("a", "b", "never", timeout=0.2)) is None
    gone = weakref.ref(connector)
    start = time.monotonic()
    del connector
    while gone() is not None and time.monotonic() - start < 3:  # less than the thread idles
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


@pytest.mark.parametrize("cls", [SharedMemoryConnector, InProcessConnector])
def test_misses_never_become_fewer(connect: Connect, namespace: str, cls: Any) -> None:
    """They are a Prometheus counter: one that goes down counts as restarted."""
    connector = connect(cls, key_lookup=True, namespace=namespace)
    seen: list[int] = []

    async def main() -> None:
        waiting = asyncio.create_task(connector.aget("a", "b", "never", timeout=0.3))
        while not waiting.done():
            seen.append(connector.health()["misses"])
            await asyncio.sleep(0.05)
        seen.append(connector.health()["misses"])
        cancelled = asyncio.create_task(connector.aget("a", "b", "never"))
        await asyncio.sleep(0)
        seen.append(connector.health()["misses"])
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        seen.append(connector.health()["misses"])

    asyncio.run(main())
    assert seen == sorted(seen)
    assert seen[-1] == 1


class Slow(InProcessConnector):
    """With the `aget` of connectors to which nothing tells of arrivals, and gets that take their time."""

    aget = OmniConnectorBase.aget

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.gate.wait(20)
        return super().get(*args, **kwargs)


def test_cancelled_twice_in_the_middle_of_a_take(connect: Connect, namespace: str) -> None:
    connector = connect(Slow, key_lookup=True, namespace=namespace)
    connector.begun, connector.gate = threading.Event(), threading.Event()
    connector.put("a", "b", "r", "the payload")

    async def main() -> Any:
        taking = asyncio.create_task(connector.aget("a", "b", "r"))
        await asyncio.to_thread(connector.begun.wait, 20)
        for _ in range(3):
            taking.cancel()
            await asyncio.sleep(0.01)
        connector.gate.set()
        return await taking

    assert asyncio.run(main())[0] == "the payload"


@pytest.mark.parametrize("cls", [SharedMemoryConnector, InProcessConnector])
def test_forked_while_another_thread_holds_the_lock(
    connect: Connect, namespace: str, run_thread: Any, cls: Any
) -> None:
    connector = connect(cls, key_lookup=True, namespace=namespace)
    held, gate = threading.Event(), threading.Event()

    def hold(lock: Any) -> None:
        with lock:
            held.set()
            assert gate.wait(30)

    def child(waiting: Any) -> None:
        waiting.get_coro().close()  # as the end of the loop that nobody runs here would
        with pytest.raises(ForkedConnector):
            connector.aget("a", "b", "r", timeout=5).send(None)

    async def main() -> None:
        waiting = asyncio.create_task(connector.aget("a", "b", "never"))
        await asyncio.sleep(0)
        lock = (
            connector._space.changed if cls is InProcessConnector else next(iter(connector._arrivals.values()))._changed
        )
        run_thread(hold, lock)
        assert await asyncio.to_thread(held.wait, 20)
        try:
            in_child(lambda: child(waiting))
        finally:
            gate.set()
        waiting.cancel()

    asyncio.run(main())


def test_one_that_leaves_while_others_are_told() -> None:
    space, told = Space(), []
    key = ("a", "b", "r")

    def leaves() -> None:  # as a task does that the garbage collector takes at this moment
        space.watchers[key].remove(leaves)

    space.watchers[key] = [leaves, lambda: told.append(1), lambda: told.append(2)]
    space.tell(key)
    assert told == [1, 2]


def test_a_payload_for_each_of_many_loops(keyed: Any, run_thread: Any) -> None:
    producer, consumer = keyed(), keyed()
    begun = threading.Barrier(5)

    async def main(request: str) -> Any:
        waiting = asyncio.create_task(consumer.aget("a", "b", request, timeout=20))
        await asyncio.sleep(0)
        begun.wait(20)
        return await waiting

    running = [run_thread(asyncio.run, main(str(n))) for n in range(4)]
    begun.wait(20)
    for n in range(4):
        producer.put("a", "b", str(n), payloads.array(1000, n))
    for n, each in enumerate(running):
        assert payloads.same(each.result(20)[0], payloads.array(1000, n))
