"""`omni-fastshm plan`: Little's law and the Poisson tail, and what follows for settings and mounts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from omni_fastshm.cli import main
from omni_fastshm.cli.load import size
from omni_fastshm.config import load_omni_transfer_config
from omni_fastshm.connectors._mooncake_settings import SETTINGS
from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import parse_settings
from omni_fastshm.simulation import arrivals_of, simulate
from omni_fastshm.sizing import MIB, Load, make_plan, places_needed

FOUR_STAGES = {
    "stage_args": [
        {"stage_id": "a", "output_connectors": {"to_stage_b": "shm", "to_stage_c": "shm"}},
        {"stage_id": "b", "engine_input_source": ["a"], "output_connectors": {"to_stage_d": "store"}},
        {"stage_id": "c", "engine_input_source": ["a"], "output_connectors": {"to_stage_d": "here"}},
        {"stage_id": "d", "engine_input_source": ["b", "c"]},
    ],
    "runtime": {
        "connectors": {
            "shm": {"name": "SharedMemoryConnector", "extra": {"max_bytes": 1 << 20}},
            "store": {"name": "MooncakeConnector", "extra": {"master": "10.0.0.1:50051"}},
            "here": {"name": "InProcessConnector"},
        }
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(FOUR_STAGES))
    return path


@pytest.mark.parametrize("mean", [0.0, 0.01, 1.0, 2.4, 17.0, 400.0])
@pytest.mark.parametrize("risk", [0.5, 1e-2, 1e-4, 1e-9])
def test_places_are_the_fewest_that_keep_the_risk(mean: float, risk: float) -> None:
    def tail(count: int) -> float:
        terms = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count, count + 3000))
        return math.fsum(terms) if mean else float(count == 0)

    places = places_needed(Load(mean, 1.0, 1), risk)
    assert tail(places) <= risk * (1 + 1e-9)
    assert places == 1 or tail(places - 1) > risk * (1 - 1e-6)


def test_a_burst_counts_as_one_arrival_of_several() -> None:
    assert places_needed(Load(80.0, 0.1, 1, burst=8), 1e-3) == 8 * places_needed(Load(10.0, 0.1, 1), 1e-3)


@pytest.mark.parametrize("hold", ["fixed", "exponential"])
@pytest.mark.parametrize("burst", [1, 4])
def test_the_simulator_agrees(hold: str, burst: int) -> None:
    """With the planned room few enough puts wait; with clearly less, more do."""
    load, risk = Load(50.0, 0.1, 1 << 16, burst), 0.02
    waited = {}
    for places in (places_needed(load, risk), places_needed(load, risk) - 2 * burst):
        ring = places * load.size
        settings = {"segment_bytes": ring, "max_bytes": ring, "put_timeout_s": 1e9, "idle_segment_s": 2.0}
        trace = arrivals_of({("a", "b"): load}, 1000, hold=hold, seed=5)
        (result,) = simulate({("a", ("b",)): settings}, trace)
        edge = result.edges["b"]
        assert edge.puts > 45_000
        assert edge.refused == 0
        waited[places] = edge.waited / edge.puts
    few, many = waited.values()
    # Waiting puts delay those behind them, so the share is a little above the tail it was planned for.
    assert few < 1.6 * risk
    assert many > 1.6 * risk


def test_every_kind_of_edge(file: Path) -> None:
    config = load_omni_transfer_config(file)
    big, small = Load(10, 0.1, 3_000_000), Load(10, 0.1, 1000)
    loads = {("a", "b"): big, ("a", "c"): big, ("b", "d"): big, ("c", "d"): big}
    plan = make_plan(config, loads, risk=1e-3)
    assert {(each.from_stage, each.to_stage): each.way for each in plan.edges} == {
        ("a", "b"): "ring",
        ("a", "c"): "ring",
        ("b", "d"): "store",
        ("c", "d"): "process",
    }
    (ring,) = plan.rings
    assert (ring.from_stage, ring.to_stages, ring.configured) == ("a", ("b", "c"), {"max_bytes": 1 << 20})
    peak = places_needed(big, 1e-3)
    assert ring.max_bytes >= 2 * peak * 3_000_000
    assert ring.max_bytes < 2 * peak * 3_000_000 + 2 * MIB
    assert "max_bytes to 1048576" in plan.warnings[0]
    (node,) = plan.nodes
    assert node.shm_bytes >= 1.05 * ring.max_bytes
    assert node.shm_bytes % MIB == 0
    assert (node.store_bytes, node.receive_bytes) == (node.receive_bytes, node.store_bytes)
    assert peak * 3_000_000 <= node.store_bytes < peak * 3_000_000 * 1.1 + MIB
    assert node.process_bytes == peak * 3_000_000
    inline = make_plan(config, {**loads, ("a", "b"): small, ("a", "c"): small}, risk=1e-3)
    assert inline.edges[0].way == "inline"
    assert inline.rings == ()
    assert inline.nodes[0].shm_bytes == 0


def test_nodes(file: Path) -> None:
    config = load_omni_transfer_config(file)
    loads = dict.fromkeys(config.edges, Load(10, 0.1, 3_000_000))
    plan = make_plan(config, loads, nodes={"one": ["a", "b", "c"], "two": ["d"]})
    one, two = plan.nodes
    assert one.shm_bytes > 0
    assert two.shm_bytes == 0
    assert (one.store_bytes > 0, one.receive_bytes, two.store_bytes, two.receive_bytes > 0) == (True, 0, 0, True)
    assert any("edge c -> d is InProcessConnector" in text and "MooncakeConnector" in text for text in plan.warnings)
    for nodes, problem in (
        ({"one": ["a", "b", "c"]}, "no node has the stages d"),
        ({"one": ["a", "b", "c", "d"], "two": ["d"]}, "on two nodes"),
        ({"one": ["a", "b", "c", "d", "e"]}, "no stage 'e'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_plan(config, loads, nodes=nodes)


@pytest.mark.parametrize("size_", [100_000, 30_000_000, 300_000_000])
def test_payloads_of_one_size_fill_the_planned_ring(file: Path, size_: int) -> None:
    """The planned number fits into the planned ring, whatever the segments lose at their ends."""
    config = load_omni_transfer_config(file)
    load = Load(10, 1.0, size_)
    plan = make_plan(config, dict.fromkeys(config.edges, load))
    (ring,) = plan.rings
    settings = {**ring.settings, "put_timeout_s": 0.0}
    wanted = 2 * plan.edges[0].peak
    trace = arrivals_of({("a", "b"): Load(wanted, 100.0, size_)}, 1.0, kind="even")
    (result,) = simulate({("a", ("b", "c")): settings}, trace)
    assert result.edges["b"].refused == 0
    assert result.edges["b"].puts == wanted


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("1000", 1000),
        ("28.7MB", 28_700_000),
        ("64KiB", 65536),
        ("1.5 GiB", 3 << 29),
        ("2k", 2000),
        ("7B", 7),
        (".5M", 500_000),
        ("0.5k", 500),
        ("2TB", 2 * 10**12),
        ("1TiB", 1 << 40),
        ("0k", 0),
    ],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert size(text) == bytes_


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_the_command(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    common = ["plan", str(file), "--rps", "10", "--hold-ms", "100", "--payload", "3MB", "--payload", "a:c=1kB"]
    found = json.loads(run(capsys, *common, "--json"))
    assert (found["format"], [each["way"] for each in found["edges"]]) == (1, ["ring", "inline", "store", "process"])
    text = run(capsys, *common)
    shm = found["nodes"][0]["shm_bytes"] // MIB
    assert f"docker run --shm-size={shm}m" in text
    assert f"sizeLimit: {shm}Mi" in text
    assert f"max_bytes: {found['rings'][0]['max_bytes']}" in text
    assert "warning: stage a: the file sets max_bytes to 1048576" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--payload", "x"], "--payload: 'x' is no size"),
        (["--payload", "5i"], "--payload: '5i' is no size"),
        (["--payload", "28.7Mb"], "'28.7Mb' may mean bits or bytes; write 28.7MB"),
        (["--payload", "28.7"], "'28.7' is no whole number of bytes; a unit is missing, as in 28.7MB"),
        (["--payload", "28.7B"], "is no whole number of bytes"),
        (["--payload", "1e30"], "is no size"),
        (["--payload", "9" * 20], "is more bytes than there can be"),
        (["--payload", "0.0001k"], "'0.0001k' is less than one byte"),
        (["--payload", "200TiB"], "--payload: '200TiB' is too large: the most is 140,737,488,355,328"),
        (["--payload", "1MB", "--rps", "1e30"], "--rps: '1e30' is too large: the most is 1,000,000,000"),
        (["--payload", "1MB", "--hold-ms", "1e30"], "--hold-ms: '1e30' is too large: the most is 1,000,000,000,000"),
        (["--payload", "1MB", "--hold-ms", "1e12"], "on edge a -> b keeps more than 100,000,000 of its payloads under"),
        (["--payload", "1MB", "--hold-ms", "1e12"], "at --rps 10 the most is 10,000,000,000"),
        (["--payload", "1MB", "--burst", "9" * 11], "is too large: the most is 1,000,000"),
        (["--payload", "a:z=1MB"], "no edge 'a:z'; there are a:b"),
        (["--payload", "a:b=1MB"], "nothing is said about the edges a:c, b:d, c:d"),
        (["--payload", "1MB", "--burst", "0"], "--burst: '0'"),
        (["--payload", "-5"], "--payload: '-5'"),
        (["--payload", "1MB", "--node", "one"], "does not read NAME=STAGE"),
        (["--payload", "1MB", "--node", "one=x"], "there is no stage 'x'"),
    ],
)
def test_what_cannot_be_used(
    capsys: pytest.CaptureFixture[str], file: Path, arguments: list[str], problem: str
) -> None:
    said = run(capsys, "plan", str(file), "--rps", "10", "--hold-ms", "100", *_joined(arguments), status=1)
    assert problem in said


def _joined(arguments: list[str]) -> list[str]:
    """``--option=value``, so that a value may begin with a dash."""
    return [f"{option}={value}" for option, value in zip(arguments[::2], arguments[1::2], strict=True)]


def test_names_of_vllm_omni() -> None:
    spec = {"name": "FastSharedMemoryConnector", "extra": {"codec_chunk_frames": 25}}
    stages = [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {"from_stage_0": spec}}]
    plan = make_plan(load_omni_transfer_config({"stages": stages}), {("0", "1"): Load(10, 0.1, 1000)})
    assert (plan.edges[0].connector, plan.edges[0].way) == (
        "FastSharedMemoryConnector",
        "ring",
    )  # all goes by key there
    assert plan.rings[0].settings["key_lookup"] is True


NAMED = """
stages: [{stage_id: 0, name: thinker}, {stage_id: 1, engine_args: {model_stage: talker}}, {stage_id: 2, name: 1}]
edges: [{from: thinker, to: talker}, {from: 1, to: 2}]
"""


def test_stages_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "named.yaml"
    file.write_text(NAMED)
    common = ["plan", str(file), "--rps", "10", "--hold-ms", "100", "--json"]
    texts = ["--payload", "1kB", "--payload", "thinker:talker=3MB"]
    found = json.loads(run(capsys, *common, *texts, "--node", "a=thinker", "--node", "b=talker,2"))
    assert [each["load"]["size"] for each in found["edges"]] == [3_000_000, 1000]
    assert [node["stages"] for node in found["nodes"]] == [["0"], ["1", "2"]]
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "edge": ["thinker", 1], "bytes": 3000000, "hold_s": 0.1}\n')
    replayed = json.loads(run(capsys, "simulate", str(file), "--trace", str(trace), "--json"))
    assert replayed["rings"][0]["edges"]["1"]["puts"] == 1
    trace.write_text('{"t": 0, "edge": ["thinker", "talk"], "bytes": 3000000, "hold_s": 0.1}\n')
    assert "has no edge thinker -> talk" in run(capsys, "simulate", str(file), "--trace", str(trace), status=1)


def test_a_payload_that_never_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`plan` says it of what the file sets, `simulate` of what it replays."""
    file = tmp_path / "pipeline.json"
    small = {"max_bytes": MIB}
    kinds = {
        "b": {"name": "SharedMemoryConnector", "extra": {**small, "fallback": "inline"}},
        "c": {"name": "InProcessConnector", "extra": small},
        "d": {"name": "MooncakeConnector", "extra": {"master": "h:1", "segment": "16MiB"}},
        "e": {"name": "SharedMemoryConnector", "extra": {"max_bytes": 1 << 30}},
    }
    stages = [{"stage_id": "a"}]
    stages += [{"stage_id": name, "input_connectors": {"from_stage_a": spec}} for name, spec in kinds.items()]
    file.write_text(json.dumps({"stages": stages}))
    load = ["--rps", "1", "--hold-ms", "100", "--payload", "40MB"]

    def warned(*command: str) -> list[str]:
        return [text for text in json.loads(run(capsys, *command, "--json"))["warnings"] if "never fits" in text]

    planned = warned("plan", str(file), *load)
    assert [text.split(":")[0] for text in planned] == ["edge a -> b", "edge a -> c", "edge a -> d"]
    assert "max_bytes 1048576 of stage a is less than one payload of 40000000 bytes" in planned[0]
    assert "travels inside the metadata" in planned[0]
    assert "is refused; raise it" in planned[1]
    assert "segment (or max_bytes) 16777216 of stage a" in planned[2]
    replayed = warned("simulate", str(file), *load, "--seconds", "5")
    assert replayed == [planned[0], planned[2]], "in-process edges are not replayed"
    assert len(warned("simulate", str(file), *load, "--seconds", "5", "--max-bytes", "1MiB")) == 3
    assert warned("simulate", str(file), *load, "--seconds", "5", "--max-bytes", "1GiB") == []
    assert warned("plan", str(file), *load[:-1], "60kB") == [], "travels inside the metadata anyway"
    assert f"warning: {replayed[0]}" in run(capsys, "simulate", str(file), *load, "--seconds", "5").splitlines()


def test_more_payloads_than_one_connector_can_have(file: Path) -> None:
    config = load_omni_transfer_config(file)
    plan = make_plan(config, dict.fromkeys(config.edges, Load(10_000, 7.0, 70_000)))
    assert any("one connector can have 131072 under way" in text for text in plan.warnings)
    plan = make_plan(config, dict.fromkeys(config.edges, Load(10_000, 6.0, 70_000)))
    assert not any("131072" in text for text in plan.warnings)


def test_the_largest_loads_are_planned() -> None:
    """What is not refused ends, and the answer is near the mean."""
    assert 10**8 < places_needed(Load(1e9, 0.1, 1), 1e-4) < 1.0005 * 10**8
    assert places_needed(Load(0.1, 1e9, 1, 10**6), 1e-300) < 10**9


def test_units_that_commands_print(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of 1,024: with an i, and a setting that is printed reads back as what was meant."""
    file = tmp_path / "pipeline.json"
    spec = {"name": "MooncakeConnector", "extra": {"master": "h:1"}}
    stages = [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {"from_stage_0": spec}}]
    file.write_text(json.dumps({"stages": stages}))
    load = ["plan", str(file), "--rps", "10", "--hold-ms", "100", "--payload", "3MB"]
    (node,) = json.loads(run(capsys, *load, "--json"))["nodes"]
    text = run(capsys, *load)
    found = re.findall(r"(segment|localbuf) (\S+) in all", text)
    assert [name for name, _ in found] == ["segment", "localbuf"]
    for _, size_ in found:
        assert parse_settings("M", SETTINGS, {"segment": size_})["segment"] == node["store_bytes"]
    assert not re.search(r"\d ?[kMG]B", text)


def test_numbers_that_cannot_be() -> None:
    made: list[Any] = [(-1, 1, 1, 1), (1, math.inf, 1, 1), (1, 1, -1, 1), (math.nan, 1, 1, 1), (1, 1, 1, 0)]
    made += [(1e10, 1, 1, 1), (1, 1e10, 1, 1), (1, 1, 1 << 48, 1), (1, 1, 1, 10**7), (1e6, 1e6, 1, 1)]
    for numbers in made:
        with pytest.raises(ConfigError):
            Load(*numbers)
    with pytest.raises(ConfigError, match="risk"):
        places_needed(Load(1, 1, 1), 0)
