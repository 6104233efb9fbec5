"""``omni-fastshm bench``: a thin command over bench/; the measurements are tested by running them once in CI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.child import environment

from omni_fastshm.cli import bench, main

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "bench" / "results" / "2-core-vm.json"

checkout = pytest.mark.skipif(not FIGURES.is_file(), reason="bench/ is not beside these tests")


@checkout
def test_shows_the_figures_of_a_file(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)

    assert main(["bench", "--render", str(FIGURES)]) == 0

    shown = capfd.readouterr().out
    assert "### Goals" in shown
    assert json.loads(FIGURES.read_text())["machine"]["cpu"] in shown


@checkout
def test_the_document_shows_the_kept_figures() -> None:
    command = [sys.executable, "-m", "bench.report", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=150)

    assert done.returncode == 0, done.stderr


def test_without_a_checkout_it_says_where_to_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site" / "omni_fastshm" / "cli" / "bench.py"))

    assert main(["bench"]) == 1

    assert "run this in the folder of a checkout" in capsys.readouterr().err


@checkout
def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    assert main(["bench", "--render", "no/such.json"]) == 1

    assert "there is no file no/such.json" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "many", "601"])
def test_seconds_out_of_range(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", f"--seconds={seconds}"])

    assert stopped.value.code == 2
    assert "is no number of seconds" in capsys.readouterr().err
