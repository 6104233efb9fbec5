"""Reports from the field about keys, names and the threshold, each with its input."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support import leftovers, payloads

from omni_fastshm.errors import ConfigError

IDS = [
    "a/b/../c",
    "/abs",
    ".",
    "..",
    "x y\nz",
    "a:b",
    "%2F",
    "é✓",
    "a/b",
    "a_b",
    "a%2Fb",
    "x" * 1000,
]

# Which of the two ids that no system likes are refused, as the documentation says.
REFUSED_IDS: set[str] = set()


class TestR30KeyReuse:
    """Two requests in flight with one id given by the client mixed up their state."""

    def test_each_metadata_gives_its_own(self, make: Any) -> None:
        producer, consumer = make(), make()
        a = producer.put("0", "1", "r", {"name": "A", "x": payloads.array(100_000, 1)})[2]
        b = producer.put("0", "1", "r", {"name": "B", "x": payloads.array(100_000, 2)})[2]
        assert consumer.get("0", "1", "r", a)[0]["name"] == "A"
        assert consumer.get("0", "1", "r", b)[0]["name"] == "B"

    def test_by_key_the_second_replaces_the_first(self, make: Any, namespace: str) -> None:
        producer, consumer = (make(key_lookup=True, namespace=namespace) for _ in range(2))
        producer.put("0", "1", "r", "A")
        producer.put("0", "1", "r", "B")
        assert consumer.get("0", "1", "r")[0] == "B"
        assert consumer.get("0", "1", "r") is None

    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_a_thousand_pairs_under_one_id(self, make: Any, keyed: bool, namespace: str) -> None:
        extra = {"key_lookup": True, "namespace": namespace} if keyed else {}
        producer, consumer = make(**extra), make(**extra)
        for n in range(1000):
            _, _, metadata = producer.put("0", "1", "r", payloads.array(70_000, n))
            got = consumer.get("0", "1", "r", None if keyed else metadata)[0]
            assert int(got[0]) == n
        del got
        assert producer.health()["live_blocks"] == 0

    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_one_id_on_three_edges(self, make: Any, keyed: bool, namespace: str) -> None:
        extra = {"key_lookup": True, "namespace": namespace} if keyed else {}
        producer, consumer = make(**extra), make(**extra)
        edges = [("0", "1"), ("0", "2"), ("1", "2")]
        sent = {edge: producer.put(*edge, "r", payloads.array(70_000, n))[2] for n, edge in enumerate(edges)}
        for n in (2, 0, 1):
            got = consumer.get(*edges[n], "r", None if keyed else sent[edges[n]])[0]
            assert int(got[0]) == n


class TestR32SpecialCharacters:
    """A slash in the key made an invalid name."""

    @pytest.mark.parametrize("keyed", [False, True], ids=["metadata", "keyed"])
    def test_every_id_round_trips(self, make: Any, keyed: bool, namespace: str) -> None:
        extra = {"key_lookup": True, "namespace": namespace} if keyed else {}
        before = set(os.listdir(leftovers.MOUNT))
        producer, consumer = make(**extra), make(**extra)
        sent = {rid: producer.put("0", "1", rid, payloads.array(70_000, n))[2] for n, rid in enumerate(IDS)}

        new = set(os.listdir(leftovers.MOUNT)) - before
        ours = {name for name in new if name.startswith("omnifs.")}
        assert ours
        assert all("/" not in name and name.isascii() and name.isprintable() for name in ours)
        for n, rid in reversed(list(enumerate(IDS))):
            got = consumer.get("0", "1", rid, None if keyed else sent[rid])[0]
            assert int(got[0]) == n, rid
        for rid in IDS:
            _, _, metadata = producer.put("0", "1", rid, payloads.array(70_000))
            consumer.cleanup(rid)
            assert consumer.get("0", "1", rid, metadata) is None
        del got
        assert producer.health()["live_blocks"] == 0

    def test_stages_with_special_characters(self, make: Any, namespace: str) -> None:
        producer, consumer = (make(key_lookup=True, namespace=namespace) for _ in range(2))
        pairs = [
            ("a/b", "c"),
            ("a", "b/c"),
            ("a_b", "c"),
            ("é✓", ".."),
            ("x y\nz", "/abs"),
            ("a→b", "c"),
            ("a", "→"),
        ]
        for n, pair in enumerate(pairs):
            producer.put(*pair, "r", n)
        assert [consumer.get(*pair, "r")[0] for pair in pairs] == list(range(len(pairs)))

    def test_text_that_no_message_can_carry_is_refused(self, make: Any) -> None:
        with pytest.raises(ConfigError, match="request"):
            make().put("0", "1", "\udcff", 1)

    @pytest.mark.parametrize("rid", ["", "a\0b"], ids=repr)
    def test_the_empty_id_and_one_with_nul(self, make: Any, rid: str, namespace: str) -> None:
        """Either a round trip, or a refusal that says so; never an id that is mixed up with another."""
        producer, consumer = (make(key_lookup=True, namespace=namespace) for _ in range(2))
        producer.put("0", "1", "a", 1)
        if rid in REFUSED_IDS:
            with pytest.raises(ConfigError, match="request"):
                producer.put("0", "1", rid, 2)
        else:
            producer.put("0", "1", rid, 2)
            assert consumer.get("0", "1", rid)[0] == 2
        assert consumer.get("0", "1", "a")[0] == 1


class TestR49Threshold:
    """The threshold was read and never used: small payloads took the slow path, too."""

    def test_inline_and_shared(self, make: Any, shm_names: Any) -> None:
        connector = make(shm_threshold_bytes=1_000_000)
        before = shm_names()

        _, _, metadata = connector.put("0", "1", "r", b"x" * 10_000)
        assert "inline_bytes" in metadata
        assert shm_names() == before
        assert connector.health()["inline_writes"] == 1

        _, _, metadata = connector.put("0", "1", "r", b"x" * 2_000_000)
        assert "shm" in metadata
        assert connector.health()["shm_writes"] == 1
        assert connector.health()["inline_writes"] == 1

    def test_the_default_is_65536(self, make: Any) -> None:
        connector = make()
        assert "inline_bytes" in connector.put("0", "1", "r", b"x" * 10)[2]
        assert "inline_bytes" in connector.put("0", "1", "r", b"x" * 65_000)[2]
        assert "shm" in connector.put("0", "1", "r", b"x" * 65_536)[2]
