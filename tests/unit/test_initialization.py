"""From a configuration to open connectors, with a recording connector in place of the real ones."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_fastshm.config import get_connectors_config_for_stage, load_omni_transfer_config
from omni_fastshm.connectors.in_process import InProcessConnector
from omni_fastshm.errors import ConfigError
from omni_fastshm.factory import ConnectorSpec, OmniConnectorFactory
from omni_fastshm.initialization import (
    build_stage_connectors,
    create_connectors_from_config,
    initialize_connectors_from_config,
    initialize_orchestrator_connectors,
)


class Recorder:
    """Notes that it was built and closed."""

    made: list[Recorder]

    def __init__(self, config: dict[str, Any]) -> None:
        if config.get("max_bytes") == 13:
            raise ConfigError("Recorder: max_bytes: 13 is refused")
        if config.get("max_bytes") == 14:
            raise KeyboardInterrupt
        self.config = config
        self.closed = 0
        self.made.append(self)

    def put(self) -> None: ...

    def get(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    monkeypatch.setattr(
        OmniConnectorFactory,
        "_registered",
        {"SharedMemoryConnector": Recorder, "Recorder": Recorder},
    )
    return Recorder


def pipeline(**extra: Any) -> dict[str, Any]:
    """0 -> 1 by an explicit connector, 1 -> 2 by default."""
    spec = {"name": "SharedMemoryConnector", "extra": extra}
    return {
        "stage_args": [
            {"stage_id": 0},
            {"stage_id": 1, "input_connectors": {"from_stage_0": spec}},
            {"stage_id": 2, "engine_input_source": [1]},
        ]
    }


def thresholds(connectors: dict[Any, Any]) -> dict[Any, Any]:
    return {edge: made.config["shm_threshold_bytes"] for edge, made in connectors.items()}


def test_one_connector_for_each_edge() -> None:
    config, connectors = initialize_connectors_from_config(pipeline())
    assert list(connectors) == [("0", "1"), ("1", "2")] == list(config.edges)
    assert len(Recorder.made) == 2
    assert thresholds(connectors) == {("0", "1"): 65536, ("1", "2"): 65536}
    assert config.connectors["0", "1"].extra is Recorder.made[0].config


def test_a_default_threshold_fills_the_gaps() -> None:
    _, connectors = initialize_connectors_from_config(pipeline(), default_shm_threshold=1000)
    assert thresholds(connectors) == {("0", "1"): 1000, ("1", "2"): 1000}
    _, connectors = initialize_connectors_from_config(pipeline(shm_threshold_bytes=5), 1000)
    assert thresholds(connectors) == {("0", "1"): 5, ("1", "2"): 1000}


@pytest.mark.parametrize("source", [None, {}, {"runtime": None}])
def test_nothing_configured(source: Any) -> None:
    for initialize in (initialize_connectors_from_config, initialize_orchestrator_connectors):
        config, connectors = initialize(source)
        assert not config
        assert connectors == {}


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("stages: [{stage_id: 0}, {stage_id: 1, engine_input_source: [0]}]")
    for source in (path, str(path)):
        config, connectors = initialize_orchestrator_connectors(source)
        assert config.path == path
        assert list(connectors) == [("0", "1")]


def test_what_was_built_is_closed_when_a_later_one_fails() -> None:
    specs = {
        ("0", "1"): ConnectorSpec("Recorder"),
        ("1", "2"): ConnectorSpec("Recorder"),
        ("2", "3"): ConnectorSpec("Recorder", {"max_bytes": 13}),
        ("3", "4"): ConnectorSpec("Recorder"),
    }
    with pytest.raises(ConfigError, match=r"edge 2 -> 3: Recorder: max_bytes: 13 is refused"):
        create_connectors_from_config(specs)
    assert [made.closed for made in Recorder.made] == [1, 1]


def test_what_was_built_is_closed_after_an_interrupt() -> None:
    specs = {("0", "1"): ConnectorSpec("Recorder"), ("1", "2"): ConnectorSpec("Recorder", {"max_bytes": 14})}
    with pytest.raises(KeyboardInterrupt):
        create_connectors_from_config(specs)
    assert [made.closed for made in Recorder.made] == [1]


@pytest.mark.usefixtures("without_mooncake")
def test_a_missing_backend_names_edge_and_package() -> None:
    with pytest.raises(ConfigError, match="edge 0 -> 1: MooncakeConnector needs the package 'mooncake'"):
        create_connectors_from_config({("0", "1"): ConnectorSpec("MooncakeConnector")})


def test_a_wrong_file_builds_nothing() -> None:
    broken = pipeline()
    broken["stage_args"].append({"stage_id": 0})
    with pytest.raises(ConfigError, match="exists already"):
        initialize_connectors_from_config(broken)
    assert Recorder.made == []


# The process that hands requests on


@pytest.mark.parametrize(("given", "threshold"), [(None, 65536), (1000, 1000), (0, 0)])
@pytest.mark.parametrize("backend", [None, "multi_process"])
def test_orchestrator(backend: Any, given: Any, threshold: int) -> None:
    _, connectors = initialize_orchestrator_connectors(pipeline(), backend, given)
    assert thresholds(connectors) == {("0", "1"): threshold, ("1", "2"): threshold}


def test_ray_means_everything_inline(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, connectors = initialize_orchestrator_connectors(
            pipeline(shm_threshold_bytes=5), worker_backend="ray", shm_threshold_bytes=1000
        )
    assert thresholds(connectors) == {("0", "1"): sys.maxsize, ("1", "2"): sys.maxsize}
    assert config.connectors["0", "1"].extra == {"shm_threshold_bytes": sys.maxsize}
    assert "edge 0 -> 1: with ray all is inline" in caplog.text


def test_ray_leaves_other_backends_alone() -> None:
    content = pipeline()
    content["stage_args"][1]["input_connectors"]["from_stage_0"] = {"name": "Recorder", "extra": {"x": 1}}
    _, connectors = initialize_orchestrator_connectors(content, worker_backend="ray")
    assert connectors["0", "1"].config == {"x": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [True, "true", "True"])
def test_ray_and_key_lookup_exclude_each_other(given: Any) -> None:
    with pytest.raises(ConfigError, match="edge 0 -> 1: key_lookup cannot be combined with worker_backend 'ray'"):
        initialize_orchestrator_connectors(pipeline(key_lookup=given, namespace="n"), worker_backend="ray")
    assert Recorder.made == []


@pytest.mark.parametrize(("backend", "threshold"), [(5, None), (None, -1), (None, "64k"), (None, True)])
def test_wrong_arguments(backend: Any, threshold: Any) -> None:
    with pytest.raises(ConfigError):
        initialize_orchestrator_connectors(pipeline(), backend, threshold)


# One stage


def test_a_stage_gets_all_its_edges() -> None:
    config = load_omni_transfer_config(pipeline(shm_threshold_bytes=7))
    connectors = build_stage_connectors(1, get_connectors_config_for_stage(config, 1))
    assert thresholds(connectors) == {("0", "1"): 7, ("1", "2"): 65536}


@pytest.mark.parametrize("given", [None, {}])
def test_a_stage_without_edges(given: Any) -> None:
    assert build_stage_connectors("0", given) == {}


def test_the_shape_that_hosts_send() -> None:
    extra = {"stage_id": 1, "role": "receiver"}
    made = build_stage_connectors("1", {"from_stage_0": {"spec": {"name": "Recorder", "extra": extra}}})
    assert made["0", "1"].config is extra  # type: ignore[attr-defined]
    build_stage_connectors("1", {"to_stage_x_y": {"spec": {"name": "Recorder", "extra": None}}})
    assert Recorder.made[-1].config == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "must be a mapping"),
        ({"from_0": {}}, "neither from_stage_ID nor to_stage_ID"),
        ({"from_stage_": {}}, "neither from_stage_ID nor to_stage_ID"),
        ({5: {}}, "neither from_stage_ID nor to_stage_ID"),
        ({"from_stage_0": {}}, "from_stage_0 must be"),
        ({"from_stage_0": {"spec": None}}, "from_stage_0 must be"),
        ({"from_stage_0": {"spec": {"extra": {}}}}, "from_stage_0 must be"),
        ({"from_stage_0": {"spec": {"name": 5}}}, "from_stage_0 must be"),
        ({"from_stage_0": "Recorder"}, "from_stage_0 must be"),
        ({"from_stage_0": {"spec": {"name": "Recorderr"}}}, "did you mean 'Recorder'"),
    ],
)
def test_wrong_shapes(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_stage_connectors(1, given)
    with pytest.raises(ConfigError, match="stage_id"):
        build_stage_connectors(None, given)  # type: ignore[arg-type]
    assert Recorder.made == []


def test_real_connectors_meet_across_stages() -> None:
    spec = {"name": "InProcessConnector", "extra": {"put_timeout_s": 0}}
    content = {"stages": [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {"from_stage_0": spec}}]}
    config = load_omni_transfer_config(content)
    sides = [build_stage_connectors(stage, get_connectors_config_for_stage(config, stage)) for stage in (0, 1)]
    (sender,), (receiver,) = (list(side.values()) for side in sides)
    assert isinstance(sender, InProcessConnector)
    assert sender is not receiver
    payload = object()
    _, _, metadata = sender.put(0, 1, "r", payload)
    got = receiver.get(0, 1, "r", metadata)
    assert got is not None
    assert got[0] is payload
    sender.close()
    receiver.close()
