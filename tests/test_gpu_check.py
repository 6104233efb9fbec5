"""`bench/gpu_check.py` runs, and says clearly where it cannot."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.child import environment

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu_check.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the benches are not beside these tests")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)


def test_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    done = run()
    assert done.returncode == 3
    assert "Nothing was measured" in done.stderr
    assert not done.stdout


def test_what_it_takes_along(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.pack(tmp_path) > 100
    # Without the environment's own packages: these alone.
    code = f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p] + [{str(tmp_path)!r}]\n"
    code += "import Cython, msgspec, posix_ipc, pytest, setuptools, yaml; print(msgspec.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_with_a_stand_in(tmp_path: Path) -> None:
    """Every step but CUDA's own calls, so that the script does not run for the first time where a GPU is."""
    file = tmp_path / "figures.json"
    done = run("--stand-in", "--no-tests", "--seconds", "0.01", "--up-to", "1 MiB", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "the figures mean nothing" in done.stdout
    assert "reached" not in done.stdout
    figures = json.loads(file.read_text())
    assert list(figures["sizes"]) == list(figures["pipe"]) == ["64 KiB", "1 MiB"]
