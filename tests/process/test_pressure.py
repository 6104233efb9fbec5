"""A ring at its limit: slow, stopped and dying readers, many who wait, some who give up."""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import random
import signal
import threading
import time
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from support import leftovers, payloads
from support.child import Child, Children
from support.threads import start
from support.waiting import until

MIB = payloads.MIB
ONE = {"segment_bytes": MIB, "max_bytes": MIB}  # room for one payload of `WHOLE` bytes at a time
WHOLE = 900_000
WAITERS = 64


class Around:
    """Another object with some of its methods replaced; compiled classes cannot be patched."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Interrupt(BaseException):
    """What ends a wait from outside."""


def data_bytes(namespace: str) -> int:
    """What the data segments take on the mount."""
    total = 0
    for name in leftovers.data_names(namespace):
        try:
            total += (leftovers.MOUNT / name).stat().st_blocks * 512
        except FileNotFoundError:  # given back meanwhile
            continue
    return total


class Line:
    """Threads that wait in `put` for the one place of a ring, one behind the other."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.standing: set[threading.Thread] = set()
        self.waits: list[tuple[int, int, int]] = []
        real = connector._producer.outbox

        def announce() -> Any:
            self.standing.add(threading.current_thread())
            return real.announce()

        def wait(*args: int) -> Any:
            self.waits.append(args)  # type: ignore[arg-type]
            return real.wait(*args)

        connector._producer.outbox = Around(real, announce=announce, wait=wait)
        self.sent: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.answers: dict[int, Any] = {}
        self.threads: dict[int, threading.Thread] = {}

    def join(self, number: int, timeout_s: float = 60) -> None:
        """Let another thread put payload `number`; returns when it stands in line."""
        self.connector._settings = {**self.connector._settings, "put_timeout_s": timeout_s}
        self.answers[number], self.threads[number] = start(self._put, number)
        until(lambda: self.threads[number] in self.standing, 0)

    def _put(self, number: int) -> bool:
        ok, _, metadata = self.connector.put("a", "b", number, payloads.array(WHOLE, number))
        if ok:
            self.sent.put((number, metadata))
        return bool(ok)

    def interrupt(self, number: int) -> None:
        """Raise an exception in a waiting thread, as a signal handler does in the main one."""
        ident = ctypes.c_ulong(self.threads[number].ident or 0)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupt)) == 1

    def serve(self, count: int, consumer: Any) -> list[int]:
        """Take `count` payloads, one after the other: in which order were they sent?"""
        order = []
        for _ in range(count):
            number, metadata = self.sent.get(timeout=30)
            got = consumer.get("a", "b", number, metadata)
            assert payloads.same(got[0], payloads.array(WHOLE, number))
            del got
            order.append(number)
        return order

    def end(self) -> None:
        for thread in self.threads.values():
            thread.join(30)
            assert not thread.is_alive()


class TestSlowConsumer:
    """Nobody reads fast enough."""

    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_order_and_memory_on_three_edges(self, make: Any, children: Children, namespace: str, keyed: bool) -> None:
        extra = {"key_lookup": True, "namespace": namespace} if keyed else {}
        limit = 2 * MIB
        writer = children.with_connector(
            segment_bytes=MIB // 2, max_bytes=limit, put_timeout_s=30, shm_threshold_bytes=0, **extra
        )
        reader = make(**extra)
        writer.start(
            "for n in range(240):\n"
            "    ok, _, md = c.put('a', f'b{n % 3}', n, np.full(20_000 + n % 4 * 40_000, n % 251, np.uint8))\n"
            "    emit((n, ok, md))\n"
            "result = c.health()"
        )
        held: list[Any] = []
        last = dict.fromkeys(range(3), -1)
        rng = random.Random(3)
        for _ in range(240):
            n, ok, metadata = writer.event()
            assert ok, f"payload {n} was dropped"
            assert data_bytes(namespace) <= limit
            got = reader.get("a", f"b{n % 3}", n, None if keyed else metadata)[0]
            assert got.size == 20_000 + n % 4 * 40_000
            assert int(got.min()) == int(got.max()) == n % 251
            assert metadata["shm"]["sequence"] > last[n % 3]
            last[n % 3] = metadata["shm"]["sequence"]
            held.append(got)
            del got
            while len(held) > 3:  # views die in any order
                held.pop(rng.randrange(len(held)))
        held.clear()
        health = writer.finish()
        assert health["refused"] == health["errors"] == 0
        assert health["capacity_bytes"] <= limit

    def test_the_time_of_all_who_waited_is_counted(self, make: Any) -> None:
        connector = make(**ONE)
        connector.put("a", "b", 0, payloads.array(WHOLE))
        assert connector.health()["blocked_s"] == 0
        line = Line(connector)
        for n in range(1, 4):
            line.join(n, timeout_s=0.2)
        line.end()
        assert [line.answers[n].result() for n in range(1, 4)] == [False] * 3
        assert 0.6 <= connector.health()["blocked_s"] < 60
        assert connector.health()["refused"] == 3
        connector.cleanup(0)

    def test_a_waiting_put_keeps_nobody_from_anything_else(self, make: Any) -> None:
        connector, consumer = make(**ONE), make()
        view = consumer.get("a", "b", 0, connector.put("a", "b", 0, payloads.array(WHOLE))[2])
        line = Line(connector)
        line.join(1)
        there = make().put("c", "d", 5, payloads.array(100_000, 5))[2]
        assert payloads.same(connector.get("c", "d", 5, there)[0], payloads.array(100_000, 5))
        assert connector.put("a", "b", "small", "inline")[0]
        assert connector.health()["live_blocks"] == 1
        connector.cleanup("another")
        assert not line.answers[1].done()
        del view
        assert line.serve(1, consumer) == [1]
        line.end()


class TestLine:
    """First come, first served, whoever gives up."""

    def full(self, make: Any) -> tuple[Any, Line]:
        connector = make(**ONE)
        connector.put("a", "b", "first", payloads.array(WHOLE))
        return connector, Line(connector)

    def test_sixty_four_threads(self, make: Any) -> None:
        connector, line = self.full(make)
        for n in range(WAITERS):
            line.join(n)
        connector.cleanup("first")
        assert line.serve(WAITERS, make()) == list(range(WAITERS))
        line.end()
        assert not connector._producer.queue

    def test_some_run_out_of_time_and_some_are_interrupted(self, make: Any) -> None:
        connector, line = self.full(make)
        for n in range(WAITERS):
            line.join(n, timeout_s=0.05 if n % 4 == 1 else 60)
        late, hit = range(1, WAITERS, 4), range(0, WAITERS, 4)  # the head of the line is among those that are hit
        assert not any(line.answers[n].result(30) for n in late)
        for n in hit:
            line.interrupt(n)
        assert {type(line.answers[n].exception(30)) for n in hit} == {Interrupt}
        connector.cleanup("first")
        left = [n for n in range(WAITERS) if n % 4 > 1]
        assert line.serve(len(left), make()) == left
        line.end()
        assert not connector._producer.queue
        assert connector.health()["live_blocks"] == 0
        assert connector.health()["refused"] == len(late)

    def test_closing_ends_all_waits(self, make: Any) -> None:
        from omni_fastshm.errors import ConnectorClosed

        connector, line = self.full(make)
        for n in range(WAITERS):
            line.join(n)
        connector.close()
        line.end()
        assert {type(answer.exception()) for answer in line.answers.values()} == {ConnectorClosed}


class TestManyReaders:
    """Many wait in `get`."""

    def test_each_of_sixty_four_gets_its_own(self, make: Any, children: Children, namespace: str) -> None:
        keyed = {"key_lookup": True, "namespace": namespace}
        consumer, writer = make(**keyed), children.with_connector(**keyed)
        waiting = {n: start(consumer.get, "a", f"b{n % 5}", n, timeout=30) for n in range(WAITERS)}
        order = random.Random(4).sample(range(WAITERS), WAITERS)
        writer.run("for n in order: assert c.put('a', f'b{n % 5}', n, np.full(20_000, n))[0]", order=order)
        for n, (answer, thread) in waiting.items():
            assert (answer.result(30)[0] == n).all()
            thread.join()
        del waiting, answer
        assert consumer.health()["misses"] == 0
        assert writer.run("result = c.health()['live_blocks']") == 0

    def test_as_many_as_there_are_takes_and_no_more(self, make: Any, namespace: str) -> None:
        keyed = {"key_lookup": True, "namespace": namespace}
        producer, consumer = make(**keyed), make(**keyed)
        waiting = [start(consumer.get, "a", "b", "r", timeout=100) for _ in range(WAITERS)]
        for done in (WAITERS // 2, WAITERS):  # those that the first payload is not for wait on, and get the second
            assert producer.put("a", "b", "r", payloads.array(100_000, done), consumers=WAITERS // 2)[0]
            until(lambda done=done: sum(answer.done() for answer, _ in waiting) == done)
        answers = [answer.result() for answer, _ in waiting]
        for done in (WAITERS // 2, WAITERS):
            assert sum(payloads.same(answer[0], payloads.array(100_000, done)) for answer in answers) == WAITERS // 2
        while waiting:
            waiting.pop()[1].join()
        del answers
        assert producer.health()["live_blocks"] == 0


CLASSES = """
import os, signal
from omni_fastshm import register_type
class Note:
    def __init__(self, value): self.value = value
def die(value): os.kill(os.getpid(), signal.SIGKILL)
register_type(Note, lambda note: note.value, {'read': Note, 'die': die}[how], name='note')
"""


class TestDyingReaders:
    """A reader is killed. What it had not taken is there for another, what it held is room again."""

    def holding(self, children: Children, metadata: Any) -> Child:
        child = children.with_connector()
        child.run("view = c.get('a', 'b', 'first', md)[0]", md=metadata)
        return child

    def test_one_look_is_enough_for_a_writer_that_waits(self, make: Any, children: Children) -> None:
        """No bell rings when a holder dies: the writer looks once per slice of its wait, and that is all it takes."""
        connector = make(**ONE)
        child = self.holding(children, connector.put("a", "b", "first", payloads.array(WHOLE))[2])
        line = Line(connector)
        line.join(1)
        until(lambda: len(line.waits) > 2, 0)
        child.kill()
        before = len(line.waits)
        assert line.answers[1].result(30) is True
        assert len(line.waits) - before <= 1
        assert all(slice_ns <= 50_000_000 for _, slice_ns, _ in line.waits)
        line.serve(1, make())
        line.end()

    def test_killed_while_it_decodes(self, children: Children) -> None:
        """Between hold and take: nothing is used up."""
        producer, dying, heir = (children.with_connector(**ONE, put_timeout_s=20) for _ in range(3))
        for child, how in ((producer, "read"), (dying, "die"), (heir, "read")):
            child.run(CLASSES, how=how)
        metadata = producer.run("result = c.put('a', 'b', 'r', [Note(5), np.arange(110_000)])[2]")
        dying.killed = True
        dying.start("c.get('a', 'b', 'r', md)", md=metadata)
        assert dying.process.wait(60) == -signal.SIGKILL
        assert heir.run("got = c.get('a', 'b', 'r', md)[0]; result = got[0].value", md=metadata) == 5
        assert heir.run("result = c.get('a', 'b', 'r', md)", md=metadata) is None
        assert heir.run("result = int(got[1][-1]); del got") == 109_999
        assert producer.run("ok, _, md = c.put('a', 'b', 'next', np.zeros(110_000)); result = ok"), "its bit is kept"
        producer.run("c.cleanup('next')")

    def test_killed_after_its_take(self, make: Any, children: Children) -> None:
        """The payload is gone with it, the room is not."""
        connector = make(**ONE, put_timeout_s=20)
        metadata = connector.put("a", "b", "first", payloads.array(WHOLE))[2]
        self.holding(children, metadata).kill()
        assert make().get("a", "b", "first", metadata) is None
        assert connector.put("a", "b", "next", payloads.array(WHOLE))[0]
        connector.cleanup("next")


def stop(child: Child) -> None:
    """Suspend it; returns when it does nothing any more."""
    child.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


class TestStoppedProcesses:
    """SIGSTOP, a debugger, a frozen container: alive, and silent for as long as it pleases."""

    def test_a_reader_that_holds_the_last_block(self, make: Any, children: Children) -> None:
        connector = make(**ONE, put_timeout_s=0.2)
        metadata = connector.put("a", "b", "first", payloads.array(WHOLE, 7))[2]
        child = children.with_connector()
        child.run("view = c.get('a', 'b', 'first', md)[0]", md=metadata)
        stop(child)
        try:
            assert connector.put("a", "b", "second", payloads.array(WHOLE)) == (False, 0, None)
            assert connector.health()["live_blocks"] == 1
            line = Line(connector)
            line.join(3)
            assert not line.answers[3].done()
        finally:
            child.process.send_signal(signal.SIGCONT)
        assert child.run("result = int(view[-1])") == int(payloads.array(WHOLE, 7)[-1]), "its view changed meanwhile"
        assert not line.answers[3].done()
        child.run("del view")
        assert line.serve(1, make()) == [3]
        line.end()

    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_a_producer(self, make: Any, children: Children, namespace: str, keyed: bool) -> None:
        extra = {"key_lookup": True, "namespace": namespace} if keyed else {}
        child = children.with_connector(**extra, orphan_ttl_s=0)
        sent = child.run("result = [c.put('a', 'b', n, np.full(20_000, n))[2] for n in range(5)]")
        stop(child)
        try:
            consumer = make(**extra)  # its janitor takes nobody for dead who is only still
            for n, metadata in enumerate(sent[:4]):
                assert (consumer.get("a", "b", n, None if keyed else metadata)[0] == n).all()
            consumer.cleanup(4)
        finally:
            child.process.send_signal(signal.SIGCONT)
        assert child.run("result = c.health()['live_blocks']") == 0


class TestClocks:
    """Waits and ages go by the monotonic clock; the time of day may jump as it likes."""

    def test_a_time_of_day_that_jumps(
        self, make: Any, children: Children, namespace: str, monkeypatch: pytest.MonkeyPatch, run_thread: Any
    ) -> None:
        child = children.with_connector(orphan_ttl_s=30)
        orphan = child.run("result = c.put('a', 'b', 'left', np.arange(20_000))[2]")
        child.kill()
        year = 365 * 86_400
        jumps = itertools.cycle([0, year, -year])
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        monkeypatch.setattr(time, "time_ns", lambda: int((real() + next(jumps)) * 1e9))

        start = time.monotonic()
        consumer = make(key_lookup=True, namespace=namespace)
        assert consumer.get("a", "b", "never", timeout=0.3) is None
        producer = make(**ONE, put_timeout_s=0.3, linger_s=0.3)
        assert producer.put("a", "b", 0, payloads.array(WHOLE))[0]
        assert producer.put("a", "b", 1, payloads.array(WHOLE)) == (False, 0, None)
        producer.close()
        assert 0.9 <= time.monotonic() - start < 20

        waiting = run_thread(consumer.get, "a", "b", "r", timeout=30)
        with pytest.raises(NotYet):
            waiting.result(0.2)
        make(key_lookup=True, namespace=namespace).put("a", "b", "r", 5)
        assert waiting.result(20)[0] == 5
        make().close()
        assert consumer.get("a", "b", "left", orphan) is not None, "swept before its time"
        make().close()  # and now that it is taken, it goes
