"""How much fits, what happens when nothing more does, and that the space comes back."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from contract.profile import Topic
from support import leftovers, payloads
from support.timing import timed
from support.waiting import until

MIB = payloads.MIB
KIB = payloads.KIB


def numbers(text: str) -> list[int]:
    return [int(found.replace(",", "").replace("_", "")) for found in re.findall(r"\d[\d,_]*", text)]


def fill(connector: Any, nbytes: int) -> list[Any]:
    """Put until it is refused; give the metadata of what was taken in."""
    sent: list[Any] = []
    while True:
        ok, _, metadata = connector.put("a", "b", len(sent), payloads.array(nbytes, len(sent)))
        if not ok:
            return sent
        sent.append(metadata)


def drain(connector: Any, sent: list[Any], nbytes: int) -> None:
    for n, metadata in random.Random(5).sample(list(enumerate(sent)), len(sent)):
        assert payloads.same(connector.get("a", "b", n, metadata)[0], payloads.array(nbytes, n))


class Full(Topic):
    """A place that is full is an answer and not an error."""

    def test_the_answer_comes_after_the_timeout(self, caplog: pytest.LogCaptureFixture) -> None:
        connector = self.make(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=0.2)
        assert connector.put("a", "b", "first", payloads.array(3 * MIB))[0]
        before = connector.health()
        caplog.clear()

        assert timed(0.2, 0.7, connector.put, "a", "b", "request-77", payloads.array(3 * MIB)) == (False, 0, None)

        after = connector.health()
        assert after["refused"] == before["refused"] + sum("request-77" in r.getMessage() for r in caplog.records)
        assert after["refused"] > before["refused"]
        assert after["live_blocks"] == 1
        assert after["used_bytes"] == before["used_bytes"]
        assert after["blocked_s"] - before["blocked_s"] >= 0.19
        assert after["puts"] == before["puts"]

    def test_the_log_says_why(self, caplog: pytest.LogCaptureFixture) -> None:
        connector = self.make(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=0)
        connector.put("a", "b", "first", payloads.array(3 * MIB))
        caplog.clear()
        connector.put("a", "b", "request-77", payloads.array(3 * MIB))

        lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(lines) == 1
        text = lines[0].getMessage()
        assert "request-77" in text
        found = numbers(text.replace("request-77", ""))
        assert any(3 * MIB <= n < 3 * MIB + 8 * KIB for n in found), ("bytes wanted", text)
        assert any(n < 1 * MIB + 64 * KIB for n in found), ("bytes free", text)

    def test_what_can_never_fit_is_refused_at_once(self, caplog: pytest.LogCaptureFixture) -> None:
        connector = self.make(segment_bytes=MIB, max_bytes=4 * MIB, put_timeout_s=5)
        start = time.monotonic()
        assert connector.put("a", "b", "request-78", payloads.array(6 * MIB)) == (False, 0, None)
        assert time.monotonic() - start < 4, "it waited"
        assert connector.health()["refused"] == 1
        assert connector.health()["no_room"] == {"too_large": 1}
        assert any("request-78" in r.getMessage() for r in caplog.records)
        assert connector.put("a", "b", "r", payloads.array(MIB))[0]

    def test_a_timeout_of_zero_does_not_wait(self) -> None:
        connector = self.make(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=0)
        connector.put("a", "b", "first", payloads.array(3 * MIB))
        assert timed(0, 0.15, connector.put, "a", "b", "r", payloads.array(3 * MIB)) == (False, 0, None)

    def test_a_waiting_put_goes_on_when_a_view_dies(self, run_thread: Any) -> None:
        producer, consumer = self.pair(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=20)
        _, _, metadata = producer.put("a", "b", "first", payloads.array(3 * MIB))
        view = consumer.get("a", "b", "first", metadata)
        waiting = run_thread(producer.put, "a", "b", "r", payloads.array(3 * MIB, 1))
        until(lambda: self.puts_that_wait(producer) == 1)
        with pytest.raises(NotYet):
            waiting.result(0.3)

        del view
        ok, _, metadata = waiting.result(10)

        assert ok
        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(3 * MIB, 1))
        assert 0.2 < producer.health()["blocked_s"] < 20

    def test_a_waiting_put_goes_on_after_cleanup(self, run_thread: Any) -> None:
        producer, consumer = self.pair(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=20)
        producer.put("a", "b", "first", payloads.array(3 * MIB))
        waiting = run_thread(producer.put, "a", "b", "r", payloads.array(3 * MIB))
        with pytest.raises(NotYet):
            waiting.result(0.2)
        consumer.cleanup("first")
        assert waiting.result(10)[0]

    def test_a_signal_may_end_the_wait(self) -> None:
        class Interrupt(Exception):
            pass

        def handler(signum: int, frame: Any) -> None:
            raise Interrupt

        producer, consumer = self.pair(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=30)
        _, _, metadata = producer.put("a", "b", "first", payloads.array(3 * MIB))
        previous = signal.signal(signal.SIGUSR1, handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        start = time.monotonic()
        try:
            with pytest.raises(Interrupt):
                timer.start()  # in here: it may come at any time
                producer.put("a", "b", "r", payloads.array(3 * MIB))
            assert time.monotonic() - start < 10
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, previous)
        assert producer.health()["live_blocks"] == 1
        assert consumer.get("a", "b", "first", metadata)
        assert producer.put("a", "b", "r", payloads.array(3 * MIB))[0], "the interrupted one still stands in line"

    def test_waiting_puts_are_served_in_turn(self, run_thread: Any) -> None:
        producer, consumer = self.pair(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=20)
        order: list[int] = []
        _, _, metadata = producer.put("a", "b", "first", payloads.array(3 * MIB))

        def put(n: int) -> Any:
            answer = producer.put("a", "b", n, payloads.array(3 * MIB, n))
            order.append(n)
            return answer

        waiting = []
        for n in range(4):
            waiting.append(run_thread(put, n))
            until(lambda n=n: self.puts_that_wait(producer) == n + 1)
        assert consumer.get("a", "b", "first", metadata)
        for n, future in enumerate(waiting):
            _, _, metadata = future.result(20)
            assert consumer.get("a", "b", n, metadata)
        assert order == [0, 1, 2, 3]


class Growth(Topic):
    """Segments come and go with what is in them."""

    def test_nine_tenths_are_usable(self) -> None:
        connector = self.make(segment_bytes=2 * MIB, max_bytes=8 * MIB, put_timeout_s=0)
        sent = fill(connector, 100 * KIB)
        assert len(sent) * 100 * KIB >= 0.9 * 8 * MIB
        assert connector.health()["used_bytes"] <= 8 * MIB
        drain(connector, sent, 100 * KIB)

    @pytest.mark.parametrize("nbytes", [70_000, 300_000, 1_000_000])
    def test_an_idle_ring_takes_again_what_a_new_one_takes(self, nbytes: int) -> None:
        connector = self.make(segment_bytes=2 * MIB, max_bytes=8 * MIB, put_timeout_s=0)
        first = fill(connector, nbytes)
        drain(connector, first, nbytes)
        for other in (int(0.9 * 8 * MIB), 200_000, 2 * MIB + 5, 100_000):
            again = fill(connector, other)
            assert again, other
            drain(connector, again, other)
        last = fill(connector, nbytes)
        assert len(last) >= len(first)
        for n in range(len(last)):
            connector.cleanup(n)
        assert connector.health()["used_bytes"] == 0

    def test_one_payload_may_take_nine_tenths(self) -> None:
        producer, consumer = self.pair(segment_bytes=MIB, max_bytes=8 * MIB, put_timeout_s=0)
        nbytes = int(0.9 * 8 * MIB)
        for n in range(3):
            ok, _, metadata = producer.put("a", "b", n, payloads.array(nbytes, n))
            assert ok
            assert payloads.same(consumer.get("a", "b", n, metadata)[0], payloads.array(nbytes, n))

    def test_a_huge_payload_gets_its_own_segment_and_gives_it_back(self) -> None:
        producer, consumer = self.pair(segment_bytes=MIB, max_bytes=64 * MIB, idle_segment_s=0)
        producer.cleanup("warm")
        for n in range(3):
            ok, _, metadata = producer.put("a", "b", n, payloads.array(20 * MIB, n))
            assert ok
            assert self.data_bytes() >= 20 * MIB
            assert payloads.same(consumer.get("a", "b", n, metadata)[0], payloads.array(20 * MIB, n))
        self.one_small_transfer(producer, consumer)
        assert self.data_bytes() <= 4 * MIB

    def test_segments_are_added_and_given_back(self) -> None:
        producer, consumer = self.pair(segment_bytes=MIB, max_bytes=16 * MIB, put_timeout_s=0, idle_segment_s=0)
        self.one_small_transfer(producer, consumer)
        few = len(leftovers.data_names(self.namespace))
        sent = [producer.put("a", "b", n, payloads.array(300_000, n)) for n in range(30)]
        assert all(ok for ok, _, _ in sent)
        assert len(leftovers.data_names(self.namespace)) > few
        drain(consumer, [metadata for _, _, metadata in sent], 300_000)
        for _ in range(20):
            self.one_small_transfer(producer, consumer)
        assert len(leftovers.data_names(self.namespace)) <= few + 1
        assert producer.health()["used_bytes"] == 0

    def test_max_bytes_bounds_the_data_segments(self) -> None:
        connector = self.make(segment_bytes=MIB, max_bytes=8 * MIB, put_timeout_s=0)
        rng = random.Random(11)
        live: list[Any] = []
        for n in range(400):
            nbytes = rng.choice([70_000, 200_000, 900_000, 1_500_000, 3_000_000])
            ok, _, metadata = connector.put("a", "b", n, payloads.array(nbytes, n))
            if ok:
                live.append((n, metadata, nbytes))
            if len(live) > 3 and (not ok or rng.random() < 0.6):
                n, metadata, nbytes = live.pop(rng.randrange(len(live)))
                assert payloads.same(connector.get("a", "b", n, metadata)[0], payloads.array(nbytes, n))
            assert self.data_bytes() <= 8 * MIB
        for n, metadata, nbytes in live:
            assert payloads.same(connector.get("a", "b", n, metadata)[0], payloads.array(nbytes, n))
        assert connector.health()["used_bytes"] == 0
        assert connector.health()["live_blocks"] == 0

    def test_a_payload_that_is_held_for_long_does_not_block_the_rest(self) -> None:
        producer, consumer = self.pair(segment_bytes=MIB, max_bytes=8 * MIB, put_timeout_s=0)
        held = []
        for n in range(4):
            _, _, metadata = producer.put("a", "b", n, payloads.array(200_000, n))
            held.append(consumer.get("a", "b", n, metadata)[0])
            for m in range(60):
                ok, _, metadata = producer.put("a", "b", "x", payloads.array(200_000, m))
                assert ok, (n, m)
                assert payloads.same(consumer.get("a", "b", "x", metadata)[0], payloads.array(200_000, m))
        assert all(payloads.same(view, payloads.array(200_000, n)) for n, view in enumerate(held))

    def test_an_untaken_payload_does_not_block_the_rest(self) -> None:
        producer, consumer = self.pair(segment_bytes=MIB, max_bytes=8 * MIB, put_timeout_s=0)
        _, _, old = producer.put("a", "b", "old", payloads.array(200_000, 1))
        for m in range(100):
            ok, _, metadata = producer.put("a", "b", "x", payloads.array(200_000, m))
            assert ok, m
            assert consumer.get("a", "b", "x", metadata)
        assert payloads.same(consumer.get("a", "b", "old", old)[0], payloads.array(200_000, 1))

    def test_the_steady_state_makes_no_new_names(self) -> None:
        producer, consumer = self.pair(segment_bytes=MIB, max_bytes=8 * MIB)
        self.one_small_transfer(producer, consumer)
        names = leftovers.names(self.namespace)
        for n in range(1000):
            _, _, metadata = producer.put("a", "b", n, payloads.array(70_000, n))
            assert consumer.get("a", "b", n, metadata)
        assert leftovers.names(self.namespace) == names
        assert producer.health()["live_blocks"] == 0
        assert producer.health()["used_bytes"] == 0

    def one_small_transfer(self, producer: Any, consumer: Any) -> None:
        _, _, metadata = producer.put("a", "b", "small", payloads.array(70_000))
        assert consumer.get("a", "b", "small", metadata)

    def data_bytes(self) -> int:
        sizes = []
        for name in leftovers.data_names(self.namespace):
            try:
                sizes.append((leftovers.MOUNT / name).stat().st_size)
            except FileNotFoundError:
                continue
        return sum(sizes)


TOPICS = [Full, Growth]
