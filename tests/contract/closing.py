"""The end of a connector: idempotent, silent, and nothing left."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from contract.profile import Topic
from support import leftovers, payloads
from support.timing import timed

from omni_fastshm.errors import ConfigError, ConnectorClosed, FastShmError


class Closing(Topic):
    """`close`, the context manager, and `__del__`."""

    def test_twice_and_more(self) -> None:
        connector = self.make()
        connector.put("a", "b", "r", payloads.array(100_000))
        for _ in range(3):
            assert connector.close() is None
        assert leftovers.names(self.namespace) == []

    def test_after_it_put_and_get_are_errors(self) -> None:
        connector = self.keyed()
        _, _, metadata = connector.put("a", "b", "r", payloads.array(100_000))
        connector.close()

        with pytest.raises(ConnectorClosed):
            connector.put("a", "b", "r", 1)
        with pytest.raises(ConnectorClosed):
            connector.put("a", "b", "r", payloads.array(100_000))
        with pytest.raises(ConnectorClosed):
            connector.get("a", "b", "r")
        with pytest.raises(ConnectorClosed):
            connector.get("a", "b", "r", metadata, timeout=None)
        assert issubclass(ConnectorClosed, RuntimeError)

    def test_after_it_cleanup_and_health_are_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        connector, consumer = self.pair()
        _, size, metadata = connector.put("a", "b", "r", payloads.array(100_000))
        consumer.get("a", "b", "r", metadata)
        open_status = connector.health()["status"]
        connector.close()
        caplog.clear()

        connector.cleanup("r")
        health = connector.health()

        assert not caplog.records
        assert health["puts"] == 1
        assert health["bytes_transferred"] == size
        assert health["live_blocks"] == health["used_bytes"] == health["leases"] == 0
        assert health["status"] != open_status

    def test_as_a_context_manager(self) -> None:
        with self.make() as connector:
            connector.put("a", "b", "r", payloads.array(100_000))
        with pytest.raises(ConnectorClosed):
            connector.put("a", "b", "r", 1)

        with pytest.raises(KeyError), self.make() as connector:
            raise KeyError
        with pytest.raises(ConnectorClosed):
            connector.put("a", "b", "r", 1)

    @pytest.mark.parametrize(("untaken", "words"), [(0, None), (1, "1 payload that"), (2, "2 payloads that")])
    def test_what_it_drops_is_one_warning(
        self, untaken: int, words: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        connector = self.make()
        for number in range(untaken):
            connector.put("a", "b", number, payloads.array(100_000))
        caplog.clear()
        connector.close()
        connector.close()
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert [words in line and "nobody had taken" in line for line in said if words] == [True] * bool(words)
        assert len(said) == bool(words)
        assert connector.health()["dropped"] == untaken

    def test_the_warning_says_whose_payloads(self, caplog: pytest.LogCaptureFixture) -> None:
        connector = self.make()
        size = sum(connector.put("a", to, f"r{to}", payloads.array(100_000))[1] for to in ("b", "b", "c", "d", "e"))
        caplog.clear()
        connector.close()
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        said = record.getMessage()
        assert said.startswith("closed with 5 payloads that nobody had taken: dropped (")
        for words in (
            connector.health()["connector"],
            self.namespace,
            f"{size} bytes",
            "edges a->b: 2, ",
            " and 1 more",
        ):
            assert words in said
        assert said.count("->") == 3
        assert "Close after the last get, or set linger_s" in said
        assert record.bytes == size  # type: ignore[attr-defined]
        if type(connector).__name__ != "SharedMemoryConnector":  # whose shared memory has only hashes of them
            assert "requests 'rb', 'rb', 'rc' and 2 more" in said

    def test_the_warning_after_waiting_in_vain(self, caplog: pytest.LogCaptureFixture) -> None:
        connector = self.make(linger_s=0.01)
        connector.put("a", "b", "r", payloads.array(100_000))
        connector.put("a", "c", "r", payloads.array(100_000))
        taken = connector.put("a", "d", "r", payloads.array(100_000))
        assert connector.get("a", "d", "r", taken[2]) is not None
        caplog.clear()
        connector.close()
        (said,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "edges a->b: 1, a->c: 1" in said
        assert "No taker came within linger_s" in said

    def test_a_dropped_connector_leaves_nothing(self, unraisable: list[Any]) -> None:
        connector = self.connector_class()(dict(self.base_settings))
        connector.put("a", "b", "r", payloads.array(100_000))
        del connector
        gc.collect()
        assert leftovers.names(self.namespace) == []
        assert not unraisable

    def test_a_half_built_connector_is_dropped_silently(self, unraisable: list[Any]) -> None:
        cls = self.connector_class()
        half = cls.__new__(cls)
        half.close()
        half.__del__()
        del half
        for bad in ({"max_bytes": -1}, {"nonsense": 1}, {"namespace": "a/b"}):
            with pytest.raises(ConfigError):
                cls(bad)
        gc.collect()
        assert not unraisable

    def test_views_live_on(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        view = consumer.get("a", "b", "r", metadata)[0]
        consumer.close()
        producer.close()
        assert leftovers.names(self.namespace) == []
        assert payloads.same(view, payloads.array(100_000))
        del view
        assert consumer.health()["leases"] == 0

    def test_after_it_leases_are_still_counted(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        view = consumer.get("a", "b", "r", metadata)[0]
        consumer.close()
        assert consumer.health()["leases"] == 1
        del view
        assert consumer.health()["leases"] == 0

    def test_what_a_closed_producer_sent_is_gone(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        producer.close()
        assert consumer.get("a", "b", "r", metadata) is None
        assert consumer.health()["errors"] == 0

    def test_what_nobody_took_is_counted_in_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        producer = self.make()
        for n in range(5):
            producer.put("a", "b", n, payloads.array(100_000))
        caplog.clear()
        producer.close()
        lines = [r for r in caplog.records if r.levelno >= logging.INFO]
        assert len(lines) == 1
        assert "5" in lines[0].getMessage()

    def test_a_close_with_nothing_untaken_is_quiet(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        view = consumer.get("a", "b", "r", metadata)
        producer.close()
        consumer.close()
        assert not [r for r in caplog.records if r.levelno >= logging.INFO]
        del view

    def test_the_other_end_goes_on(self) -> None:
        producer, consumer = self.pair()
        third = self.make()
        consumer.close()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        assert payloads.same(third.get("a", "b", "r", metadata)[0], payloads.array(100_000))

    @pytest.mark.parametrize("timeout", [30, None])
    def test_it_wakes_a_waiting_get(self, timeout: float | None, run_thread: Any) -> None:
        consumer = self.keyed()
        waiting = run_thread(consumer.get, "a", "b", "r", timeout=timeout)
        with pytest.raises(NotYet):
            waiting.result(0.1)
        consumer.close()
        error = waiting.exception(10)
        assert isinstance(error, ConnectorClosed) or waiting.result(0) is None

    def test_it_wakes_a_waiting_put(self, run_thread: Any) -> None:
        producer = self.make(segment_bytes=4 << 20, max_bytes=4 << 20, put_timeout_s=30)
        producer.put("a", "b", "first", payloads.array(3 << 20))
        waiting = run_thread(producer.put, "a", "b", "r", payloads.array(3 << 20))
        with pytest.raises(NotYet):
            waiting.result(0.2)
        producer.close()
        error = waiting.exception(10)
        assert isinstance(error, ConnectorClosed) or waiting.result(0) == (False, 0, None)

    @pytest.mark.time_limit(25)  # less than the calls would wait
    @pytest.mark.parametrize("waiting_in", ["get", "put"])
    def test_from_a_signal_handler(self, waiting_in: str) -> None:
        """As services do on SIGTERM: the handler runs inside the very call that waits."""
        connector = self.keyed(segment_bytes=4 << 20, max_bytes=4 << 20, put_timeout_s=30)
        connector.put("a", "b", "first", payloads.array(3 << 20))
        previous = signal.signal(signal.SIGUSR1, lambda signum, frame: connector.close())
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        start = time.monotonic()
        try:
            with pytest.raises(ConnectorClosed):
                timer.start()  # in here: it may come at any time
                if waiting_in == "get":
                    connector.get("a", "b", "r", timeout=30)
                else:
                    connector.put("a", "b", "r", payloads.array(3 << 20))
            assert time.monotonic() - start < 10
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, previous)
        assert leftovers.names(self.namespace) == []

    def test_from_two_threads_at_once(self, run_thread: Any) -> None:
        for _ in range(10):
            producer = self.make()
            producer.put("a", "b", "r", payloads.array(100_000))
            for future in [run_thread(producer.close) for _ in range(4)]:
                assert future.result(20) is None

    def test_while_others_work(self, run_thread: Any) -> None:
        def work(connector: Any, me: int) -> str:
            try:
                for n in range(100_000):
                    _, _, metadata = connector.put("a", "b", f"{me}-{n}", payloads.array(70_000, n))
                    if metadata:
                        connector.get("a", "b", f"{me}-{n}", metadata)
            except ConnectorClosed:
                return "closed"
            except FastShmError as error:
                return repr(error)
            return "never closed"

        for _ in range(5):
            connector = self.make()
            workers = [run_thread(work, connector, me) for me in range(4)]
            with pytest.raises(NotYet):
                workers[0].result(0.1)
            connector.close()
            assert [worker.result(30) for worker in workers] == ["closed"] * 4
            assert connector.health()["leases"] == 0


class Linger(Topic):
    """`linger_s`: how long close waits for takers of what is untaken."""

    def test_it_does_not_wait_by_default(self) -> None:
        producers = [self.make() for _ in range(5)]  # one for each try of `timed`
        for producer in producers:
            producer.put("a", "b", "r", payloads.array(100_000))
        timed(0, 0.2, lambda: producers.pop().close())

    def test_it_ends_when_the_last_payload_is_taken(self, run_thread: Any) -> None:
        producer = self.make(linger_s=20)
        consumer = self.make()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        closing = run_thread(producer.close)
        with pytest.raises(NotYet):
            closing.result(0.2)
        view = consumer.get("a", "b", "r", metadata)[0]
        closing.result(10)
        assert payloads.same(view, payloads.array(100_000))

    def test_it_ends_when_the_time_is_over(self) -> None:
        producers, consumer = [self.make(linger_s=0.3) for _ in range(5)], self.make()  # one for each try of `timed`
        sent = [producer.put("a", "b", "r", payloads.array(100_000))[2] for producer in producers]
        timed(0.3, 0.9, lambda: producers.pop().close())
        assert all(consumer.get("a", "b", "r", metadata) is None for metadata in sent[len(producers) :])

    def test_with_nothing_untaken_it_does_not_wait(self) -> None:
        producer, consumer = self.make(linger_s=10), self.make()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        view = consumer.get("a", "b", "r", metadata)
        start = time.monotonic()
        producer.close()
        assert time.monotonic() - start < 5
        del view


TOPICS = [Closing, Linger]
