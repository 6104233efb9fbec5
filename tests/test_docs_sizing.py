"""The worked example in docs/sizing.md is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

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
