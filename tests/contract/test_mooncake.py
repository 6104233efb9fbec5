"""MooncakeConnector keeps the contract on a real store, apart from what a copy over the network makes different."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from contract.connector_contract import TOPICS, Profile, suite
from support import leftovers, payloads
from support.waiting import within

from omni_fastshm.errors import MetadataError, SegmentError

NO_SHM = "payloads lie in Mooncake's store: there are no names, segments or rings in /dev/shm"
A_COPY = "get is the transfer: what is taken has left the store, and views lie in memory of the taker"
NOT_LENT = "the store lends no memory to produce in: `allocate` gives plain memory, and `put` copies it once"

SETTINGS: dict[str, Any] = {
    "master": "$OMNI_FASTSHM_TEST_MASTER",
    "host": "127.0.0.1",
    "segment": "64MB",
    "max_bytes": 32 << 20,
}
# Two clients of the store: what one puts, the other gets over TCP, and not out of its own memory.
CLIENTS = [{"localbuf": "64MB"}, {"localbuf": "65MB"}]


@pytest.fixture(scope="module", autouse=True)
def _clients(mooncake_master: Any) -> Iterator[None]:
    """Keep both clients open during the module: to set one up and to close it takes 2 s."""
    from omni_fastshm.connectors.mooncake import MooncakeConnector

    holders = [MooncakeConnector({**SETTINGS, **client, "namespace": "holder"}) for client in CLIENTS]
    for one, other in (holders, holders[::-1]):
        metadata = one.put("a", "b", "warm", payloads.array(100_000))[2]
        assert other.get("a", "b", "warm", metadata)
    yield
    for holder in holders:
        holder.close()


@pytest.fixture(autouse=True)
def _nothing_left_behind(namespace: str) -> Iterator[None]:
    """As everywhere, but for sockets: the two clients that stay open make and drop connections as they need them."""
    gc.collect()
    before = leftovers.Snapshot(namespace)
    yield
    gc.collect()

    def left() -> list[str]:
        return [line for line in before.difference() if "-> socket:" not in line]

    within(5, lambda: not left(), 0.05)  # another thread may be on its last instructions
    assert not left(), "\n".join(left())


class Mooncake(Profile):
    target = "omni_fastshm.connectors.mooncake:MooncakeConnector"
    base_settings: ClassVar[dict[str, Any]] = {**SETTINGS, **CLIENTS[0]}
    no_settings = frozenset({"segment_bytes", "busy_wait_us", "idle_segment_s", "orphan_ttl_s"})
    exempt: ClassVar[dict[str, str]] = {
        "Placement": NO_SHM,
        "test_a_huge_payload_gets_its_own_segment_and_gives_it_back": NO_SHM,
        "test_segments_are_added_and_given_back": NO_SHM,
        "test_the_longest_namespace": NO_SHM,
        "test_numbers_in_the_forms_that_yaml_and_json_give": NO_SHM,
        "test_a_null_threshold_is_the_default": NO_SHM,
        "test_the_block_lives_as_long_as_the_last_view": A_COPY,
        "test_one_lease_is_shared_by_all_takes_of_a_process": A_COPY,
        "test_an_array_of_several_takers_cannot_be_made_writable": A_COPY,
        "test_a_waiting_put_goes_on_when_a_view_dies": A_COPY,
        "test_it_is_handed_over_and_not_copied": NOT_LENT,
        "test_handing_over_takes_no_more_room": NOT_LENT,
        "test_one_that_is_dropped_is_freed": NOT_LENT,
        "test_no_room_is_an_error": NOT_LENT,
        "test_no_settings_are_needed": "a master has to be named: there is none to guess",
    }

    def puts_that_wait(self, connector: Any) -> int:
        return len(connector._sender._ledger._line)

    def make(self, **settings: Any) -> Any:
        """As for the others, but with one client and the other in turn."""
        turn = self.__dict__.setdefault("turn", itertools.count())
        chosen = {name: value for name, value in settings.items() if name not in self.no_settings}
        return self._connect(  # type: ignore[attr-defined]
            self.connector_class(),  # type: ignore[attr-defined]
            **{**self.base_settings, **CLIENTS[next(turn) % 2], **chosen},
        )


globals().update(suite(Mooncake, TOPICS))


class TestThroughTheStore:
    """What takes the place of the exempted promises."""

    def pair(self, connect: Any, **settings: Any) -> tuple[Any, Any]:
        from omni_fastshm.connectors.mooncake import MooncakeConnector

        producer, consumer = (connect(MooncakeConnector, **{**SETTINGS, **client, **settings}) for client in CLIENTS)
        return producer, consumer

    @pytest.mark.parametrize(("offset", "way"), [(1, "inline_bytes"), (0, "mooncake"), (-1, "mooncake")])
    def test_the_threshold_is_exact(self, offset: int, way: str, connect: Any) -> None:
        size = self.pair(connect, shm_threshold_bytes=0)[0].put("a", "b", "r", {"x": payloads.array(5000)})[1]
        producer, consumer = self.pair(connect, shm_threshold_bytes=size + offset)
        _, size_here, metadata = producer.put("a", "b", "r", {"x": payloads.array(5000)})
        assert size_here == size
        assert set(metadata) == {way, "size"}
        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], {"x": payloads.array(5000)})
        health = producer.health()
        assert (health["inline_writes"], health["store_writes"]) == ((1, 0) if way == "inline_bytes" else (0, 1))

    @pytest.mark.parametrize("value", [None, 65536, "65536", 65536.0], ids=repr)
    def test_the_default_threshold(self, value: Any, connect: Any) -> None:
        producer, _ = self.pair(connect, shm_threshold_bytes=value)
        assert "inline_bytes" in producer.put("a", "b", "r", b"x" * 60_000)[2]
        assert "mooncake" in producer.put("a", "b", "r", b"x" * 65_536)[2]

    def test_what_is_taken_has_left_the_store_though_a_view_lives(self, connect: Any) -> None:
        producer, consumer = self.pair(connect, max_bytes=4 << 20, put_timeout_s=0)
        _, _, metadata = producer.put("a", "b", "r", payloads.array(3 << 20), consumers=2)
        view = consumer.get("a", "b", "r", metadata)[0]
        assert producer.health()["live_blocks"] == 1
        assert not producer.put("a", "b", "s", payloads.array(3 << 20))[0]
        other = consumer.get("a", "b", "r", metadata)[0]
        assert (producer.health()["live_blocks"], consumer.health()["leases"]) == (0, 2)
        assert producer.put("a", "b", "s", payloads.array(3 << 20))[0]
        assert payloads.same(view, payloads.array(3 << 20))
        assert payloads.same(other, payloads.array(3 << 20))

    def test_several_takers_share_no_memory(self, connect: Any) -> None:
        import torch

        producer, consumer = self.pair(connect)
        _, _, metadata = producer.put("a", "b", "r", [torch.arange(50_000), payloads.array(100_000)], consumers=2)
        first, second = (consumer.get("a", "b", "r", metadata, copy=False)[0] for _ in range(2))
        first[0].zero_()
        assert torch.equal(second[0], torch.arange(50_000))
        with pytest.raises(ValueError, match="read-only"):
            first[1][0] = 1

    def test_memory_to_produce_in_is_plain_and_copied(self, connect: Any) -> None:
        producer, consumer = self.pair(connect)
        loan = producer.allocate((25_000,), np.int64)
        loan[:] = 5
        used = producer.health()["used_bytes"]
        _, _, metadata = producer.put("a", "b", "r", {"x": loan})
        assert producer.health()["used_bytes"] - used > loan.nbytes
        loan[:] = 6
        assert consumer.get("a", "b", "r", metadata)[0]["x"].max() == 5
        with pytest.raises(SegmentError):
            producer.allocate(2**62, np.int8)

    def test_another_namespace_is_an_error_with_metadata(self, connect: Any) -> None:
        producer, _ = self.pair(connect)
        _, consumer = self.pair(connect, namespace="elsewhere")
        with pytest.raises(MetadataError, match="elsewhere"):
            consumer.get("a", "b", "r", producer.put("a", "b", "r", payloads.array(100_000))[2])
