"""Waiting for a payload, and sending without waiting."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from contract.profile import Topic
from support import leftovers, payloads
from support.timing import timed
from support.waiting import until

from omni_fastshm.errors import CodecError, ConfigError, ConnectorClosed


class Waiting(Topic):
    """`get(timeout=…)` waits for a payload that is not there yet."""

    def test_zero_does_not_wait(self) -> None:
        consumer = self.keyed()
        assert timed(0, 0.05, consumer.get, "a", "b", "r") is None
        assert timed(0, 0.05, consumer.get, "a", "b", "r", timeout=0) is None

    def test_the_time_runs_out(self) -> None:
        consumer = self.keyed()
        assert timed(0.3, 0.8, consumer.get, "a", "b", "r", timeout=0.3) is None
        assert consumer.health()["errors"] == 0

    @pytest.mark.parametrize("timeout", [20, 20.0, None])
    @pytest.mark.parametrize("nbytes", [8, 100_000])
    def test_a_payload_that_comes_later(self, timeout: float | None, nbytes: int, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        waiting = run_thread(consumer.get, "a", "b", "r", timeout=timeout)
        with pytest.raises(NotYet):
            waiting.result(0.1)
        producer.put("a", "c", "r", 0)  # neither another edge …
        producer.put("a", "b", "q", 0)  # … nor another request ends the wait
        with pytest.raises(NotYet):
            waiting.result(0.1)
        producer.put("a", "b", "r", payloads.array(nbytes))
        assert payloads.same(waiting.result(20)[0], payloads.array(nbytes))

    @pytest.mark.parametrize("timeout", [1e300, 2**70])
    def test_a_timeout_beyond_any_clock(self, timeout: float, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        waiting = run_thread(consumer.get, "a", "b", "r", timeout=timeout)
        with pytest.raises(NotYet):
            waiting.result(0.1)
        producer.put("a", "b", "r", 5)
        assert waiting.result(20)[0] == 5

    def test_from_a_producer_that_starts_later(self, run_thread: Any) -> None:
        consumer = self.keyed()
        waiting = run_thread(consumer.get, "a", "b", "r", timeout=20)
        with pytest.raises(NotYet):
            waiting.result(0.1)
        self.keyed().put("a", "b", "r", 5)
        assert waiting.result(20)[0] == 5

    def test_the_answer_comes_soon_after_the_payload(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        delays = []
        for n in range(12):
            done = run_thread(lambda n=n: (consumer.get("a", "b", n, timeout=20), time.monotonic()))
            with pytest.raises(NotYet):
                done.result(0.05)
            producer.put("a", "b", n, 1)
            sent = time.monotonic()
            delays.append(done.result(20)[1] - sent)
        # A busy machine only ever adds to it; who looks every so often is late by half of that, most of the times.
        assert statistics.quantiles(delays, n=4)[0] < 0.005, delays

    def test_many_wait_and_each_gets_its_own(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        waiting = [run_thread(consumer.get, "a", f"s{n % 3}", n, timeout=20) for n in range(16)]
        for n in reversed(range(16)):
            producer.put("a", f"s{n % 3}", n, payloads.array(1000, n))
        assert all(payloads.same(f.result(10)[0], payloads.array(1000, n)) for n, f in enumerate(waiting))

    def test_several_takers_wait_for_one_payload(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        waiting = [run_thread(consumer.get, "a", "b", "r", timeout=20) for _ in range(4)]
        producer.put("a", "b", "r", payloads.array(100_000), consumers=4)
        assert all(payloads.same(f.result(10)[0], payloads.array(100_000)) for f in waiting)
        assert consumer.get("a", "b", "r") is None

    def test_of_two_that_wait_for_one_payload_one_gets_it(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        waiting = [run_thread(consumer.get, "a", "b", "r", timeout=20) for _ in range(2)]
        with pytest.raises(NotYet):
            waiting[0].result(0.1)
        producer.put("a", "b", "r", 7)
        until(lambda: any(f.done() for f in waiting))
        with pytest.raises(NotYet):
            next(f for f in waiting if not f.done()).result(0.2)
        producer.put("a", "b", "r", 8)
        assert sorted(f.result(10)[0] for f in waiting) == [7, 8]

    def test_with_metadata_of_what_is_gone_nobody_waits_for_ever(self, run_thread: Any) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        consumer.get("a", "b", "r", metadata)
        assert run_thread(consumer.get, "a", "b", "r", metadata, timeout=0.2).result(20) is None

    @pytest.mark.parametrize("timeout", [None, 30])
    def test_a_signal_handler_runs_and_may_end_the_wait(self, timeout: float | None) -> None:
        class Interrupt(Exception):
            pass

        def handler(signum: int, frame: Any) -> None:
            raise Interrupt

        consumer = self.keyed()
        previous = signal.signal(signal.SIGUSR1, handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        start = time.monotonic()
        try:
            with pytest.raises(Interrupt):
                timer.start()  # in here: it may come at any time
                consumer.get("a", "b", "r", timeout=timeout)
            assert time.monotonic() - start < 10
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, previous)

    def test_a_signal_without_an_exception_does_not_shorten_the_wait(self) -> None:
        hits: list[int] = []
        consumer = self.keyed()
        previous = signal.signal(signal.SIGUSR1, lambda signum, frame: hits.append(signum))
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        start = time.monotonic()
        try:
            assert consumer.get("a", "b", "r", timeout=0.5) is None
        finally:
            took = time.monotonic() - start
            timer.join()
            signal.signal(signal.SIGUSR1, previous)
        assert 0.5 <= took < 10
        assert hits

    def test_other_threads_run_during_the_wait(self, run_thread: Any) -> None:
        consumer = self.keyed()
        waiting = run_thread(consumer.get, "a", "b", "r", timeout=0.4)
        rounds = 0
        while not waiting.done():
            rounds += 1
        assert rounds > 1000

    @pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", True, [1], -float("inf")], ids=repr)
    def test_a_timeout_that_is_none(self, timeout: Any) -> None:
        consumer = self.keyed()
        with pytest.raises(ConfigError, match="timeout"):
            consumer.get("a", "b", "r", timeout=timeout)


class Background(Topic):
    """`put(wait=False)` answers with a future."""

    def test_the_future_gives_the_triple(self) -> None:
        producer, consumer = self.pair()
        future = producer.put("a", "b", "r", payloads.array(100_000), wait=False)

        assert isinstance(future, Future)
        ok, size, metadata = future.result(10)
        assert ok is True
        assert consumer.get("a", "b", "r", metadata)[1] == size

    def test_an_error_comes_out_of_the_future(self) -> None:
        future = self.make().put("a", "b", "r", [1, object()], wait=False)
        with pytest.raises(CodecError, match=r"\[1\]"):
            future.result(10)

    def test_in_the_order_of_the_calls(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        futures = [producer.put("a", "b", "r", n, wait=False) for n in range(200)]
        assert all(f.result(20)[0] for f in futures)
        assert consumer.get("a", "b", "r")[0] == 199

    def test_close_waits_for_what_was_promised_or_says_so(self) -> None:
        for _ in range(10):  # close meets the first put, which makes the segments, at ever other points
            producer = self.make()
            futures = [producer.put("a", "b", n, payloads.array(100_000), wait=False) for n in range(20)]
            producer.close()
            for future in futures:
                try:
                    error = future.exception(10)
                except CancelledError:
                    continue
                assert error is None or isinstance(error, ConnectorClosed)
            assert leftovers.names(self.namespace) == []

    def test_after_close(self) -> None:
        producer = self.make()
        producer.close()
        with pytest.raises(ConnectorClosed):
            future = producer.put("a", "b", "r", 1, wait=False)
            future.result(20)


TOPICS = [Waiting, Background]
