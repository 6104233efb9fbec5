"""Metadata is plain data, belongs to one payload, and is checked before anything is read."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from contract.profile import Topic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import payloads

from omni_fastshm.errors import CodecError, MetadataError

ANY_EXAMPLES = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.binary(max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["shm", "inline_bytes", "size", "name", "segment", "offset", "block", "generation"])

BROKEN: list[Any] = [
    {},
    {"unknown": 1},
    {"size": 10},
    {"shm": {"name": "x"}},
    {"shm": {"name": "x"}, "size": 5},
    {"shm": None, "size": 5},
    {"shm": "omnifs", "size": 5},
    {"shm": [], "size": 5},
    {"shm": {}, "size": 5},
    {"shm": {"name": "../../etc/passwd", "size": 5}, "size": 5},
    {"shm": {"name": "", "size": 0}, "size": 0},
    {"inline_bytes": b""},
    {"inline_bytes": b"", "size": 0},
    {"inline_bytes": None, "size": 4},
    {"inline_bytes": "text", "size": 4},
    {"inline_bytes": [1, 2, 3, 4], "size": 4},
    {"inline_bytes": b"\xc1" * 40, "size": 40},
    {"inline_bytes": b"\x00" * 40, "size": 40},
    {"inline_bytes": b"\xff" * 40, "size": 40},
    {"inline_bytes": b"\xc1" * 40},
    {1: 2},
    [],
    "metadata",
    b"metadata",
    7,
    0,
    False,
    (1, 2),
]

BAD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    2**200,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "a/b",
    "/dev/null",
    "a\x00b",
    "x" * 5000,
    "é✓",
    b"",
    [],
    {},
]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each leaf of nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def changed(metadata: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(metadata)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result


def without(metadata: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    result = copy.deepcopy(metadata)
    place = result
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return result


class Text(str):
    """What a parser or an enum makes of text; only its value counts."""

    def __str__(self) -> str:
        return "not this"


def retyped(value: Any) -> Any:
    """The same with `Text` for every text, keys included."""
    if isinstance(value, dict):
        return {retyped(key): retyped(inner) for key, inner in value.items()}
    return Text(value) if type(value) is str else value


def plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in (str, int) and plain(inner) for key, inner in value.items())
    return type(value) in (str, int, bytes)


class MetadataForm(Topic):
    """It survives whatever a control plane does to plain data."""

    def sent(self, nbytes: int) -> tuple[Any, Any, dict[str, Any]]:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(nbytes))
        return producer, consumer, metadata

    @pytest.mark.parametrize("nbytes", [1000, 100_000])
    def test_it_is_plain_data(self, nbytes: int) -> None:
        _, _, metadata = self.sent(nbytes)
        assert plain(metadata)

    @pytest.mark.parametrize("nbytes", [1000, 100_000])
    def test_it_survives_pickle(self, nbytes: int) -> None:
        producer, consumer, metadata = self.sent(nbytes)
        arrived = pickle.loads(pickle.dumps(metadata))
        assert payloads.same(consumer.get("a", "b", "r", arrived)[0], payloads.array(nbytes))
        assert producer.health()["errors"] == 0

    @pytest.mark.parametrize("nbytes", [1000, 100_000])
    def test_it_survives_msgpack(self, nbytes: int) -> None:
        producer, consumer, metadata = self.sent(nbytes)
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata))
        assert payloads.same(consumer.get("a", "b", "r", arrived)[0], payloads.array(nbytes))
        assert producer.health()["errors"] == 0

    def test_without_inline_bytes_it_survives_json(self) -> None:
        producer, consumer, metadata = self.sent(100_000)
        arrived = json.loads(json.dumps(metadata))
        assert payloads.same(consumer.get("a", "b", "r", arrived)[0], payloads.array(100_000))
        assert producer.health()["errors"] == 0

    @pytest.mark.parametrize("nbytes", [1000, 100_000])
    def test_text_counts_by_its_value(self, nbytes: int) -> None:
        a, b, r = map(Text, "abr")
        for one, other in ((("a", "b", "r"), (a, b, r)), ((a, b, r), ("a", "b", "r")), ((a, b, r), (a, b, r))):
            producer, consumer = self.pair()
            metadata = producer.put(*one, payloads.array(nbytes))[2]
            assert plain(metadata)
            assert payloads.same(consumer.get(*other, retyped(metadata), timeout=5)[0], payloads.array(nbytes))
            assert producer.put_many(*one[:2], {one[2]: payloads.array(nbytes)})
            consumer.cleanup(other[2])
            assert producer.health()["live_blocks"] == consumer.health()["leases"] == 0

    def test_text_counts_by_its_value_without_metadata(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        producer.put("a", "b", "r", payloads.array(100_000))
        assert payloads.same(consumer.get(*map(Text, "abr"))[0], payloads.array(100_000))
        producer.put(*map(Text, "abr"), payloads.array(100_000))
        assert payloads.same(consumer.get("a", "b", "r")[0], payloads.array(100_000))

    def test_it_is_small(self) -> None:
        _, _, metadata = self.sent(100_000)
        assert len(msgspec.msgpack.encode(metadata)) < 1000

    def test_get_does_not_change_it(self) -> None:
        _, consumer, metadata = self.sent(100_000)
        before = copy.deepcopy(metadata)
        consumer.get("a", "b", "r", metadata)
        assert metadata == before


class MetadataChecks(Topic):
    """Malformed or foreign metadata is an error, never a read of memory that was not checked."""

    @pytest.mark.parametrize("broken", BROKEN, ids=repr)
    def test_malformed_metadata_is_an_error(self, broken: Any) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))

        with pytest.raises(MetadataError):
            consumer.get("a", "b", "r", broken)

        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(100_000))

    def test_the_error_is_a_value_error(self) -> None:
        with pytest.raises(ValueError):
            self.make().get("a", "b", "r", {})

    @pytest.mark.parametrize("nbytes", [1000, 100_000])
    def test_each_changed_field_is_noticed(self, nbytes: int) -> None:
        producer, consumer = self.pair()
        payload = payloads.array(nbytes)
        sample = producer.put("a", "b", "r", payload)[2]

        for path in leaves(sample):
            for value in BAD_VALUES:
                metadata = producer.put("a", "b", "r", payload)[2]
                bad = changed(metadata, path, value)
                if bad == metadata:
                    continue
                try:
                    got = consumer.get("a", "b", "r", bad)
                except MetadataError:
                    got = None
                # A field that is only there to be shown may change nothing; wrong bytes may never come.
                assert got is None or payloads.same(got[0], payload), (path, value)
                if got is None and "shm" in metadata:
                    assert consumer.get("a", "b", "r", metadata), ("used up by", path, value)

    def test_each_missing_field_is_noticed(self) -> None:
        producer, consumer = self.pair()
        payload = payloads.array(100_000)
        metadata = producer.put("a", "b", "r", payload)[2]
        for path in leaves(metadata):
            with pytest.raises(MetadataError):
                consumer.get("a", "b", "r", without(metadata, path))
        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payload)

    @pytest.mark.parametrize("nbytes", [200, 100_000])
    @pytest.mark.parametrize("delta", [-1, 1])
    def test_an_outer_size_that_differs_is_an_error(self, nbytes: int, delta: int) -> None:
        producer, consumer = self.pair()
        _, size, metadata = producer.put("a", "b", "r", payloads.array(nbytes))

        with pytest.raises(MetadataError):
            consumer.get("a", "b", "r", {**metadata, "size": size + delta})

        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(nbytes))

    @pytest.mark.parametrize("delta", [-1, 1, 100_000])
    def test_sizes_that_agree_with_each_other_but_not_with_the_payload(self, delta: int) -> None:
        producer, consumer = self.pair()
        _, size, metadata = producer.put("a", "b", "r", payloads.array(100_000))
        bad = changed(metadata, ("size",), size + delta)
        for path in leaves(metadata):
            if path[-1] == "size":
                bad = changed(bad, path, size + delta)

        with pytest.raises(MetadataError):
            consumer.get("a", "b", "r", bad)

        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(100_000))

    @pytest.mark.parametrize(
        "call", [("x", "b", "r"), ("a", "x", "r"), ("a", "b", "x"), ("b", "a", "r"), ("a", "b", "r ")]
    )
    def test_metadata_of_another_edge_or_request_is_an_error(self, call: tuple[str, str, str]) -> None:
        producer, consumer = self.pair()
        _, _, metadata = producer.put("a", "b", "r", payloads.array(100_000))

        with pytest.raises(MetadataError):
            consumer.get(*call, metadata)

        assert payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(100_000))

    def test_an_int_stage_or_id_is_its_text(self) -> None:
        producer, consumer = self.pair()
        _, _, one = producer.put(0, 1, 7, payloads.array(100_000, 1))
        _, _, two = producer.put("0", "1", "7", payloads.array(100_000, 2))

        assert payloads.same(consumer.get("0", "1", "7", one)[0], payloads.array(100_000, 1))
        assert payloads.same(consumer.get(0, 1, 7, two)[0], payloads.array(100_000, 2))

    def test_without_metadata_and_without_key_lookup_the_error_says_so(self) -> None:
        with pytest.raises(MetadataError, match="key_lookup"):
            self.make().get("a", "b", "r")

    @ANY_EXAMPLES
    @given(st.dictionaries(KEYS | st.text(max_size=8), PLAIN, max_size=5))
    def test_any_dict_is_answered(self, metadata: dict[str, Any]) -> None:
        with pytest.raises(MetadataError):
            self._consumer().get("a", "b", "r", metadata)

    @ANY_EXAMPLES
    @given(st.data())
    def test_real_metadata_with_any_value_in_one_place(self, data: st.DataObject) -> None:
        producer, consumer = self._producer(), self._consumer()
        payload = payloads.array(70_000)
        metadata = producer.put("a", "b", "r", payload)[2]
        path = data.draw(st.sampled_from(list(leaves(metadata))))
        bad = changed(metadata, path, data.draw(PLAIN))
        try:
            got = consumer.get("a", "b", "r", bad)
        except MetadataError:
            got = None
        assert got is None or payloads.same(got[0], payload)
        del got
        producer.cleanup("r")

    @ANY_EXAMPLES
    @given(st.binary(max_size=300))
    def test_any_inline_bytes_are_answered(self, raw: bytes) -> None:
        metadata = {"inline_bytes": raw, "size": len(raw)}
        try:
            assert self._consumer().get("a", "b", "r", metadata)[1] == len(raw)
        except MetadataError:
            pass

    @ANY_EXAMPLES
    @given(st.data())
    def test_inline_bytes_with_one_byte_changed_or_cut_short(self, data: st.DataObject) -> None:
        payload = {"a": payloads.array(80), "b": [1, (2, "x")], "c": slice(1, 2)}
        metadata = self._producer().put("a", "b", "r", payload)[2]
        raw = bytearray(metadata["inline_bytes"])
        place = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[place] = data.draw(st.integers(0, 255))
        else:
            del raw[place:]
        try:
            self._consumer().get("a", "b", "r", {"inline_bytes": bytes(raw), "size": len(raw)})
        except (MetadataError, CodecError):  # a changed byte can make a class name that nobody knows
            pass

    # One connector for all examples of a property: a new one for each would only cost time.
    def _producer(self) -> Any:
        if "producer" not in self.__dict__:
            self.producer = self.make()
        return self.producer

    def _consumer(self) -> Any:
        if "consumer" not in self.__dict__:
            self.consumer = self.make()
        return self.consumer


TOPICS = [MetadataForm, MetadataChecks]
