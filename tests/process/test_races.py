"""Threads, signals and other producers at the same moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import leftovers, payloads
from support.child import Children

from omni_fastshm import ConnectorClosed, segments

WORK_S = 0.8


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after a few instructions instead of 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Directory:
    """A directory in which something happens right after a put got its place in the order of all payloads."""

    def __init__(self, inner: Any, meanwhile: Any) -> None:
        self._inner = inner
        self._meanwhile = [meanwhile]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stamp(self) -> int:
        stamp: int = self._inner.stamp()
        if self._meanwhile:
            self._meanwhile.pop()()
        return stamp


class TestOneKey:
    """Puts of one key at the same time leave one payload, the one that is newest in the order of all."""

    @pytest.mark.parametrize("same", [True, False], ids=["one connector", "two connectors"])
    @pytest.mark.parametrize("nbytes", [10, 200_000])
    def test_an_older_one_that_is_published_last(self, make: Any, same: bool, nbytes: int) -> None:
        first = make(key_lookup=True)
        second = first if same else make(key_lookup=True)
        reader = make(key_lookup=True)
        for each in (first, second):  # their producers are made by the first put
            each.put("a", "b", "warm", 0)
            each.cleanup("warm")
        payload = np.zeros(nbytes, np.uint8)
        sender = first._producer
        real = sender.directory
        sender.directory = Directory(real, lambda: second.put("a", "b", "r", [payload, "newer"]))
        # For two takers, which is not the everyday way: there, nothing of this process can come in between.
        ok, _, metadata = first.put("a", "b", "r", [payload, "older"], consumers=2)
        sender.directory = real
        assert ok
        assert metadata is not None
        assert reader.get("a", "b", "r")[0][1] == "newer"
        assert reader.get("a", "b", "r") is None
        assert reader.get("a", "b", "r", metadata) is None
        assert first.health()["live_blocks"] == second.health()["live_blocks"] == 0

    def test_other_keys_stay(self, make: Any) -> None:
        first, second, reader = (make(key_lookup=True) for _ in range(3))
        for each in (first, second):
            each.put("a", "b", "warm", 0)
            each.cleanup("warm")
        sender = first._producer
        real = sender.directory

        def others() -> None:
            second.put("a", "b", "other", "another request")
            second.put("a", "c", "r", "another edge")

        sender.directory = Directory(real, others)
        first.put("a", "b", "r", "ours", consumers=2)  # not the everyday way, see above
        sender.directory = real
        found = [reader.get(*key)[0] for key in (("a", "b", "r"), ("a", "b", "other"), ("a", "c", "r"))]
        assert found == ["ours", "another request", "another edge"]
        assert reader.get("a", "b", "r")[0] == "ours"

    def test_threads(self, make: Any, run_thread: Any, quick_switches: None) -> None:
        senders, reader = [make(key_lookup=True) for _ in range(2)], make(key_lookup=True)
        left = []
        start, done = threading.Barrier(3), threading.Barrier(3)

        def put(me: int) -> None:
            for n in range(100):
                start.wait(20)
                senders[me].put("a", "b", "r", (n, me))
                done.wait(20)

        sending = [run_thread(put, me) for me in range(2)]
        for n in range(100):
            start.wait(20)
            done.wait(20)
            got = reader.get("a", "b", "r")
            left.append((got is not None and got[0][0] == n, reader.get("a", "b", "r")))
        for future in sending:
            future.result(20)
        assert left == [(True, None)] * 100


class TestLoans:
    """`allocate` beside `put`, and one loan in two puts."""

    def test_allocating_while_others_put(self, make: Any, run_thread: Any, quick_switches: None) -> None:
        connector = make(segment_bytes=8 << 20, max_bytes=64 << 20)
        kept = [connector.allocate(5000, np.uint8) for _ in range(50)]
        end = time.monotonic() + WORK_S

        def allocate() -> int:
            mine: list[Any] = []
            count = 0
            while time.monotonic() < end:
                mine.append(connector.allocate(5000, np.uint8))
                count += 1
                if len(mine) > 20:
                    mine.clear()
            return count

        def put(me: int) -> int:
            payload, count = np.full(100_000, me, np.uint8), 0
            while time.monotonic() < end:
                count += 1
                ok, _, metadata = connector.put("a", "b", f"{me}-{count}", [payload, payload])
                assert ok
                assert connector.get("a", "b", f"{me}-{count}", metadata)[0][1][99_999] == me
            return count

        work = [run_thread(allocate), run_thread(allocate), run_thread(put, 1), run_thread(put, 2)]
        assert all(future.result(30) > 0 for future in work)
        assert connector.health()["live_blocks"] == 0
        del kept
        assert connector.health()["used_bytes"] == 0

    def test_two_threads_put_one_loan(self, make: Any, run_thread: Any, quick_switches: None) -> None:
        connector = make()
        start, done = threading.Barrier(3), threading.Barrier(3)
        current: dict[str, Any] = {}

        def put(me: int) -> None:
            while True:
                start.wait(20)
                if "loan" not in current:
                    return
                current[f"sent{me}"] = connector.put("a", f"b{me}", "r", current["loan"])[2]
                done.wait(20)

        putting = [run_thread(put, me) for me in range(2)]
        shared = 0
        for _ in range(150):
            current["loan"] = connector.allocate(100_000, np.uint8)
            current["loan"][:] = 1
            start.wait(20)
            done.wait(20)
            one, two = (connector.get("a", f"b{me}", "r", current[f"sent{me}"])[0] for me in range(2))
            one[:] = 99
            shared += int(two[5] != 1)
            del one, two
        current.clear()
        start.wait(20)
        for future in putting:
            future.result(20)
        assert shared == 0
        assert connector.health()["used_bytes"] == 0


SIGNALS = """
import collections, gc, logging, os, signal, sys, time
import numpy as np
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

class Interrupted(BaseException):
    pass

armed = False

def handler(*_):
    global armed
    if armed:
        armed = False
        raise Interrupted

def left():
    return [n for n in os.listdir('/dev/shm') if f'.{namespace}.' in n]

logging.disable(logging.CRITICAL)  # a put that is refused says so, on stderr
sys.unraisablehook = lambda what: None  # the handler may just as well run in a callback that nobody can answer
signal.signal(signal.SIGALRM, handler)
payload = np.ones(16000)
counts = collections.Counter()
# Sparse enough that a round often gets far, and out of step with it.
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.00113)
end = time.monotonic() + seconds
while time.monotonic() < end or min(counts['rounds'] - 4, counts['interrupted'] - 21) < 0:
    assert time.monotonic() < end + 90
    c = SharedMemoryConnector({
        'key_lookup': True,
        'put_timeout_s': 0.05,
        'max_bytes': 1 << 20,
        'segment_bytes': 1 << 19,
        'idle_segment_s': 0.001,
    })
    c.put('a', 'b', 'full', payload)
    c.get('a', 'b', 'full')
    for n in range(60):
        got = loan = None
        try:
            armed = True
            # Now and then there is no room, and the put waits.
            c.put('a', 'b', n % 9, [payload] * (1 + n % 4))
            loan = c.allocate(10000, np.uint8)
            got = c.get('a', 'b', (n + 1) % 9) if n % 3 else None
            c.health()
        except Interrupted:
            counts['interrupted'] += 1
        except OSError as error:
            assert 'no room' in str(error), error
            counts['full'] += 1
        armed = False
    got = loan = None
    gc.collect()
    for n in range(9):
        c.cleanup(n)
    ok = c.put('a', 'b', 'after', [payload] * 3)[0]
    counts['refused afterwards'] += not ok
    counts['lost'] += c.get('a', 'b', 'after') is None
    start = time.monotonic()
    c.close()
    counts['slow close'] += time.monotonic() - start > 10
    counts['names'] += len(left())
    counts['rounds'] += 1
signal.setitimer(signal.ITIMER_REAL, 0)
result = dict(counts)
"""


class TestSignals:
    """A handler that raises at whatever moment leaves a connector that works and closes."""

    def test_a_timer_that_raises(self, children: Children, namespace: str) -> None:
        child = children.start()
        counts = child.run(SIGNALS, timeout=120, namespace=namespace, seconds=2.0)
        assert counts.pop("interrupted") > 20
        assert counts.pop("rounds") > 3
        counts.pop("full", None)
        assert {what: count for what, count in counts.items() if count} == {}


class TestCloseFromAHandler:
    """A signal handler that closes the connector must not wait for the thread that it interrupts."""

    @pytest.mark.time_limit(30)
    @pytest.mark.parametrize("place", ["before", "after"])
    def test_while_a_segment_is_added(
        self, make: Any, namespace: str, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        connector = make(segment_bytes=1 << 20, max_bytes=8 << 20, put_timeout_s=0.2)
        assert connector.put("a", "b", 0, payloads.array(100_000))[0]
        real = segments.make

        def closes(*args: Any, **kwargs: Any) -> Any:
            if place == "before":
                connector.close()
                return real(*args, **kwargs)
            made = real(*args, **kwargs)
            connector.close()
            return made

        monkeypatch.setattr(segments, "make", closes)
        with pytest.raises(ConnectorClosed):
            for n in range(100):
                connector.put("a", "b", n, payloads.array(100_000))
        assert leftovers.names(namespace) == []

    @pytest.mark.time_limit(30)
    def test_while_the_producer_is_made(self, make: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        connector = make()
        real = segments.make_control

        def closes(*args: Any) -> Any:
            connector.close()
            return real(*args)

        monkeypatch.setattr(segments, "make_control", closes)
        with pytest.raises(ConnectorClosed):
            connector.put("a", "b", 0, payloads.array(100_000))
        assert leftovers.names(namespace) == []
