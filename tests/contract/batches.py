"""Several payloads at once, and waiting inside an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from contract.profile import Topic
from support import payloads
from support.timing import timed

from omni_fastshm.errors import CodecError, ConfigError, ConnectorClosed


class Batches(Topic):
    """`put_many` and `get_many` are as many `put` and `get`."""

    def test_many_go_and_many_come(self) -> None:
        producer, consumer = self.pair()
        sent = [(f"r{i}", {"v": i, "t": payloads.array(20_000 * (i % 4), i)}) for i in range(12)]
        answers = producer.put_many("a", "b", sent)
        assert [ok for ok, _, _ in answers] == [True] * 12
        found = consumer.get_many(
            "a", "b", [(name, answer[2]) for (name, _), answer in zip(sent, answers, strict=True)]
        )
        for (_, data), answer, got in zip(sent, answers, found, strict=True):
            assert payloads.same(got[0], data)
            assert got[1] == answer[1]

    def test_a_dict_of_them(self) -> None:
        producer, consumer = self.pair()
        answers = producer.put_many("a", "b", {"r1": 1, "r2": 2})
        places = {name: answer[2] for name, answer in zip(("r1", "r2"), answers, strict=True)}
        assert [found[0] for found in consumer.get_many("a", "b", places)] == [1, 2]

    @pytest.mark.parametrize("item", ["r1", 7, ("r1",), ("r1", 1, 2)])
    def test_what_is_no_pair_is_refused(self, item: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        with pytest.raises(ConfigError, match=r"put_many takes pairs \(request id, payload\)"):
            producer.put_many("a", "b", [item])
        assert consumer.get_many("a", "b", ["r", "r1"]) == [None, None]

    def test_a_bare_id_is_not_taken_for_its_letters(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        producer.put("a", "b", "r", 1)
        with pytest.raises(ConfigError, match=r"get_many takes several request ids, as in \['req'\]"):
            consumer.get_many("a", "b", "req")
        assert consumer.get("a", "b", "r")[0] == 1

    def test_by_key_each_that_is_there(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        producer.put_many("a", "b", [("0", 0), ("2", 2)], consumers=2)
        assert [found and found[0] for found in consumer.get_many("a", "b", ["0", "1", "2"])] == [0, None, 2]
        assert [found and found[0] for found in consumer.get_many("a", "b", [0, 2, 0])] == [0, 2, None]

    def test_the_time_is_for_all_of_them(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        assert timed(0.3, 0.85, consumer.get_many, "a", "b", ["x", "y", "z"], timeout=0.3) == [None] * 3
        waiting = run_thread(consumer.get_many, "a", "b", ["x", "y"], timeout=20)
        producer.put("a", "b", "y", "second")
        producer.put("a", "b", "x", "first")
        assert [found[0] for found in waiting.result(10)] == ["first", "second"]

    def test_what_cannot_be_carried_stops_it_and_leaves_the_rest(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        with pytest.raises(CodecError) as caught:
            producer.put_many("a", "b", [("0", 0), ("1", _Refused()), ("2", 2)])
        assert (caught.value.op, caught.value.key) == ("put", "1")
        assert [found and found[0] for found in consumer.get_many("a", "b", ["0", "1", "2"])] == [0, None, None]

    @pytest.mark.parametrize("timeout", [-1, float("nan"), "1"])
    def test_a_wrong_time(self, timeout: Any) -> None:
        with pytest.raises(ConfigError, match="timeout"):
            self.keyed().get_many("a", "b", ["x"], timeout=timeout)

    def test_closed(self) -> None:
        connector = self.keyed()
        connector.close()
        with pytest.raises(ConnectorClosed):
            connector.put_many("a", "b", [("r", 1)])
        with pytest.raises(ConnectorClosed):
            connector.get_many("a", "b", ["r"])


class EventLoop(Topic):
    """`await aget(…)` waits for a payload without holding up the event loop."""

    def test_what_is_there_comes_at_once(self) -> None:
        producer, consumer = self.pair()
        metadata = producer.put("a", "b", "r", payloads.array(100_000))[2]
        found = run(consumer.aget("a", "b", "r", metadata))
        assert payloads.same(found[0], payloads.array(100_000))
        assert run(consumer.aget("a", "b", "r", metadata)) is None  # with metadata there is nothing to wait for

    def test_the_time_runs_out(self) -> None:
        consumer = self.keyed()
        calls = []

        def waits(timeout: float) -> Any:
            calls.append(timeout)
            return run(consumer.aget("a", "b", "r", timeout=timeout))

        assert timed(0.2, 0.8, waits, 0.2) is None
        assert waits(0) is None
        health = consumer.health()
        assert (health["errors"], health["misses"]) == (0, len(calls)), "all looks of one call are one miss"

    def test_many_tasks_wait_and_the_loop_goes_on(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        count = 40

        async def main() -> int:
            tasks = [asyncio.create_task(consumer.aget("a", "b", str(i))) for i in range(count)]
            turns = 0
            while turns < 20:  # the loop is free while all of them wait
                await asyncio.sleep(0.005)
                turns += 1
            threads = threading.active_count()
            for i in reversed(range(count)):
                await asyncio.to_thread(producer.put, "a", "b", str(i), {"v": i})
            assert [found and found[0]["v"] for found in await asyncio.gather(*tasks)] == list(range(count))
            return threads

        before = threading.active_count()
        threads = run(main())
        assert threads - before < count / 2, "a thread for each that waits"

    def test_two_loops_wait_for_one_stage(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()
        waiting = [run_thread(lambda i=i: run(consumer.aget("a", "b", f"r{i}", timeout=20))) for i in range(2)]
        for i in range(2):
            producer.put("a", "b", f"r{i}", i)
        assert [each.result(10)[0] for each in waiting] == [0, 1]

    def test_a_task_that_is_cancelled_takes_nothing(self) -> None:
        producer, consumer = self.keyed(), self.keyed()

        async def main() -> None:
            task = asyncio.create_task(consumer.aget("a", "b", "r"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(main())
        producer.put("a", "b", "r", 7)
        assert consumer.get("a", "b", "r", timeout=10)[0] == 7

    def test_close_ends_the_wait(self) -> None:
        consumer = self.keyed()

        async def main() -> None:
            task = asyncio.create_task(consumer.aget("a", "b", "r"))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(consumer.close)
            with pytest.raises(ConnectorClosed):
                await asyncio.wait_for(task, 10)

        run(main())
        with pytest.raises(ConnectorClosed):
            run(consumer.aget("a", "b", "r"))

    def test_views_end_the_lease_as_ever(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        producer.put("a", "b", "r", payloads.array(100_000))
        found = run(consumer.aget("a", "b", "r", timeout=10))
        assert found is not None
        del found
        gc.collect()  # the event loop's tasks are cycles of their own
        assert consumer.health()["leases"] == 0

    @pytest.mark.parametrize("wrong", [{"timeout": -1}, {"timeout": "1"}, {"copy": 1}])
    def test_wrong_arguments(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            run(self.keyed().aget("a", "b", "r", **{"timeout": 1, **wrong}))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


class _Refused:
    pass


TOPICS = [Batches, EventLoop]
