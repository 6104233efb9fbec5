"""Settings and arguments: what is out of range is an error that names it, and never clamped."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from contract.profile import Topic
from support import leftovers, payloads

from omni_fastshm.base import OmniConnectorBase
from omni_fastshm.errors import ConfigError

NUMBERS = [
    "shm_threshold_bytes",
    "segment_bytes",
    "max_bytes",
    "put_timeout_s",
    "busy_wait_us",
    "orphan_ttl_s",
    "linger_s",
    "copy_below",
]
NO_NUMBERS: list[Any] = [-1, float("nan"), "64k", "", True, [1], {}, "-5", b"5", float("-inf")]


class Settings(Topic):
    """The one positional argument."""

    def build(self, **settings: Any) -> Any:
        """A connector of exactly these settings: one that has no such setting has to say that."""
        return self._connect(self.connector_class(), **settings)

    @pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
    @pytest.mark.parametrize("name", NUMBERS)
    def test_a_number_that_is_none(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name):
            self.build(**{name: value})
        assert leftovers.names(self.namespace) == []

    @pytest.mark.parametrize("name", [name for name in NUMBERS if not name.endswith("bytes")])
    def test_no_number_is_without_end(self, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            self.build(**{name: float("inf")})

    @pytest.mark.parametrize("value", [float("inf"), 0.5, 1.5])
    @pytest.mark.parametrize("name", ["shm_threshold_bytes", "segment_bytes", "max_bytes", "copy_below"])
    def test_bytes_are_whole_numbers(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name):
            self.build(**{name: value})

    def test_a_segment_without_bytes_is_no_segment(self) -> None:
        with pytest.raises(ConfigError, match="segment_bytes"):
            self.build(segment_bytes=0)

    @pytest.mark.parametrize("value", [0, "0", 0.0])
    def test_busy_wait_may_be_zero(self, value: Any) -> None:
        connector = self.keyed(busy_wait_us=value)
        assert connector.get("a", "b", "r", timeout=0.01) is None

    @pytest.mark.parametrize("value", [100_000, "100000", 100_000.0, " 100000 "], ids=repr)
    def test_numbers_in_the_forms_that_yaml_and_json_give(self, value: Any) -> None:
        connector = self.make(shm_threshold_bytes=value)
        assert connector.put("a", "b", "1", b"x" * 90_000)[0]
        assert connector.put("a", "b", "2", b"x" * 100_000)[0]
        health = connector.health()
        assert (health["inline_writes"], health["shm_writes"]) == (1, 1)

    @pytest.mark.parametrize(
        "value",
        ["", "a.b", "a/b", "..", "x" * 41, "é", "a b", "a\n", "a\x00", 7.5, True, ["a"], b"a"],
        ids=repr,
    )
    def test_a_namespace_out_of_its_alphabet(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="namespace"):
            self.make(namespace=value)

    def test_a_namespace_of_the_environment_is_checked_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMNI_FASTSHM_NAMESPACE", "a/b")
        with pytest.raises(ConfigError, match=r"NAMESPACE|namespace"):
            self.make()

    def test_the_longest_namespace(self) -> None:
        name = (self.namespace + "-" + "Az_9" * 20)[:40]
        with self.connector_class()({**self.base_settings, "namespace": name}) as connector:
            assert connector.put("a", "b", "r", payloads.array(100_000))[0]
            assert leftovers.names(name)
        assert leftovers.names(name) == []

    def test_key_lookup_needs_a_namespace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMNI_FASTSHM_NAMESPACE")
        with pytest.raises(ConfigError, match="namespace"):
            self.make(key_lookup=True)

    def test_an_unknown_setting_names_the_near_match(self) -> None:
        with pytest.raises(ConfigError) as caught:
            self.build(put_timout_s=5)
        assert "put_timout_s" in str(caught.value)
        assert "put_timeout_s" in str(caught.value)

    def test_all_problems_in_one_error(self) -> None:
        with pytest.raises(ConfigError) as caught:
            self.make(max_bytes=-1, put_timeout_s="soon", nonsense=1)
        for name in ("max_bytes", "put_timeout_s", "nonsense"):
            assert name in str(caught.value)

    @pytest.mark.parametrize("value", ["yes please", 2, [], 1.5], ids=repr)
    @pytest.mark.parametrize("name", ["key_lookup", "allow_pickle"])
    def test_a_switch_that_is_none(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name):
            self.make(**{name: value})

    def test_a_wire_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match="wire"):
            self.make(wire="pickle")

    def test_settings_that_hosts_mix_in_are_accepted(self) -> None:
        self.make(stage_id=3, role="sender", from_stage="0", to_stage="1")
        self.make(my_own=5, extra_ignored=["my_own"])

    def test_null_is_the_default(self) -> None:
        self.make(put_timeout_s=None, namespace=None, key_lookup=None, max_bytes=None)

    def test_a_null_threshold_is_the_default(self) -> None:
        connector = self.make(shm_threshold_bytes=None, namespace=None)
        assert "inline_bytes" in connector.put("a", "b", "r", b"x" * 60_000)[2]
        assert "shm" in connector.put("a", "b", "r", b"x" * 70_000)[2]

    @pytest.mark.parametrize("config", [7, "text", [("max_bytes", 1)]], ids=repr)
    def test_settings_that_are_no_mapping(self, config: Any) -> None:
        with pytest.raises(ConfigError):
            self.connector_class()(config)

    def test_config_is_the_very_object(self) -> None:
        config = dict(self.base_settings)
        connector = self.connector_class()(config)
        assert connector.config is config
        assert config == self.base_settings
        connector.close()

    def test_no_settings_are_needed(self) -> None:
        for connector in (self.connector_class()(None), self.connector_class()({})):
            _, _, metadata = connector.put("a", "b", "r", payloads.array(100_000))
            assert connector.get("a", "b", "r", metadata)
            connector.close()


class Arguments(Topic):
    """Of `put`, `get` and `cleanup`."""

    @pytest.mark.parametrize(
        "stage",
        [None, True, 1.5, b"0", ["0"], object()],
        ids=["None", "True", "1.5", "b'0'", "list", "object"],
    )
    def test_a_stage_that_is_none(self, stage: Any) -> None:
        connector = self.keyed()
        calls = [
            lambda: connector.put(stage, "b", "r", 1),
            lambda: connector.put("a", stage, "r", 1),
            lambda: connector.get(stage, "b", "r"),
            lambda: connector.get("a", stage, "r"),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="stage"):
                call()

    @pytest.mark.parametrize("request_id", [None, True, 1.5, b"0", ["0"]], ids=repr)
    def test_a_request_id_that_is_none(self, request_id: Any) -> None:
        connector = self.keyed()
        calls = [
            lambda: connector.put("a", "b", request_id, 1),
            lambda: connector.get("a", "b", request_id),
            lambda: connector.cleanup(request_id),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="request"):
                call()

    @pytest.mark.parametrize(("source", "target"), [("a", "a"), (0, 0), (0, "0")])
    def test_a_stage_cannot_be_its_own_target(self, source: Any, target: Any) -> None:
        connector = self.keyed()
        with pytest.raises(ConfigError):
            connector.put(source, target, "r", 1)
        with pytest.raises(ConfigError):
            connector.get(source, target, "r")
        assert connector.health()["live_blocks"] == 0

    @pytest.mark.parametrize("consumers", [0, -1, 256, 1.5, "2", True, None, 2**40], ids=repr)
    @pytest.mark.parametrize("nbytes", [8, 100_000])
    def test_a_number_of_consumers_out_of_range(self, nbytes: int, consumers: Any) -> None:
        connector = self.make()
        with pytest.raises(ConfigError, match="consumers"):
            connector.put("a", "b", "r", payloads.array(nbytes), consumers=consumers)
        assert connector.health()["live_blocks"] == 0

    def test_long_names(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        stage, request = "s" * 500, "r" * 5000
        _, _, metadata = producer.put(stage, "b", request, payloads.array(100_000))
        assert consumer.get(stage, "b", request, metadata)
        producer.put(stage, "b", request + "1", 1)
        assert consumer.get(stage, "b", request) is None
        assert consumer.get(stage, "b", request + "1")[0] == 1

    def test_large_and_negative_ids(self) -> None:
        producer, consumer = self.keyed(), self.keyed()
        for number in (-1, 0, 2**63, 2**200):
            producer.put("a", "b", number, 5)
            assert consumer.get("a", "b", str(number))[0] == 5

    def test_the_extras_are_keywords(self) -> None:
        connector = self.make()
        with pytest.raises(TypeError):
            connector.put("a", "b", "r", 1, 1)
        with pytest.raises(TypeError):
            connector.get("a", "b", "r", None, 0)


class Kind(Topic):
    """A connector is an endpoint of this process and nothing that travels."""

    def test_it_is_an_omni_connector(self) -> None:
        assert isinstance(self.make(), OmniConnectorBase)

    def test_it_cannot_be_pickled_or_copied(self) -> None:
        connector = self.make()
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="pickled"):
                act(connector)
        assert connector.put("a", "b", "r", payloads.array(100_000))[0]


TOPICS = [Settings, Arguments, Kind]
