"""``omni-fastshm top``: what happened between two looks, seen from outside by processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children, environment

from omni_fastshm import watching
from omni_fastshm.cli import main
from omni_fastshm.cli.top import render
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

NAMES = watching.edge_names([("thinker", "talker"), ("thinker", "encoder")])


def screen(view: watching.View) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in render(view))


def test_what_happened_between_two_looks(connect: Any, children: Children, namespace: str) -> None:
    producer, reader = children.with_connector(segment_bytes=1 << 20), connect(SharedMemoryConnector)
    put = "result = [c.put('thinker', to, i, np.arange(n))[2] for i in range(count)]"
    producer.run(put, to="talker", n=20_000, count=2)
    before = watching.look(namespace)
    metadata = producer.run(put, to="talker", n=10_000, count=3)
    producer.run(put, to="encoder", n=20_000, count=1)
    views = [reader.get("thinker", "talker", i, metadata[i]) for i in range(2)]
    now = watching.look(namespace)
    view = watching.compare(before, now, NAMES)
    (end,) = view.endpoints
    assert (end.pid, end.state, end.puts, end.puts_wait) == (producer.pid, "alive", 6, False)
    assert end.puts_per_s * view.seconds == pytest.approx(4)
    sizes = [row.total_size for row in now.rows[next(iter(now.rows))] if row.sequence > 2]
    assert end.bytes_per_s * view.seconds == pytest.approx(sum(sizes))
    assert (end.pending, end.held) == (4, 2)
    talker, encoder = sorted(end.edges, key=lambda edge: str(edge.to_stage), reverse=True)
    assert (talker.from_stage, talker.to_stage, talker.pending, talker.held) == ("thinker", "talker", 3, 2)
    assert talker.puts_per_s * view.seconds == pytest.approx(3)
    assert (encoder.to_stage, encoder.pending, encoder.puts_per_s * view.seconds) == ("encoder", 1, pytest.approx(1))
    assert [(each.pid, each.alive, each.blocks) for each in end.readers] == [(os.getpid(), True, 2)]
    (ring,) = end.rings
    assert ring.used == producer.run("result = c.health()['used_bytes']")
    assert sum(ring.cells) * ring.length / watching.CELLS == pytest.approx(ring.used)
    del views
    text = screen(view)
    assert re.search(r"^  edge thinker -> talker   ~.*/s   pending 3   held 2 ", text, re.MULTILINE)
    assert "PUTS WAIT" not in text


def test_a_put_that_waits_and_a_reader_that_died(children: Children, namespace: str) -> None:
    producer, reader = children.with_connector(max_bytes=1 << 20, put_timeout_s=30), children.with_connector()
    metadata = producer.run("md = result = c.put('a', 'b', 'r', np.zeros(120_000))[2]")
    reader.run("view = c.get('a', 'b', 'r', md)", md=metadata)
    producer.start("result = c.put('a', 'b', 'q', np.zeros(120_000))[0]")
    deadline = time.monotonic() + 20
    while not watching.look(namespace).waiting:
        assert time.monotonic() < deadline, "the waiting put is not seen"
    before = watching.look(namespace)
    view = watching.compare(before, watching.look(namespace))
    assert view.endpoints[0].puts_wait
    assert view.endpoints[0].puts_per_s == 0
    assert "PUTS WAIT FOR ROOM" in screen(view)
    assert f"readers {reader.pid} holds 1" in screen(view)
    reader.kill()
    assert producer.finish() is True, "the dead reader's block is free again"
    after = screen(watching.compare(before, watching.look(namespace)))
    assert "PUTS WAIT" not in after
    assert f"edge {view.endpoints[0].edges[0].edge} " in after, "without names the hash is shown"


def test_a_dead_producer(children: Children, namespace: str) -> None:
    producer = children.with_connector(orphan_ttl_s=100)
    producer.run("c.put('a', 'b', 'r', np.zeros(20_000))")
    before = watching.look(namespace)
    producer.kill()
    view = watching.compare(before, watching.look(namespace))
    leftovers.remove(namespace)
    assert view.endpoints[0].state == "orphaned"
    assert "orphaned" in screen(view)
    assert "keeps 1m40s" in screen(view)


def test_nothing_there(capsys: pytest.CaptureFixture[str], namespace: str) -> None:
    assert main(["top", namespace, "--once", "--interval", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"omni-fastshm top   namespace {namespace}   /dev/shm: ")
    assert lines[2].startswith("no producer")


def test_the_live_screen_needs_a_terminal(capsys: pytest.CaptureFixture[str], namespace: str) -> None:
    assert main(["top", namespace]) == 1
    assert "needs a terminal; --once and --json do not" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "x"])
def test_intervals_that_cannot_be(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", f"--interval={interval}"])
    assert "0.05 to 3600" in capsys.readouterr().err


def test_json_with_a_pipelines_names(connect: Any, namespace: str, tmp_path: Path) -> None:
    producer = connect(SharedMemoryConnector)
    producer.put(0, 1, "r", np.zeros(20_000))
    file = tmp_path / "pipeline.yaml"
    file.write_text("stage_args: [{stage_id: 0}, {stage_id: 1, engine_input_source: [0]}]\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "omni_fastshm", "top", namespace),
            *("--json", "--once", "--interval", "0.1", "--config", str(file)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["format"], found["namespace"], len(found["endpoints"])) == (1, namespace, 1)
    (edge,) = found["endpoints"][0]["edges"]
    assert (edge["from_stage"], edge["to_stage"], edge["pending"]) == ("0", "1", 1)
    assert found["endpoints"][0]["rings"][0]["used"] == producer.health()["used_bytes"]


@pytest.mark.parametrize("ends", [(0, 1), ("thinker", "talker"), ("thinker", 1)], ids=str)
def test_stages_with_ids_and_names(
    connect: Any, capsys: pytest.CaptureFixture[str], namespace: str, tmp_path: Path, ends: tuple[Any, Any]
) -> None:
    """The screen has both, whichever of them the processes use; the JSON has the ids."""
    producer = connect(SharedMemoryConnector)
    producer.put(*ends, "r", np.zeros(20_000))
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "stages: [{stage_id: 0, name: thinker}, {stage_id: 1, engine_args: {model_stage: talker}}, {stage_id: 2}]\n"
        "edges: [{from: 0, to: 1}, {from: 1, to: 2}]\n"
    )
    command = ["top", namespace, "--once", "--interval", "0.05", "--config", str(file)]
    assert main(command) == 0
    assert "  edge 0 (thinker) -> 1 (talker)   ~" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (edge,) = json.loads(capsys.readouterr().out)["endpoints"][0]["edges"]
    assert (edge["from_stage"], edge["to_stage"]) == ("0", "1")


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Any]:
    """A function that runs tmux on a server of this test's own."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    socket = str(tmp_path / "tmux")

    def run(*arguments: str) -> str:
        command = ["tmux", "-S", socket, "-f", "/dev/null", *arguments]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150).stdout

    yield run
    run("kill-server")


def test_the_live_screen_in_a_terminal(children: Children, namespace: str, tmux: Any) -> None:
    pytest.importorskip("rich", reason="the live view needs rich")
    producer, reader = children.with_connector(segment_bytes=1 << 20), children.with_connector()
    metadata = producer.run("result = c.put('thinker', 'talker', 'r', np.zeros(20_000))[2]")
    command = f"{sys.executable} -m omni_fastshm top {namespace} --interval 0.1; echo ended with $?; cat"
    tmux("new-session", "-d", "-s", "top", "-x", "120", "-y", "30", command)

    def shows(pattern: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = tmux("capture-pane", "-p", "-t", "top")
            if re.search(pattern, found, re.MULTILINE):
                return
        raise AssertionError(f"the screen never showed {pattern}; it shows\n{found}")

    shows(r"pending 1, oldest ")
    shows(rf"^{namespace} [0-9a-f]{{16}}  pid {producer.pid}  alive ")  # each on its own: a screen is drawn bit by bit
    shows(r"^  d0  \|█.* *\|  17%  156\.\d KiB of 937\.\d KiB$")
    shows("no reader yet")
    reader.run("view = c.get('thinker', 'talker', 'r', md)", md=metadata)
    shows(rf"^  readers {reader.pid} holds 1$")
    producer.start(
        "import itertools, time\n"
        "for i in itertools.count():\n"
        "    c.put('thinker', 'talker', i, np.zeros(20_000)); c.cleanup(i); time.sleep(0.001)"
    )
    shows(r"   [1-9]\d*(\.\d)? puts/s  [1-9]\d*\.\d [KMG]iB/s")
    producer.kill()
    shows(r"orphaned|dead")
    tmux("send-keys", "-t", "top", "q")
    shows(r"^ended with 0")
    reader.run("del view")
    leftovers.remove(namespace)
