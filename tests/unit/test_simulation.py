"""`omni-fastshm simulate`: virtual rings do what real ones do."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.child import environment

from omni_fastshm import codec, simulation
from omni_fastshm.cli import main
from omni_fastshm.cli import simulate as cli_simulate
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConfigError
from omni_fastshm.simulation import Arrival, SimulatedRing, arrivals_of, read_trace, simulate
from omni_fastshm.sizing import Load

MIB = 1 << 20
EDGE = ("a", "b")


@pytest.mark.parametrize("seed", range(8))
def test_as_a_real_ring(connect: Any, seed: int) -> None:
    """The same puts and releases, in the same order: the same refusals, bytes in use and segments."""
    chance = random.Random(seed)
    largest = chance.choice([200_000, 400_000, 1_500_000])
    segment, limit = chance.choice([256 << 10, MIB]), chance.choice([2 * MIB, 3 * MIB])
    real = connect(SharedMemoryConnector, segment_bytes=segment, max_bytes=limit, put_timeout_s=0, idle_segment_s=1e6)
    model = SimulatedRing(segment, limit, 1e6)
    live: list[tuple[Any, tuple[int, int], int]] = []
    refused = 0
    for number in range(400):
        if live and chance.random() < 0.42:
            place, size = live.pop(chance.randrange(len(live)))[1:]
            model.give(place, size)
            real._producer.outbox.sweep()  # the model knows at once what is free
            continue
        if chance.random() < 0.005:
            while live:
                place, size = live.pop()[1:]
                model.give(place, size)
            real._producer.outbox.sweep()
        data = np.zeros(chance.randrange(65_536, largest), np.uint8)
        ok, size, metadata = real.put(*EDGE, number, data)
        assert not ok or size == codec.plan(data).size
        size = codec.plan(data).size
        model.prepare(size, 0.0)
        place = model.take(size, 0.0) if model.can_fit(size) else None
        assert (place is not None) == ok, f"step {number}"
        refused += not ok
        if place is not None:
            live.append((real.get(*EDGE, number, metadata), place, size))
        producer = real._producer
        assert (producer.outbox.ring.used, producer.capacity) == (model.ring.used, model.capacity), f"step {number}"
    assert refused > 3, "the limit was never reached"
    assert real.health()["high_water_bytes"] == model.ring.peak
    live.clear()


def settings(**changes: Any) -> dict[str, Any]:
    return {"segment_bytes": 128, "max_bytes": 128, "put_timeout_s": 5.0, "idle_segment_s": 2.0, **changes}


def test_waiting_and_refusing() -> None:
    trace = [Arrival(0.0, EDGE, 64, 1.0), Arrival(0.0, EDGE, 64, 3.0), Arrival(0.5, EDGE, 64, 1.0)]
    (patient,) = simulate({("a", ("b",)): settings()}, trace)
    edge = patient.edges["b"]
    assert (edge.puts, edge.waited, edge.longest_wait_s, edge.refused) == (3, 1, 0.5, 0)
    assert (patient.high_water, patient.high_capacity) == (128, 128)
    (hasty,) = simulate({("a", ("b",)): settings(put_timeout_s=0.25)}, trace)
    assert (hasty.edges["b"].puts, hasty.edges["b"].refused) == (2, 1)
    assert sum(hasty.refusals) == 1
    (never,) = simulate({("a", ("b",)): settings(put_timeout_s=0.0)}, [Arrival(0.0, EDGE, 129, 1.0)])
    assert never.edges["b"].refused == 1


def test_first_come_first_served() -> None:
    """A small one behind a large one that waits waits as well."""
    trace = [Arrival(0.0, EDGE, 64, 2.0), Arrival(1.0, EDGE, 128, 1.0), Arrival(1.1, ("a", "c"), 64, 1.0)]
    (result,) = simulate({("a", ("b", "c")): settings()}, trace)
    assert result.edges["b"].longest_wait_s == 1.0
    assert result.edges["c"].longest_wait_s == pytest.approx(1.9)


def test_one_that_gives_up_lets_the_next_in() -> None:
    trace = [Arrival(0.0, EDGE, 64, 9.0), Arrival(1.0, EDGE, 128, 1.0), Arrival(3.0, EDGE, 64, 1.0)]
    (result,) = simulate({("a", ("b",)): settings(put_timeout_s=3.0)}, trace)
    assert (result.edges["b"].refused, result.edges["b"].longest_wait_s) == (1, 1.0)


def test_made_up_arrivals() -> None:
    load = {EDGE: Load(100.0, 0.1, 1000, burst=5)}
    even = list(arrivals_of(load, 10.0, kind="even"))
    assert len(even) == 1000
    assert len({arrival.t for arrival in even}) == 200
    first, again = (list(arrivals_of(load, 100.0, hold="exponential", seed=3)) for _ in range(2))
    assert first == again
    assert first != list(arrivals_of(load, 100.0, hold="exponential", seed=4))
    assert len(first) == pytest.approx(10_000, rel=0.1)
    assert sum(arrival.hold_s for arrival in first) / len(first) == pytest.approx(0.1, rel=0.1)
    assert list(arrivals_of({EDGE: Load(0.0, 0.1, 1000)}, 10.0)) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "must be a JSON object"),
        ('{"t": 0, "edge": ["a", "b"], "bytes": 1}', "'hold_s' is missing"),
        ('{"t": 0, "edge": "ab", "bytes": 1, "hold_s": 1}', "edge must be a list of two"),
        ('{"t": -1, "edge": ["a", "b"], "bytes": 1, "hold_s": 1}', "t must be a number from 0 on"),
        ('{"t": 0, "edge": ["a", "b"], "bytes": NaN, "hold_s": 1}', "bytes must be a number"),
        ('{"t": 0, "edge": ["a", "b"], "bytes": true, "hold_s": 1}', "bytes must be a number"),
        ('{"t": 1e300, "edge": ["a", "b"], "bytes": 1, "hold_s": 1}', "t is too large: .*the most is 10,000,000,000"),
        ('{"t": 0, "edge": ["a", "b"], "bytes": 1e300, "hold_s": 1}', "bytes is too large"),
        ('{"t": 0, "edge": ["a", "b"], "bytes": 1, "hold_s": 1e300}', "hold_s is too large"),
        ("[" * 50_000, "nested too deeply"),
        (" " * 70_000, "more than 65536 characters"),
    ],
)
def test_traces_that_cannot_be_read(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"t": 0, "edge": ["a", "b"], "bytes": 1, "hold_s": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"trace.jsonl, line 2: .*{problem.removeprefix('line 2: ')}"):
        read_trace(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")


def test_a_trace_without_an_end() -> None:
    with pytest.raises(ConfigError, match="more than 65536 characters"):
        read_trace(Path("/dev/zero"))


def test_so_many_arrivals_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MOST_ARRIVALS", 3)
    file = tmp_path / "trace.jsonl"
    line = '{"t": 0, "edge": ["a", "b"], "bytes": 1, "hold_s": 1}\n'
    file.write_text(line * 3)
    assert len(read_trace(file)) == 3
    file.write_text(line * 4)
    with pytest.raises(ConfigError, match="more than 3 lines"):
        read_trace(file)


def test_so_much_work_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that hold one payload each are looked at one by one."""
    monkeypatch.setattr(simulation, "_MOST_LOOKS", 10_000)
    trace = [Arrival(number / 1000, EDGE, 4096, 100.0) for number in range(200)]
    with pytest.raises(ConfigError, match=r"segment_bytes: 4096 makes 1\d\d segments, .* such as 4096"):
        simulate({("a", ("b",)): settings(segment_bytes=4096, max_bytes=1 << 30)}, trace)
    (result,) = simulate({("a", ("b",)): settings(segment_bytes=1 << 20, max_bytes=1 << 30)}, trace)
    assert result.edges["b"].puts == 200
    with pytest.raises(ConfigError, match="segment_bytes"):  # a full ring looks for empty segments at every put
        simulate({("a", ("b",)): settings(segment_bytes=4096, max_bytes=1 << 18, put_timeout_s=0.0)}, trace * 3)


def test_a_connector_has_so_many_payloads_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "BLOCK_LIMIT", 5)
    trace = [Arrival(number / 1000, EDGE, 64, 1.0) for number in range(8)]
    (result,) = simulate({("a", ("b",)): settings(max_bytes=1 << 20)}, trace)
    assert (result.edges["b"].puts, result.edges["b"].waited, result.high_water) == (8, 3, 5 * 64)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rps", "1e30"], "--rps: '1e30' is too large"),
        (
            ["--rps", "1e9"],
            "--seconds: 60 at 1e+09 arrivals per second in all are more than 5,000,000, the most that is",
        ),
        (["--seconds", "1e7"], "give at most 250,000, or a lower --rps"),
        (["--hold-ms", "1e30"], "--hold-ms: '1e30' is too large"),
        (["--seconds", "1e30"], "--seconds: 1e+30 is no time"),
    ],
)
def test_loads_that_would_take_for_ever(
    capsys: pytest.CaptureFixture[str], pipeline: Path, arguments: list[str], problem: str
) -> None:
    common = ["simulate", str(pipeline), "--rps", "20", "--hold-ms", "100", "--payload", "1MiB", *arguments]
    assert main(common) == 1
    assert problem in capsys.readouterr().err


def test_a_burst_is_an_arrival_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pipeline: Path
) -> None:
    """Also where the rate says that hardly any comes."""
    monkeypatch.setattr(cli_simulate, "MOST_ARRIVALS", 1000)
    common = ["simulate", str(pipeline), "--rps", "1e-9", "--hold-ms", "100", "--payload", "1MiB", "--arrivals", "even"]
    assert main([*common, "--burst", "1001"]) == 1
    assert "--burst: 1001 in all are more than the 1,000 arrivals" in capsys.readouterr().err
    assert main([*common, "--burst", "1000"]) == 0


@pytest.mark.parametrize("t", [0.0, 1e-300, 1e-9, 1.0, 1e10])
def test_a_trace_however_short(capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path, t: float) -> None:
    """What the file leaves open is planned from it, and the moments are divided into columns."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"t": moment, "edge": ["a", "b"], "bytes": MIB, "hold_s": 1e9} for moment in [t] * 3 + [t / 2]]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert main(["simulate", str(pipeline), "--trace", str(trace), "--json"]) == 0
    (ring,) = json.loads(capsys.readouterr().out)["rings"]
    assert ring["edges"]["b"]["puts"] == 4
    assert max(ring["occupancy"]) == ring["high_water"]


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text("stage_args: [{stage_id: a}, {stage_id: b, engine_input_source: [a]}]\n")
    return path


def test_the_command(capsys: pytest.CaptureFixture[str], pipeline: Path) -> None:
    common = ["simulate", str(pipeline), "--rps", "20", "--hold-ms", "100", "--payload", "1MiB", "--seconds", "60"]
    assert main([*common, "--json"]) == 0
    (ring,) = json.loads(capsys.readouterr().out)["rings"]
    assert (ring["edges"]["b"]["refused"], ring["from_stage"]) == (0, "a")
    assert 2 * MIB < ring["high_water"] <= ring["max_bytes"]
    assert main(common) == 0
    out = capsys.readouterr().out
    assert "nothing refused" in out
    assert f"{ring['edges']['b']['puts']}" in out
    assert main([*common, "--burst", "8", "--max-bytes", "4MiB"]) == 0
    assert "payloads refused" not in capsys.readouterr().out, "they wait up to 5 s"
    assert main([*common, "--hold-ms", "6000", "--max-bytes", "4MiB"]) == 0
    assert "payloads refused" in capsys.readouterr().out


def test_a_trace_and_a_plot(capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "out.png"
    rows = [{"t": i / 10, "edge": ["a", "b"], "bytes": MIB, "hold_s": 20.0} for i in range(100)]
    rows.append({"t": 0.05, "edge": ["a", "b"], "bytes": 1000, "hold_s": 20.0})
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["simulate", str(pipeline), "--trace", str(trace), "--max-bytes", "16MiB", "--plot", str(plot)]
    done = subprocess.run(  # matplotlib keeps its fonts open
        [sys.executable, "-m", "omni_fastshm", *arguments, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    (ring,) = json.loads(done.stdout)["rings"]
    edge = ring["edges"]["b"]
    assert (edge["puts"], edge["refused"], edge["inline"]) == (16, 84, 1)
    assert sum(ring["refusals"]) == 84
    assert plot.read_bytes().startswith(b"\x89PNG")
    trace.write_text(json.dumps({**rows[0], "edge": ["b", "a"]}))
    assert main(arguments) == 1
    assert "has no edge b -> a" in capsys.readouterr().err


MIXED = """
connectors:
  store: {name: MooncakeConnector, extra: {master: "h:1", segment: 16MB, put_timeout_s: 0}}
  open: {name: MooncakeConnector, extra: {master: "h:1", hard_pin: false}}
stages:
  - {stage_id: a}
  - {stage_id: b, input_connectors: {from_stage_a: store}}
  - {stage_id: c, input_connectors: {from_stage_a: store}}
  - {stage_id: d, input_connectors: {from_stage_b: open}}
  - {stage_id: e, input_connectors: {from_stage_b: {name: SharedMemoryConnector}}}
"""


def test_a_store_has_room_for_what_its_limit_says() -> None:
    store = {"segment": 1 << 24, "max_bytes": 256, "put_timeout_s": 5.0, "shm_threshold_bytes": 10}
    trace = [Arrival(0.0, EDGE, 100, 2.0), Arrival(0.0, EDGE, 100, 1.0), Arrival(0.5, ("a", "c"), 60, 1.0)]
    (result,) = simulate({("a", ("b", "c")): store}, [*trace, Arrival(0.6, EDGE, 257, 1.0), Arrival(0.7, EDGE, 9, 1.0)])
    assert (result.kind, result.high_water, result.max_bytes) == ("store", 256, 256)
    assert result.edges["c"].longest_wait_s == 0.5  # 100 bytes take 128
    assert (result.edges["b"].puts, result.edges["b"].refused, result.edges["b"].inline) == (2, 1, 1)


def test_edges_over_mooncake_and_several_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    common = ["simulate", str(path), "--rps", "20", "--hold-ms", "100", "--payload", "1MiB", "--seconds", "60"]
    common += ["--node", "one=a", "--node", "two=b,c,d,e"]
    assert main([*common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ring, store = found["rings"]
    assert (ring["kind"], ring["from_stage"], store["kind"], store["from_stage"]) == ("ring", "b", "store", "a")
    assert (store["max_bytes"], store["segment_bytes"], set(store["edges"])) == (16 * MIB, 16 * MIB, {"b", "c"})
    assert found["left_out"] == [["b", "d"]]
    assert found["nodes"] == [
        {"name": "one", "shm_bytes": 0, "store_bytes": store["high_water"]},
        {"name": "two", "shm_bytes": ring["high_capacity"], "store_bytes": 0},
    ]
    assert main(common) == 0
    text = capsys.readouterr().out
    assert "store of a: limit 16.0 MiB, segment of 16.0 MiB; at most" in text
    assert "left out: b -> d (MooncakeConnector without a limit" in text
    assert "node one: at most 0 B in /dev/shm" in text
    assert main([*common, "--max-bytes", "2MiB"]) == 0
    assert "payloads refused" in capsys.readouterr().out
