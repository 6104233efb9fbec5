"""Calls from any thread, several endpoints at once."""

from __future__ import annotations

import hashlib
import queue
import random
from typing import Any

import numpy as np
from contract.profile import Topic
from support import payloads

THREADS = 8


def digest(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes()).hexdigest()


def noise(rng: np.random.Generator, low: int = 100, high: int = 300_000) -> np.ndarray:
    return rng.integers(0, 256, int(rng.integers(low, high)), np.uint8)


class Threads(Topic):
    """Many threads on one connector."""

    def test_each_thread_puts_and_gets(self, run_thread: Any) -> None:
        connector = self.make(put_timeout_s=20)

        def work(me: int) -> int:
            rng = np.random.default_rng(me)
            held: list[tuple[np.ndarray, str]] = []
            for n in range(60):
                sent = noise(rng)
                want = digest(sent)
                ok, size, metadata = connector.put("a", f"b{me % 3}", f"{me}-{n}", {"x": sent})
                assert ok
                if self.may_overwrite:
                    sent[:] = 0
                got, size_got = connector.get("a", f"b{me % 3}", f"{me}-{n}", metadata)
                assert size == size_got
                held.append((got["x"], want))
                if len(held) > 3:
                    held.pop(0)
                assert all(digest(view) == expected for view, expected in held)
            return me

        assert [f.result(50) for f in [run_thread(work, n) for n in range(THREADS)]] == list(range(THREADS))
        health = connector.health()
        assert health["puts"] == health["gets"] == THREADS * 60
        assert health["live_blocks"] == health["used_bytes"] == health["leases"] == 0

    def test_some_put_and_others_get(self, run_thread: Any) -> None:
        producer, consumer = self.pair(put_timeout_s=20)
        control: queue.Queue[Any] = queue.Queue()

        def send(me: int) -> None:
            rng = np.random.default_rng(me)
            for n in range(50):
                sent = noise(rng)
                ok, _, metadata = producer.put("a", "b", f"{me}-{n}", sent)
                assert ok
                control.put((f"{me}-{n}", metadata, digest(sent)))

        def receive() -> int:
            count = 0
            while (item := control.get(timeout=40)) is not None:
                name, metadata, want = item
                assert digest(consumer.get("a", "b", name, metadata)[0]) == want
                count += 1
            return count

        senders = [run_thread(send, n) for n in range(4)]
        receivers = [run_thread(receive) for _ in range(4)]
        for future in senders:
            future.result(50)
        for _ in receivers:
            control.put(None)
        assert sum(f.result(50) for f in receivers) == 200
        assert producer.health()["live_blocks"] == producer.health()["used_bytes"] == 0

    def test_one_payload_raced_for_is_delivered_once(self, run_thread: Any) -> None:
        producer, consumers = self.make(), [self.make() for _ in range(3)]
        for n in range(40):
            takers = 1 + n % 3
            _, _, metadata = producer.put("a", "b", n, payloads.array(70_000, n), consumers=takers)
            racing = [run_thread(consumers[k % 3].get, "a", "b", n, metadata) for k in range(6)]
            got = [answer for f in racing if (answer := f.result(10)) is not None]
            assert len(got) == takers
            assert all(payloads.same(view, payloads.array(70_000, n)) for view, _ in got)
            del racing, got

    def test_cleanup_races_with_get(self, run_thread: Any) -> None:
        producer, consumer = self.pair()
        for n in range(60):
            _, _, metadata = producer.put("a", "b", n, payloads.array(70_000, n))
            cleaning = run_thread(consumer.cleanup, n)
            answer = consumer.get("a", "b", n, metadata)
            assert cleaning.result(20) is None
            assert answer is None or payloads.same(answer[0], payloads.array(70_000, n))
            del answer
        assert producer.health()["live_blocks"] == producer.health()["used_bytes"] == 0

    def test_replacing_races_with_get(self, run_thread: Any) -> None:
        producer, consumer = self.keyed(), self.keyed()

        def replace() -> None:
            for n in range(400):
                assert producer.put("a", "b", "r", np.full(70_000, n % 251, np.uint8))[0]

        replacing = run_thread(replace)
        last = -1
        while not replacing.done() or last < 0:
            answer = consumer.get("a", "b", "r")
            if answer is not None:
                low, high = int(answer[0].min()), int(answer[0].max())
                assert low == high, "bytes of two payloads in one view"
                last = low
        replacing.result()
        del answer
        consumer.cleanup("r")
        assert producer.health()["live_blocks"] == producer.health()["used_bytes"] == 0

    def test_views_die_in_other_threads(self, run_thread: Any) -> None:
        producer, consumer = self.pair(put_timeout_s=20)
        hand_over: queue.Queue[Any] = queue.Queue()

        def bury() -> None:
            kept: list[Any] = []
            rng = random.Random(2)
            while (view := hand_over.get(timeout=40)) is not None:
                kept.append(view)
                while len(kept) > 5:
                    kept.pop(rng.randrange(len(kept)))

        burying = [run_thread(bury) for _ in range(3)]
        for n in range(300):
            ok, _, metadata = producer.put("a", "b", n, payloads.array(200_000, n))
            assert ok
            view = consumer.get("a", "b", n, metadata)[0]
            assert view[0] == n
            hand_over.put(view)
            del view
        for _ in burying:
            hand_over.put(None)
        for future in burying:
            future.result(20)
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == producer.health()["used_bytes"] == 0


class Endpoints(Topic):
    """Several producers into one stage, one producer into several."""

    def test_several_producers_one_consumer(self, run_thread: Any) -> None:
        producers, consumer = [self.make(put_timeout_s=20) for _ in range(4)], self.make()
        control: queue.Queue[Any] = queue.Queue()

        def send(me: int) -> None:
            for n in range(40):
                ok, _, metadata = producers[me].put(f"s{me}", "sink", n, payloads.array(100_000, me * 1000 + n))
                assert ok
                control.put((me, n, metadata))

        sending = [run_thread(send, me) for me in range(4)]
        seen: dict[int, list[int]] = {me: [] for me in range(4)}
        for _ in range(160):
            me, n, metadata = control.get(timeout=40)
            got, _ = consumer.get(f"s{me}", "sink", n, metadata)
            assert payloads.same(got, payloads.array(100_000, me * 1000 + n))
            seen[me].append(n)
        del got
        assert all(order == list(range(40)) for order in seen.values())
        for future in sending:
            future.result(20)
        assert all(producer.health()["live_blocks"] == 0 for producer in producers)

    def test_one_producer_several_stages(self) -> None:
        producer, consumers = self.make(), [self.make() for _ in range(3)]
        for n in range(30):
            sent = [producer.put("a", f"b{k}", n, payloads.array(80_000, n * 10 + k)) for k in range(3)]
            for k, (_, _, metadata) in enumerate(sent):
                got = consumers[k].get("a", f"b{k}", n, metadata)[0]
                assert payloads.same(got, payloads.array(80_000, n * 10 + k))
        del got
        assert producer.health()["live_blocks"] == 0

    def test_both_directions(self) -> None:
        left, right = self.pair()
        for n in range(50):
            _, _, there = left.put("l", "r", n, payloads.array(100_000, n))
            _, _, back = right.put("r", "l", n, right.get("l", "r", n, there)[0] * 2)
            assert payloads.same(left.get("r", "l", n, back)[0], payloads.array(100_000, n) * 2)


TOPICS = [Threads, Endpoints]
