"""The worked example in docs/sizing.md is what the commands print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.child import environment

from omni_fastshm.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sizing.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not beside these tests")


def test_the_worked_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```\n\$ omni-fastshm ([^\n]+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [command.split()[0] for command, _ in blocks] == ["plan", "simulate", "simulate", "simulate"]
    for command, shown in blocks:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == shown, command


def test_a_trace_of_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    use = """
import numpy as np
with omni_fastshm.SharedMemoryConnector() as connector:
    for request in range(5):
        connector.put(0, 1, request, np.arange(20_000))
trace.close()
"""
    command = [sys.executable, "-W", "error", "-c", snippet + use]
    subprocess.run(command, cwd=tmp_path, env=environment(), timeout=150, check=True)
    trace = str(tmp_path / "arrivals.jsonl")
    assert main(["simulate", str(ROOT / "examples" / "qwen2_5_omni.yaml"), "--trace", trace]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  1   5     0       -             0$", out, re.MULTILINE), out
    assert "left out: 1 -> 2 (too small: inside the metadata)" in out


def test_the_numbers_in_the_text() -> None:
    text = PAGE.read_text()
    plan, simulated = text.split("## What happens with less")
    row = next(line for line in plan.splitlines() if line.startswith("0 -> 1"))
    mean, places, memory = re.findall(r"(\S+)\s+(\d+)\s+(\S+) MiB$", row)[0]
    assert f"= {mean} payloads are under way" in plan
    assert f"finds {places} or more" in plan
    assert f"are {memory} MiB" in plan
    waited = [float(share) for share in re.findall(r"\((\d+\.\d+)%\)", simulated)]
    assert 35 < waited[0] < 45, "four puts out of ten"
    assert round(4 / 0.220) == 18
    refused = [int(count) for count in re.findall(r"^(\d+) payloads refused", simulated, re.MULTILINE)]
    assert len(refused) == 1
    assert refused[0] > 100
