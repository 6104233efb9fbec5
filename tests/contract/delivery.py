"""Who gets a payload, how often, and when nobody does."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
from contract.profile import Topic
from support import payloads
from support.timing import timed


def settled(connector: Any) -> bool:
    """Nothing of the producer is in use any more."""
    health = connector.health()
    return bool(health["live_blocks"] == 0 and health["used_bytes"] == 0)


class Once(Topic):
    """One payload is delivered once, or to as many takers as `put` was told."""

    def test_a_second_get_gives_none(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))

        assert consumer.get("a", "b", "r", metadata)
        assert consumer.get("a", "b", "r", metadata) is None
        assert producer.get("a", "b", "r", metadata) is None
        assert settled(producer)

    def test_a_second_get_gives_none_while_the_first_is_still_held(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))

        held = consumer.get("a", "b", "r", metadata)
        assert consumer.get("a", "b", "r", metadata) is None
        assert payloads.same(held[0], payloads.array(100_000))

    def test_a_stale_handle_never_gives_another_payload(self) -> None:
        producer, consumer = self.pair()
        stale = []
        for n in range(300):
            _, _, metadata = producer.put("a", "b", "r", payloads.array(70_000, n))
            assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(70_000, n))
            stale.append(metadata)
        _, _, fresh = producer.put("a", "b", "r", payloads.array(70_000, -5))
        assert all(consumer.get("a", "b", "r", metadata) is None for metadata in stale)
        assert payloads.same(consumer.get("a", "b", "r", fresh)[0], payloads.array(70_000, -5))

    def test_the_second_answer_comes_at_once(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        consumer.get("a", "b", "r", metadata)
        assert timed(0, 0.5, consumer.get, "a", "b", "r", metadata, timeout=0) is None

    @pytest.mark.parametrize("takers", [1, 2, 3, 7, 255])
    def test_as_many_takers_as_were_asked_for(self, takers: int) -> None:
        producer, consumer = self.pair()
        others = [producer, consumer]
        _, size, metadata = producer.put("a", "b", "r", payloads.array(100_000), consumers=takers)

        held = [others[n % 2].get("a", "b", "r", metadata) for n in range(takers)]

        assert all(payloads.same(got, payloads.array(100_000)) and s == size for got, s in held)
        assert all(other.get("a", "b", "r", metadata) is None for other in others)
        while len(held) > 1:
            held.pop()
            assert payloads.same(held[0][0], payloads.array(100_000))
        held.clear()
        assert settled(producer)

    def test_a_payload_with_takers_left_stays(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000), consumers=2)

        assert consumer.get("a", "b", "r", metadata)  # dropped at once
        assert producer.health()["live_blocks"] == 1
        assert consumer.get("a", "b", "r", metadata)
        assert settled(producer)

    def test_two_payloads_under_one_id_each_by_its_own_metadata(self) -> None:
        producer, consumer = self.pair()
        one = producer.put("a", "b", "r", payloads.array(100_000, 1))[2]
        two = producer.put("a", "b", "r", payloads.array(100_000, 2))[2]

        assert payloads.same(consumer.get("a", "b", "r", two)[0], payloads.array(100_000, 2))
        assert payloads.same(consumer.get("a", "b", "r", one)[0], payloads.array(100_000, 1))

    def test_one_connector_may_be_both_ends(self) -> None:
        both = self.make()
        _, _, metadata = both.put("a", "b", "r", payloads.array(100_000))
        assert payloads.same(both.get("a", "b", "r", metadata)[0], payloads.array(100_000))


class ByKey(Topic):
    """With `key_lookup` the edge and the request id are enough."""

    @pytest.mark.parametrize("nbytes", [8, 100_000])
    def test_get_by_key_alone(self, nbytes: int) -> None:
        producer, consumer = self.keyed(), self.keyed()
        _, size, _ = producer.put("a", "b", "r", payloads.array(nbytes))

        got, size_got = consumer.get("a", "b", "r")

        assert payloads.same(got, payloads.array(nbytes))
        assert size_got == size
        assert consumer.get("a", "b", "r") is None

    @pytest.mark.parametrize("nbytes", [8, 100_000])
    def test_get_by_metadata_too(self, nbytes: int) -> None:
        producer, consumer = self.keyed(), self.keyed()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(nbytes))

        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(nbytes))
        assert consumer.get("a", "b", "r") is None
        assert settled(producer)

    def test_nothing_there_is_none(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        producer.put("a", "b", "r", 1)
        for call in (("a", "b", "x"), ("b", "a", "r"), ("a", "c", "r"), ("a", "b", "R")):
            assert consumer.get(*call) is None
        assert consumer.get("a", "b", "r") is not None
        assert consumer.health()["misses"] == 4
        assert consumer.health()["errors"] == 0

    def test_the_same_key_again_replaces_what_nobody_took(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        old = producer.put("a", "b", "r", payloads.array(100_000, 1))[2]
        producer.put("a", "b", "r", payloads.array(100_000, 2))

        assert consumer.get("a", "b", "r", old) is None
        assert payloads.same(consumer.get("a", "b", "r")[0], payloads.array(100_000, 2))
        assert consumer.get("a", "b", "r") is None
        assert settled(producer)

    def test_replacing_a_partly_taken_payload_cancels_the_takes_that_are_left(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        old = producer.put("a", "b", "r", payloads.array(100_000, 1), consumers=3)[2]
        view = consumer.get("a", "b", "r")[0]
        producer.put("a", "b", "r", payloads.array(100_000, 2))

        assert consumer.get("a", "b", "r", old) is None
        assert payloads.same(consumer.get("a", "b", "r")[0], payloads.array(100_000, 2))
        assert consumer.get("a", "b", "r") is None
        assert payloads.same(view, payloads.array(100_000, 1))
        del view
        assert settled(producer)

    def test_a_thousand_replacements_leave_one_payload(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        for n in range(1000):
            assert producer.put("a", "b", "r", payloads.array(80_000, n))[0]
        assert producer.health()["live_blocks"] == 1
        assert payloads.same(consumer.get("a", "b", "r")[0], payloads.array(80_000, 999))
        assert settled(producer)

    def test_edges_do_not_cross(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        edges = [("0", "1"), ("0", "2"), ("1", "2"), ("01", "2"), ("0", "12"), ("1", "0")]
        for n, edge in enumerate(edges):
            producer.put(*edge, "r", n)
        order = list(enumerate(edges))
        random.Random(3).shuffle(order)
        assert all(consumer.get(*edge, "r")[0] == n for n, edge in order)

    def test_several_producers_one_consumer(self) -> None:
        producers, consumer = [self.keyed() for _ in range(4)], self.keyed()
        for n, producer in enumerate(producers):
            producer.put("a", "b", n, payloads.array(70_000, n))
        for n in (2, 0, 3, 1):
            assert payloads.same(consumer.get("a", "b", n)[0], payloads.array(70_000, n))
        assert all(settled(producer) for producer in producers)

    def test_a_producer_that_starts_later_is_found(self) -> None:
        consumer = self.keyed()
        assert consumer.get("a", "b", "r") is None
        producer = self.keyed()
        producer.put("a", "b", "r", 5)
        assert consumer.get("a", "b", "r")[0] == 5

    def test_many_keys_at_once(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        for n in range(1000):
            assert producer.put("a", "b", f"request-{n}", n)[0], n
        order = list(range(1000))
        random.Random(1).shuffle(order)
        assert [consumer.get("a", "b", f"request-{n}")[0] for n in order] == order
        assert settled(producer)

    def test_another_namespace_is_another_world(self) -> None:
        here = self.keyed()
        there = self.make(key_lookup=True, namespace=self.namespace + "x")
        try:
            here.put("a", "b", "r", 1)
            assert there.get("a", "b", "r") is None
            there.cleanup("r")
            assert here.get("a", "b", "r")[0] == 1
        finally:
            there.close()


class Cleanup(Topic):
    """`cleanup` drops exactly one request, on all its edges, for all producers, from either end."""

    def test_the_payload_is_gone_and_the_space_is_free(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))

        assert producer.cleanup("r") is None

        assert consumer.get("a", "b", "r", metadata) is None
        assert settled(producer)
        producer.cleanup("r")

    def test_from_the_consumer(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))

        consumer.cleanup("r")

        assert settled(producer)
        assert consumer.get("a", "b", "r", metadata) is None
        assert consumer.health()["leases"] == 0
        assert consumer.health()["gets"] == 0

    def test_on_all_edges_and_for_all_producers(self) -> None:
        producers, consumer = [self.make() for _ in range(3)], self.make()
        sent = []
        for producer in producers:
            for edge in (("a", "b"), ("a", "c"), ("b", "c")):
                sent.append((edge, producer.put(*edge, "r", payloads.array(70_000))[2]))

        consumer.cleanup("r")

        assert all(consumer.get(*edge, "r", metadata) is None for edge, metadata in sent)
        assert all(settled(producer) for producer in producers)

    def test_only_the_exact_id(self) -> None:
        producer, consumer = self.pair()
        ids = ["r1", "r10", "r", "r1 ", "R1", "xr1", "r/1"]
        sent = {name: producer.put("a", "b", name, payloads.array(70_000, n)) for n, name in enumerate(ids)}

        consumer.cleanup("r1")

        assert consumer.get("a", "b", "r1", sent.pop("r1")[2]) is None
        for name, (_, _, metadata) in sent.items():
            seed = ids.index(name)
            assert payloads.same(consumer.get("a", "b", name, metadata)[0], payloads.array(70_000, seed))

    def test_an_int_id_is_its_text(self) -> None:
        producer, consumer = self.pair()
        one = producer.put("a", "b", 7, payloads.array(70_000))[2]
        two = producer.put("a", "c", "7", payloads.array(70_000))[2]
        consumer.cleanup(7)
        assert consumer.get("a", "b", 7, one) is None
        assert consumer.get("a", "c", 7, two) is None

    def test_unknown_ids_silently(self, caplog: pytest.LogCaptureFixture) -> None:
        connector = self.make()
        for name in ("nobody", "a/b", 0):
            connector.cleanup(name)
        assert not caplog.records

    def test_views_stay(self) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000), consumers=2)
        view = consumer.get("a", "b", "r", metadata)[0]

        producer.cleanup("r")
        consumer.cleanup("r")

        assert consumer.get("a", "b", "r", metadata) is None
        for n in range(50):
            consumer.get("a", "b", "s", producer.put("a", "b", "s", payloads.array(100_000, n))[2])
        assert payloads.same(view, payloads.array(100_000))
        del view
        gc.collect()
        assert settled(producer)

    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_the_id_can_be_used_again(self, keyed: bool) -> None:
        build = self.keyed if keyed else self.make
        producer, consumer = build(), build()
        for n in range(50):
            producer.put("a", "b", "r", payloads.array(70_000, n))
            consumer.cleanup("r")
        _, _, metadata = producer.put("a", "b", "r", payloads.array(70_000, 99))
        got = consumer.get("a", "b", "r", None if keyed else metadata)
        assert payloads.same(got[0], payloads.array(70_000, 99))

    def test_by_key_after_cleanup_there_is_nothing(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        producer.put("a", "b", "r", 1)
        consumer.cleanup("r")
        assert consumer.get("a", "b", "r") is None
        assert settled(producer)


TOPICS = [Once, ByKey, Cleanup]
