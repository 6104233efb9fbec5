"""Beside the real vllm-omni of December 2025 (0.12): its serializer, its factory, its loader, its adapter.

`make test-vllm-omni VLLM_OMNI=0.12.0rc1` installs it.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.child import Children

from omni_fastshm.cli import main
from omni_fastshm.integrations._vllm_check import resolved_names
from omni_fastshm.integrations._vllm_host import find_host, is_installed, loads_plugins_itself
from omni_fastshm.integrations.vllm_omni import connector_class, register, replace_default, restore_default

from .golden import HOST_ROWS, REFUSED, ROWS, Row
from .tools import alike

if not is_installed():
    pytest.skip("no vllm-omni: make test-vllm-omni VLLM_OMNI=0.12.0rc1", allow_module_level=True)
if find_host().keyed:
    pytest.skip("this vllm-omni is a later one: make test-vllm-omni VLLM_OMNI=0.12.0rc1", allow_module_level=True)

pytestmark = pytest.mark.time_limit(1500)  # to import the host takes 20 s of CPU time, in each process
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "vllm_omni"
OURS = "omni_fastshm.integrations.vllm_omni:FastSharedMemoryConnector"
START_S = 480

# What that serializer cannot write at all: a tensor without dimensions, of more than a byte.
WORSE = {"tensor float32 ()"}


@pytest.fixture
def host() -> Any:
    return find_host()


@pytest.fixture
def make(connect: Callable[..., Any], host: Any) -> Callable[..., Any]:
    return lambda **config: connect(connector_class("FastSharedMemoryConnector", host=host), **config)


def theirs(host: Any, value: Any) -> Any:
    try:
        return host.serializer.deserialize(host.serializer.serialize(value))
    except Exception:
        return REFUSED


def ours(make: Callable[..., Any], value: Any, **config: Any) -> Any:
    sender, receiver = make(**config), make(**config)
    ok, size, metadata = sender.put("0", "1", "r", value)
    if not ok:
        assert (size, metadata) == (0, None)
        return REFUSED
    got = receiver.get("0", "1", "r", metadata=pickle.loads(pickle.dumps(metadata)))
    assert type(got) is tuple
    assert got[1] == size > 0
    return got[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_are_what_the_peer_gives(host: Any, row: Row) -> None:
    given = theirs(host, row.sent)
    same = given is REFUSED if row.seen is REFUSED else given is not REFUSED and alike(given, row.seen)
    assert same is (row.peer and row.name not in WORSE)


@pytest.mark.parametrize(("name", "build"), HOST_ROWS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("threshold", [0, 1 << 30])
def test_rows_of_the_host(
    make: Callable[..., Any], host: Any, name: str, build: Callable[[], Any], threshold: int
) -> None:
    expected, got = theirs(host, build()), ours(make, build(), shm_threshold_bytes=threshold)
    assert (got is REFUSED) == (expected is REFUSED)
    assert got is REFUSED or alike(got, expected)


def test_results_of_the_host(make: Callable[..., Any], host: Any) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    inner = CompletionOutput(0, "text", [1, 2], None, None)
    inner.multimodal_output = {"audio": torch.arange(30_000.0)}
    outer = RequestOutput("r", "p", [1, 2], None, [inner], True)
    outer.multimodal_output = {"image": torch.ones(3)}
    for value in (outer, [outer, {"x": inner}], inner, {"engine_inputs": [outer]}):
        assert alike(ours(make, value), theirs(host, value))
    got = ours(make, outer)
    assert type(got) is RequestOutput
    assert torch.equal(got.outputs[0].multimodal_output["audio"], torch.arange(30_000.0))
    assert torch.equal(got.multimodal_output["image"], torch.ones(3))


def test_their_sampling_params_go_as_with_theirs(make: Callable[..., Any], host: Any) -> None:
    from vllm import SamplingParams

    value = {"sampling_params": [SamplingParams(temperature=0.4, max_tokens=5, stop_token_ids=[3])]}
    assert alike(ours(make, value), theirs(host, value))


# ---- the class, the factory, the default


def test_the_class_keeps_the_host_s_contract(host: Any, make: Callable[..., Any]) -> None:
    from vllm_omni.distributed.omni_connectors import (
        ConnectorSpec,
        OmniConnectorBase,
        OmniConnectorFactory,
        SharedMemoryConnector,
    )

    for _ in range(3):
        register()
    extra = {"shm_threshold_bytes": 1000}
    connector = OmniConnectorFactory.create_connector(ConnectorSpec("FastSharedMemoryConnector", extra))
    peer = SharedMemoryConnector(extra)
    assert isinstance(connector, OmniConnectorBase)
    assert isinstance(connector, SharedMemoryConnector)
    assert connector.config is extra
    assert connector.threshold == peer.threshold == 1000
    assert set(peer.health()) <= set(connector.health())
    assert connector.health()["status"] == peer.health()["status"]
    assert connector.deserialize_obj(connector.serialize_obj((1,))) == [1]
    for method in ("put", "get", "cleanup"):
        expected = list(inspect.signature(getattr(peer, method)).parameters)
        assert list(inspect.signature(getattr(connector, method)).parameters) == expected
    connector.close()
    assert issubclass(connector_class("FastMooncakeConnector", host=host), SharedMemoryConnector)


def test_a_setting_that_is_wrong_is_said() -> None:
    from vllm_omni.distributed.omni_connectors import ConnectorSpec, OmniConnectorFactory

    register()
    with pytest.raises(ValueError, match="segment_bytes"):
        OmniConnectorFactory.create_connector(ConnectorSpec("FastSharedMemoryConnector", {"segment_bytes": "x"}))


@pytest.mark.usefixtures("_default_restored")
def test_the_default_can_be_replaced_everywhere_and_restored(host: Any) -> None:
    import vllm_omni.distributed
    from vllm_omni.distributed import omni_connectors
    from vllm_omni.distributed.omni_connectors import ConnectorSpec, OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.connectors import shm_connector

    places = [vllm_omni.distributed, omni_connectors, shm_connector]
    for _ in range(2):
        replace_default()
        cls = connector_class("FastSharedMemoryConnector", host=host)
        assert [place.SharedMemoryConnector for place in places] == [cls] * 3
        connector = OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector", {}))
        assert type(connector) is cls
        connector.close()
        register()
    restore_default()
    assert [place.SharedMemoryConnector for place in places] == [host.base] * 3
    assert type(OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector", {}))) is host.base


def test_the_example_before_and_after() -> None:
    from vllm_omni.distributed.omni_connectors import initialize_orchestrator_connectors, load_omni_transfer_config

    register()
    before, after = (load_omni_transfer_config(EXAMPLES / side / "december_2025.yaml") for side in ("before", "after"))
    assert {spec.name for spec in before.connectors.values()} == {"SharedMemoryConnector"}
    assert {spec.name for spec in after.connectors.values()} == {"FastSharedMemoryConnector"}
    assert set(before.connectors) == set(after.connectors) == {("0", "1"), ("1", "2")}
    _, connectors = initialize_orchestrator_connectors(EXAMPLES / "after" / "december_2025.yaml")
    for connector in connectors.values():
        assert type(connector).__name__ == "FastSharedMemoryConnector"
        connector.close()


@pytest.mark.usefixtures("_default_restored")
def test_doctor_says_what_each_name_stands_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--vllm-omni"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^plugin +ok +.*vllm\.platform_plugins", out, re.MULTILINE)
    assert re.search(r"^contract +ok +of December 2025", out, re.MULTILINE)
    assert re.search(r"^SharedMemoryConnector +ok +is vllm_omni\.", out, re.MULTILINE)
    assert re.search(r"^FastSharedMemoryConnector +ok +is omni_fastshm\.", out, re.MULTILINE)
    monkeypatch.setenv("OMNI_FASTSHM_REPLACE_DEFAULT", "1")
    assert main(["doctor", "--vllm-omni"]) == 0
    assert re.search(r"^SharedMemoryConnector +ok +is omni_fastshm\.", capsys.readouterr().out, re.MULTILINE)
    assert resolved_names()["SharedMemoryConnector"] == OURS


# ---- head and stage in processes of their own, on the host's own stage files


ALL_OURS = [{("0", "1"): OURS, ("1", "2"): OURS}, {("0", "1"): OURS}, {("1", "2"): OURS}]
PLACES = [{"inline_bytes"}, {"shm"}, {"shm"}] * 2

# The head's own class, up to where it would start the stages; nothing registers us by hand.
HEAD = """
import types, torch
from vllm_omni import Omni
from vllm_omni.distributed.omni_connectors import get_stage_connector_config
from vllm_omni.distributed.omni_connectors.adapter import try_send_via_connector

class Head(Omni):
    def _start_stages(self, model):
        pass
    def _wait_for_stages_ready(self, timeout=0):
        pass

head = Head(model="none", stage_configs_path=path)
kinds = {edge: f"{type(c).__module__}:{type(c).__name__}" for edge, c in head.connectors.items()}
result = kinds, [get_stage_connector_config(head.omni_transfer_config, stage) for stage in (1, 2)]
"""
# What a stage's process does before it makes its engine.
STAGE = """
import vllm_omni.entrypoints.omni_stage as stage_module
connectors = stage_module.build_stage_connectors(stage_id=stage, connectors_config=config)
result = {edge: f"{type(c).__module__}:{type(c).__name__}" for edge, c in connectors.items()}
"""
SEND = """
notes, forwarded = [], []
inputs = [{"prompt_token_ids": [1, 2], "additional_information": {"thinker": torch.full((rows, 2048), float(rows))}}]
metrics = types.SimpleNamespace(on_forward=lambda *given: forwarded.append(given))
edge = head.connectors[(str(stage - 1), str(stage))]
sent = try_send_via_connector(edge, stage - 1, stage, name, inputs, [None], {"prompt": "p"}, notes.append, metrics)
result = sent, notes, forwarded
"""
RECEIVE = """
got, figures = stage_module.try_recv_via_connector(task=task, connectors=connectors, stage_id=stage)
tensor = got[0]["additional_information"]["thinker"] if got else None
result = got and (tuple(tensor.shape), float(tensor.mean()), got[0]["prompt_token_ids"]), figures
"""


def stage_file(name: str) -> Path:
    import vllm_omni

    return Path(vllm_omni.__file__).parent / "model_executor" / "stage_configs" / name


class Processes:
    """A head and the two stages that receive; each takes its time to load the host, so they serve for several files."""

    def __init__(self, children: Children) -> None:
        self.head = children.start(warnings_are_errors=False)
        self.receivers = [children.start(warnings_are_errors=False) for _ in range(2)]

    def build(self, path: Path) -> list[Any]:
        """Which class each edge got, in each process."""
        kinds, configs = self.head.run(HEAD, path=str(path), timeout=START_S)
        for number, (child, config) in enumerate(zip(self.receivers, configs, strict=True), start=1):
            child.start(STAGE, stage=number, config=config)
        return [kinds, *(child.finish(START_S) for child in self.receivers)]


def converse(processes: Processes) -> list[set[str]]:
    """Send a small and a large payload on each edge; gives where the metadata said that they were."""
    places = []
    for stage, child in enumerate(processes.receivers, start=1):
        for name, rows in (("r", 1), ("r", 700), ("ünï/cödé" * 40, 30)):
            sent, notes, forwarded = processes.head.run(SEND, stage=stage, name=name, rows=rows)
            assert sent
            places.append(set(notes[0]["connector_metadata"]) - {"size"})
            got, figures = child.run(RECEIVE, stage=stage, task=notes[0], timeout=90)
            assert got == ((rows, 2048), float(rows), [1, 2])
            assert figures["rx_transfer_bytes"] == forwarded[0][3]
            assert child.run(RECEIVE, stage=stage, task={**notes[0], "connector_metadata": None}) == (None, None)
    return places


def test_head_and_stages_find_our_name_by_themselves(quiet_children: Children, tmp_path: Path) -> None:
    """Their file for several connectors, with the reference and one name changed."""
    assert not loads_plugins_itself()
    config = yaml.safe_load(stage_file("qwen2_5_omni_multiconnector.yaml").read_text())
    config["runtime"]["connectors"]["mooncake_connector"] = {
        "name": "FastSharedMemoryConnector",
        "extra": config["runtime"]["connectors"].pop("shared_memory_connector")["extra"],
    }
    path = tmp_path / "fast.yaml"
    path.write_text(yaml.safe_dump(config))
    processes = Processes(quiet_children)
    assert processes.build(path) == ALL_OURS
    assert converse(processes) == PLACES


def test_their_files_untouched_with_the_default_replaced(quiet_children: Children, monkeypatch: Any) -> None:
    monkeypatch.setenv("OMNI_FASTSHM_REPLACE_DEFAULT", "1")
    processes = Processes(quiet_children)
    for name in ("qwen2_5_omni.yaml", "qwen3_omni_moe.yaml"):
        assert processes.build(stage_file(name)) == ALL_OURS
        assert converse(processes) == PLACES
    # A stage's engine loads the other plugins, after its connectors were made: that changes nothing.
    for plugins in ("", "from vllm.plugins import load_general_plugins; load_general_plugins()\n"):
        kind, names, places = processes.receivers[0].run(
            f"{plugins}import vllm_omni.distributed as d\n"
            "from vllm_omni.distributed import omni_connectors as o\n"
            "from vllm_omni.distributed.omni_connectors.connectors import shm_connector as s\n"
            "f = o.OmniConnectorFactory\n"
            "kind = type(f.create_connector(o.ConnectorSpec('SharedMemoryConnector', {})))\n"
            "places = [m.SharedMemoryConnector is kind for m in (d, o, s)]\n"
            "result = f'{kind.__module__}:{kind.__name__}', f.list_registered_connectors(), places",
            timeout=START_S,
        )
        assert kind == OURS
        assert {"FastSharedMemoryConnector", "FastMooncakeConnector", "SharedMemoryConnector"} <= set(names)
        assert places == [True] * 3


def test_without_our_name_in_the_allow_list_we_are_off(quiet_children: Children, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    child = quiet_children.start(warnings_are_errors=False)
    names = child.run(
        "import vllm_omni\n"
        "from vllm_omni.distributed.omni_connectors import OmniConnectorFactory as f\n"
        "result = f.list_registered_connectors()",
        timeout=START_S,
    )
    assert "SharedMemoryConnector" in names
    assert "FastSharedMemoryConnector" not in names


def test_under_ray_everything_is_inline() -> None:
    from vllm_omni.distributed.omni_connectors import initialize_orchestrator_connectors

    register()
    replace_default()
    try:
        _, connectors = initialize_orchestrator_connectors(str(stage_file("qwen2_5_omni.yaml")), worker_backend="ray")
    finally:
        restore_default()
    sender = connectors["0", "1"]
    assert type(sender).__module__.startswith("omni_fastshm")
    ok, size, metadata = sender.put("0", "1", "r", {"t": torch.ones(1_000_000)})
    assert ok
    assert len(metadata["inline_bytes"]) == size
    for connector in connectors.values():
        connector.close()
