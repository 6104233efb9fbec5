"""What goes in comes out: the triple, the size, the types, and which way a payload goes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from contract.profile import Topic
from support import leftovers, payloads

from omni_fastshm.errors import CodecError

HEALTH_KEYS = {
    "status",
    "puts",
    "gets",
    "bytes_transferred",
    "inline_writes",
    "shm_writes",
    "refused",
    "errors",
    "blocked_s",
    "live_blocks",
    "leases",
    "misses",
    "used_bytes",
    "capacity_bytes",
    "pinned_bytes",
}

WAYS = pytest.mark.parametrize("threshold", [0, sys.maxsize], ids=["large", "inline"])


class Foo:
    """Nothing that a payload may hold."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Results(Topic):
    """The triple of `put`, the pair of `get`."""

    @WAYS
    def test_put_gives_a_triple_and_get_a_pair(self, threshold: int) -> None:
        producer, consumer = self.pair(shm_threshold_bytes=threshold)

        answer = producer.put("a", "b", "r", {"x": payloads.array(1000)})

        assert type(answer) is tuple
        ok, size, metadata = answer
        assert ok is True
        assert type(size) is int
        assert type(metadata) is dict
        got = consumer.get("a", "b", "r", metadata)
        assert type(got) is tuple
        assert payloads.same(got[0], {"x": payloads.array(1000)})

    @pytest.mark.parametrize("nbytes", [8, 4096, 4104, 65_536, 70_000, 3 * payloads.MIB])
    def test_size_is_the_same_on_both_sides(self, nbytes: int) -> None:
        producer, consumer = self.pair()

        _, size, metadata = producer.put("a", "b", "r", payloads.array(nbytes))
        _, size_got = consumer.get("a", "b", "r", metadata)

        assert size == size_got == metadata["size"]

    @WAYS
    def test_size_is_header_plus_buffers(self, threshold: int) -> None:
        producer, consumer = self.pair(shm_threshold_bytes=threshold)
        payload = {"a": payloads.array(100_000), "b": [payloads.array(30_000)], "c": "text"}

        _, size, metadata = producer.put("a", "b", "r", payload)

        assert 130_000 <= size < 131_000
        assert consumer.get("a", "b", "r", metadata)[1] == size

    @pytest.mark.parametrize("value", [{}, [], 0, "", b"", False, None, (), set(), 0.0], ids=repr)
    @WAYS
    def test_a_payload_that_is_false_is_a_payload(self, threshold: int, value: Any) -> None:
        producer, consumer = self.pair(shm_threshold_bytes=threshold)

        ok, size, metadata = producer.put("a", "b", "r", value)
        got, size_got = consumer.get("a", "b", "r", metadata)

        assert ok is True
        assert size == size_got
        assert payloads.same(got, value)

    def test_size_counts_the_header_of_an_empty_payload(self) -> None:
        assert self.make().put("a", "b", "r", {})[1] > 0

    @WAYS
    def test_types_come_back_as_they_were_sent(self, threshold: int) -> None:
        producer, consumer = self.pair(shm_threshold_bytes=threshold)

        _, _, metadata = producer.put("a", "b", "r", payloads.tree(5))
        got, _ = consumer.get("a", "b", "r", metadata)

        for key, value in payloads.tree(5).items():
            assert payloads.same(got[key], value), key
        assert list(got) == list(payloads.tree(5))

    @WAYS
    def test_after_put_the_caller_may_overwrite(self, threshold: int) -> None:
        import torch

        producer, consumer = self.pair(shm_threshold_bytes=threshold)
        mine, small, tensor = payloads.array(100_000, 1), payloads.array(80, 1), torch.arange(40_000)
        listed = [1, 2, 3]

        _, _, metadata = producer.put("a", "b", "r", [mine, small, tensor, listed])
        mine[:], small[:], listed[0] = -1, -1, -1
        tensor.fill_(-1)
        got, _ = consumer.get("a", "b", "r", metadata)

        assert payloads.same(got[0], payloads.array(100_000, 1))
        assert payloads.same(got[1], payloads.array(80, 1))
        assert payloads.same(got[2], torch.arange(40_000))
        assert got[3] == [1, 2, 3]

    def test_health_has_all_its_keys_and_plain_values(self) -> None:
        health = self.make().health()

        assert set(health) >= HEALTH_KEYS
        assert isinstance(health["status"], str)
        for key in HEALTH_KEYS - {"status"}:
            assert isinstance(health[key], (int, float)), key
            assert health[key] >= 0, key

    def test_health_has_each_edge(self) -> None:
        producer, consumer = self.pair()

        sizes = [producer.put("a", to, n, payloads.array(100_000))[1:] for n, to in enumerate(("b", "b", "c"))]
        got = consumer.get("a", "b", 0, sizes[0][1])
        assert got is not None

        ab, ac = producer.health()["edges"]
        size = sizes[0][0]
        assert (ab["from_stage"], ab["to_stage"], ab["puts"], ab["put_bytes"], ab["gets"]) == ("a", "b", 2, 2 * size, 0)
        assert (ac["to_stage"], ac["puts"], ac["put_latency"]["count"]) == ("c", 1, 1)
        assert producer.health()["put_latency"]["count"] == 3
        assert producer.health()["high_water_bytes"] >= producer.health()["used_bytes"] > 0
        (other,) = consumer.health()["edges"]
        assert (other["gets"], other["get_bytes"], other["puts"]) == (1, size, 0)
        health = consumer.health()
        assert 0 <= health["oldest_lease_s"] < 60
        assert health["leases"] or health["oldest_lease_s"] == 0
        del got

    def test_health_counts(self) -> None:
        producer, consumer = self.pair()

        sizes = []
        for n in range(3):
            _, size, metadata = producer.put("a", "b", n, payloads.array(100_000))
            sizes.append(size)
            assert consumer.get("a", "b", n, metadata)
        assert consumer.get("a", "b", 2, metadata) is None

        assert producer.health()["puts"] == 3
        assert producer.health()["bytes_transferred"] == sum(sizes)
        assert consumer.health()["gets"] == 3
        assert consumer.health()["misses"] == 1
        assert consumer.health()["errors"] == producer.health()["refused"] == 0


class Placement(Topic):
    """Small payloads travel inside the metadata, large ones through shared memory."""

    def probe(self, payload: Any) -> int:
        size = self.make(shm_threshold_bytes=0).put("a", "b", "probe", payload)[1]
        assert isinstance(size, int)
        return size

    @pytest.mark.parametrize(("offset", "way"), [(1, "inline_bytes"), (0, "shm"), (-1, "shm")])
    @pytest.mark.parametrize("nbytes", [8, 5000, 100_000])
    def test_the_threshold_is_exact(self, nbytes: int, offset: int, way: str) -> None:
        payload = {"x": payloads.array(nbytes)}
        size = self.probe(payload)
        producer, consumer = self.pair(shm_threshold_bytes=size + offset)

        ok, size_here, metadata = producer.put("a", "b", "r", payload)

        assert ok
        assert size_here == size, "the size must not depend on the way"
        assert way in metadata
        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payload)

    def test_the_default_threshold_is_65536(self) -> None:
        producer, consumer = self.pair()
        overhead = self.probe(b"x" * 65_000) - 65_000
        for length in range(65_536 - overhead - 8, 65_536 - overhead + 9):
            _, size, metadata = producer.put("a", "b", length, b"x" * length)
            assert ("shm" in metadata) == (size >= 65_536), size
            assert consumer.get("a", "b", length, metadata) == (b"x" * length, size)

    def test_the_form_of_inline_metadata(self) -> None:
        ok, size, metadata = self.make().put("a", "b", "r", {"x": [1, 2, 3]})

        assert ok
        assert set(metadata) == {"inline_bytes", "size"}
        assert type(metadata["inline_bytes"]) is bytes
        assert metadata["size"] == size == len(metadata["inline_bytes"])

    def test_the_form_of_shared_memory_metadata(self) -> None:
        ok, size, metadata = self.make().put("a", "b", "r", payloads.array(100_000))

        assert ok
        assert set(metadata) == {"shm", "size"}
        assert type(metadata["shm"]["name"]) is str
        assert type(metadata["shm"]["size"]) is int
        assert metadata["size"] == size

    def test_an_inline_payload_touches_no_shared_memory(self) -> None:
        producer, consumer = self.pair()
        before, used = leftovers.names(self.namespace), producer.health()["used_bytes"]

        for n in range(20):
            _, _, metadata = producer.put("a", "b", n, payloads.array(10_000, n))
            assert payloads.same(consumer.get("a", "b", n, metadata)[0], payloads.array(10_000, n))

        assert leftovers.names(self.namespace) == before
        assert producer.health()["used_bytes"] == used
        assert producer.health()["inline_writes"] == 20
        assert producer.health()["shm_writes"] == 0

    def test_the_two_ways_are_counted(self) -> None:
        producer = self.make(shm_threshold_bytes=1_000_000)

        producer.put("a", "b", "small", payloads.array(10_000))
        assert (producer.health()["inline_writes"], producer.health()["shm_writes"]) == (1, 0)
        producer.put("a", "b", "large", payloads.array(2_000_000))
        assert (producer.health()["inline_writes"], producer.health()["shm_writes"]) == (1, 1)

    def test_with_the_largest_threshold_everything_is_inline(self) -> None:
        producer, consumer = self.pair(shm_threshold_bytes=sys.maxsize)

        _, _, metadata = producer.put("a", "b", "r", payloads.array(2 * payloads.MIB))

        assert "inline_bytes" in metadata
        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(2 * payloads.MIB))

    def test_inline_leaves_are_private_and_writable(self) -> None:
        import torch

        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", [np.zeros(2000), np.zeros(4), torch.zeros(3000)])

        first = consumer.get("a", "b", "r", metadata)[0]
        for leaf in first:
            leaf += 1
        second = consumer.get("a", "b", "r", dict(metadata))
        if second is not None:
            assert all(not leaf.any() for leaf in second[0]), "two receivers share the memory of a leaf"
        assert all((leaf == 1).all() for leaf in first)

    def test_keyed_payloads_all_go_to_shared_memory(self) -> None:
        producer = self.keyed()

        _, _, metadata = producer.put("a", "b", "r", {"tiny": 1})

        assert "shm" in metadata
        assert producer.health()["shm_writes"] == 1
        assert producer.health()["inline_writes"] == 0


class Refusals(Topic):
    """What cannot be carried is refused by name, and leaves nothing behind."""

    @WAYS
    def test_the_error_names_the_path_to_the_culprit(self, threshold: int) -> None:
        producer = self.make(shm_threshold_bytes=threshold)
        payload = {"engine_inputs": {"x": [1, 2, payloads.array(100_000), Foo()]}}

        with pytest.raises(CodecError) as caught:
            producer.put("a", "b", "r", payload)

        assert isinstance(caught.value, TypeError)
        assert "engine_inputs.x[3]" in str(caught.value)
        assert "Foo" in str(caught.value)

    @WAYS
    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_a_refused_payload_leaves_nothing(self, threshold: int, keyed: bool) -> None:
        build = self.keyed if keyed else self.make
        producer = build(shm_threshold_bytes=threshold)
        before, names = producer.health(), leftovers.names(self.namespace)

        for n in range(100):
            with pytest.raises(CodecError):
                producer.put("a", "b", n, [payloads.array(100_000), lambda: None])

        after = producer.health()
        for key in ("live_blocks", "used_bytes", "leases", "shm_writes", "inline_writes"):
            assert after[key] == before[key], key
        assert leftovers.names(self.namespace) == names
        ok, _, metadata = producer.put("a", "b", "r", [payloads.array(100_000)])
        assert ok
        assert payloads.same(producer.get("a", "b", "r", metadata)[0], [payloads.array(100_000)])

    def test_pickle_is_not_used_unless_it_was_allowed(self) -> None:
        for payload in (Foo(), Foo, object(), Exception("x"), {"f": Foo.__init__}):
            with pytest.raises(CodecError):
                self.make().put("a", "b", "r", payload)

    @WAYS
    def test_where_pickle_is_allowed_it_takes_both_sides(self, threshold: int) -> None:
        producer = self.make(shm_threshold_bytes=threshold, allow_pickle=True)
        _, _, metadata = producer.put("a", "b", "r", [payloads.array(100_000), Foo(7)])

        with pytest.raises(CodecError, match="allow_pickle"):
            self.make().get("a", "b", "r", metadata)

        got = self.make(allow_pickle=True).get("a", "b", "r", metadata)[0]
        assert payloads.same(got[0], payloads.array(100_000))
        assert type(got[1]) is Foo
        assert got[1].value == 7


class HostWire(Topic):
    """``wire: host`` carries what the host's serializer would make of a payload."""

    @WAYS
    def test_tuples_arrive_as_lists(self, threshold: int) -> None:
        producer, consumer = self.pair(shm_threshold_bytes=threshold, wire="host")
        _, _, metadata = producer.put("a", "b", "r", {"t": (1, (2, 3)), "x": payloads.array(100_000)})
        got = consumer.get("a", "b", "r", metadata)[0]
        assert payloads.same(got, {"t": [1, [2, 3]], "x": payloads.array(100_000)})


TOPICS = [Results, Placement, Refusals, HostWire]
