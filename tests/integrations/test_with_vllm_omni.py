"""Beside a real vllm-omni since 0.30: its serializer, its factory, its plugins."""

from __future__ import annotations

import contextlib
import pickle
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.child import Child, Children

from omni_fastshm.cli import main
from omni_fastshm.integrations._vllm_check import resolved_names
from omni_fastshm.integrations._vllm_host import find_host, is_installed
from omni_fastshm.integrations.vllm_omni import connector_class, register, replace_default, restore_default

from .golden import HOST_ROWS, REFUSED, ROWS, Row
from .tools import alike, sent

if not is_installed():
    pytest.skip("vllm-omni is not installed: make test-vllm-omni", allow_module_level=True)
if not find_host().keyed:
    pytest.skip("this is the vllm-omni of December 2025: test_with_december.py", allow_module_level=True)

pytestmark = pytest.mark.time_limit(600)  # to import the host takes 20 s of CPU time, in each process
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "vllm_omni"
by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture
def host() -> Any:
    return find_host()


@by_name
def test_rows_are_what_the_peer_gives(row: Row) -> None:
    host = find_host()
    if not row.peer:
        with contextlib.suppress(Exception):
            assert not alike(host.serializer.deserialize(host.serializer.serialize(row.sent)), row.seen)
        return
    try:
        given = host.serializer.deserialize(host.serializer.serialize(row.sent))
    except Exception:
        given = REFUSED
    assert given is REFUSED if row.seen is REFUSED else alike(given, row.seen)


@pytest.mark.parametrize(("name", "build"), HOST_ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_rows_of_the_host(make: Callable[..., Any], host: Any, name: str, build: Callable[[], Any]) -> None:
    try:
        expected = host.serializer.deserialize(host.serializer.serialize(build()))
    except Exception:
        expected = REFUSED
    got = sent(make, build())
    assert (got is REFUSED) == (expected is REFUSED)
    assert got is REFUSED or alike(got, expected)


def test_results_of_the_host(make: Callable[..., Any], host: Any) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm_omni.outputs import OmniRequestOutput

    inner = CompletionOutput(0, "text", [1, 2], None, None)
    inner.multimodal_output = {"audio": torch.arange(30_000.0)}
    outer = RequestOutput("r", "p", [1, 2], None, [inner], True)
    outer.multimodal_output = {"image": torch.ones(3)}
    diffusion = OmniRequestOutput.from_diffusion("r", [Image.new("RGB", (4, 4), (9, 8, 7))])
    for value in (outer, [outer, {"x": inner}], inner, diffusion, {"engine_inputs": [diffusion, outer]}):
        expected = host.serializer.deserialize(host.serializer.serialize(value))
        assert alike(sent(make, value), expected)
    got = sent(make, outer)
    assert type(got) is RequestOutput
    assert torch.equal(got.outputs[0].multimodal_output["audio"], torch.arange(30_000.0))
    assert torch.equal(got.multimodal_output["image"], torch.ones(3))


# ---- plugins, factory, loader


def test_register_is_idempotent_and_keeps_the_default(host: Any) -> None:
    from vllm_omni.distributed.omni_connectors import OmniConnectorFactory

    for _ in range(3):
        register()
    names = OmniConnectorFactory.list_registered_connectors()
    assert {"FastSharedMemoryConnector", "FastMooncakeConnector", "SharedMemoryConnector"} <= set(names)
    assert resolved_names()["SharedMemoryConnector"].startswith("vllm_omni.")
    assert resolved_names()["FastSharedMemoryConnector"].startswith("omni_fastshm.")


def test_the_class_passes_every_isinstance_test_of_the_host(host: Any, make: Callable[..., Any]) -> None:
    from vllm_omni.distributed.omni_connectors import ConnectorSpec, OmniConnectorBase, OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.transfer_adapter import chunk_transfer_adapter

    register()
    extra = {"stage_id": 3}
    connector = OmniConnectorFactory.create_connector(ConnectorSpec("FastSharedMemoryConnector", extra))
    assert isinstance(connector, OmniConnectorBase)
    assert isinstance(connector, chunk_transfer_adapter.SharedMemoryConnector)
    assert issubclass(connector_class("FastMooncakeConnector", host=host), chunk_transfer_adapter.SharedMemoryConnector)
    assert connector.config is extra
    assert connector.stage_id == 3
    assert connector.deserialize_obj(connector.serialize_obj((1,))) == [1]
    connector.close()


def test_a_setting_that_is_wrong_becomes_the_factory_s_error() -> None:
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
    from vllm_omni.distributed.omni_connectors.transfer_adapter import chunk_transfer_adapter

    places = [vllm_omni.distributed, omni_connectors, shm_connector, chunk_transfer_adapter]
    for _ in range(2):
        replace_default()
        ours = connector_class("FastSharedMemoryConnector", host=host)
        assert [place.SharedMemoryConnector for place in places] == [ours] * 4
        connector = OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector", {"stage_id": 1}))
        assert type(connector) is ours
        connector.close()
        register()
    restore_default()
    assert [place.SharedMemoryConnector for place in places] == [host.base] * 4


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("before/*.yaml")))
def test_the_examples_before_and_after(name: str) -> None:
    from vllm_omni.distributed.omni_connectors import initialize_orchestrator_connectors, load_omni_transfer_config

    register()
    before, after = (load_omni_transfer_config(EXAMPLES / side / name) for side in ("before", "after"))
    assert {spec.name for spec in before.connectors.values()} <= {"SharedMemoryConnector"}
    assert {spec.name for spec in after.connectors.values()} == {"FastSharedMemoryConnector"}
    assert set(after.connectors) == {("0", "1"), ("1", "2")}
    _, connectors = initialize_orchestrator_connectors(EXAMPLES / "after" / name)
    assert {type(connector).__name__ for connector in connectors.values()} == {"FastSharedMemoryConnector"}
    for connector in connectors.values():
        connector.close()


def test_their_adapter_sends_and_receives(make: Callable[..., Any]) -> None:
    from vllm_omni.distributed.omni_connectors.adapter import try_recv_via_connector, try_send_via_connector

    sender, receiver, notes, forwarded = make(), make(), [], []
    inputs = [{"prompt_token_ids": [1, 2], "additional_information": {"thinker": torch.ones(30_000)}}]
    metrics = types.SimpleNamespace(on_forward=lambda *given: forwarded.append(given))
    for stages in ((0, 1), (1, 2)):  # the bare request id on every edge
        assert try_send_via_connector(sender, *stages, "r", inputs, None, {"prompt": "p"}, notes.append, metrics)
        task = pickle.loads(pickle.dumps(notes[-1]))
        got, figures = try_recv_via_connector(task, {tuple(map(str, stages)): receiver}, stages[1])
        assert got[0]["prompt_token_ids"] == [1, 2]
        assert bool((got[0]["additional_information"]["thinker"] == 1).all())
        assert figures["rx_transfer_bytes"] == forwarded[-1][3]


@pytest.mark.usefixtures("_default_restored")
def test_doctor_says_what_each_name_stands_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--vllm-omni"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^SharedMemoryConnector +ok +is vllm_omni\.", out, re.MULTILINE)
    assert re.search(r"^FastSharedMemoryConnector +ok +is omni_fastshm\.", out, re.MULTILINE)
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_omni_register_models")
    monkeypatch.setenv("OMNI_FASTSHM_REPLACE_DEFAULT", "1")
    assert main(["doctor", "--vllm-omni"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^VLLM_PLUGINS +fail +is set and does not list omni_fastshm", out, re.MULTILINE)
    assert re.search(r"^SharedMemoryConnector +ok +is omni_fastshm\.", out, re.MULTILINE)


# ---- stages in processes of their own, on the host's own deploy files

STAGE = """
from support.vllm_stage import *
load_plugins()
result = spec_of(path, stage)["name"]
a = adapter(path, stage, worker=worker, sends=stage == 0)
kind = type(a.connector)
result = result, f"{kind.__module__}:{kind.__name__}", a.connector.stage_id
"""
OURS = "omni_fastshm.integrations.vllm_omni:FastSharedMemoryConnector"
START_S = 280


def stages(children: Children, path: str, worker: str) -> tuple[Child, Child, list[Any]]:
    first, second = (children.start(warnings_are_errors=False) for _ in range(2))
    for stage, child in enumerate((first, second)):
        child.start(STAGE, path=path, stage=stage, worker=worker)
    return first, second, [first.finish(START_S), second.finish(START_S)]


@pytest.mark.parametrize("worker", ["ar", "generation"])
def test_chunks_of_qwen3_omni(quiet_children: Children, worker: str, tmp_path: Path) -> None:
    """Their deploy file, with one name changed by an overlay; their chunk adapter in both processes."""
    from support.vllm_stage import deploy_file

    overlay = tmp_path / "fast.yaml"
    overlay.write_text(
        f"base_config: {deploy_file('qwen3_omni_moe.yaml')}\n"
        "connectors:\n  connector_of_shared_memory:\n    name: FastSharedMemoryConnector\n"
    )
    first, second, kinds = stages(quiet_children, str(overlay), worker)
    assert kinds == [("FastSharedMemoryConnector", OURS, stage) for stage in (0, 1)]
    names = ["chatcmpl-1", "chatcmpl-11", "ünï/cödé", "x" * 400]
    first.run("send(a, names, 6, rows=20)", names=names)
    got = second.run("result = summary(receive(a, names, 6))", names=names, timeout=90)
    for name in names:
        assert got[name] == [(float(n), (20, 2048), list(range(n + 1)), [name]) for n in range(6)]
    second.start("result = summary(receive(a, ['big'], 2))")
    first.run("send(a, ['big'], 2, rows=2500)")
    assert second.finish(90)["big"][1][:2] == (1.0, (2500, 2048))

    # An abort: what is unread goes, of this request and of no other.
    first.run(
        """
send(a, ['abort_1', 'abort_10'], 5, rows=4, finish=False)
until(lambda: a.put_req_chunk['abort_1'] == a.put_req_chunk['abort_10'] == 5)
before = a.connector.health()['live_blocks']
a.cleanup_sender('abort_1')
until(lambda: not a.connector._transport.has('abort_1_0_4'))
"""
    )
    left = first.run("result = [n for n in range(5) if a.connector._transport.has(f'abort_10_0_{n}')]")
    assert left == list(range(5))
    assert first.run("result = [n for n in range(5) if a.connector._transport.has(f'abort_1_0_{n}')]") == []
    for child in (first, second):
        assert child.run("result = a.connector.health()['status'], a.connector.health()['errors']") == ("healthy", 0)
        child.run("a.shutdown(); a.recv_thread.join(10); a.save_thread.join(10)")


def test_chunks_of_qwen2_5_omni_with_the_default_replaced(
    quiet_children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their deploy file names no connector: the switch in the environment puts ours under it, untouched as it is."""
    from support.vllm_stage import deploy_file

    monkeypatch.setenv("OMNI_FASTSHM_REPLACE_DEFAULT", "1")
    first, second, kinds = stages(quiet_children, deploy_file("qwen2_5_omni.yaml"), "ar")
    assert kinds == [("SharedMemoryConnector", OURS, stage) for stage in (0, 1)]
    first.run("send(a, ['r'], 4, rows=700)")
    got = second.run("result = summary(receive(a, ['r'], 4))", timeout=90)
    assert [chunk[:2] for chunk in got["r"]] == [(float(n), (700, 2048)) for n in range(4)]
    for child in (first, second):
        child.run("a.shutdown(); a.recv_thread.join(10); a.save_thread.join(10)")


def test_without_our_name_in_the_allow_list_we_are_off(quiet_children: Children, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_omni_register_models")
    child = quiet_children.start(warnings_are_errors=False)
    names = child.run(
        "from support.vllm_stage import *\nload_plugins()\n"
        "from vllm_omni.distributed.omni_connectors import OmniConnectorFactory as f\n"
        "result = f.list_registered_connectors()",
        timeout=START_S,
    )
    assert "SharedMemoryConnector" in names
    assert "FastSharedMemoryConnector" not in names
