"""Every example runs, checks itself, and notices when its guard is taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from support.child import environment

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())


def run(name: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"omnifs.{os.getuid()}.")}


def test_the_examples_are_there() -> None:
    assert {"hello.py", "two_stages.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_checks_itself_and_says_ok(name: str, tmp_path: Path, namespace: str) -> None:
    done = run(name, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
    assert not done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_without_its_guard_fails(name: str, tmp_path: Path) -> None:
    assert "--break" in (EXAMPLES / name).read_text()

    done = run(name, "--break", folder=tmp_path)

    assert done.returncode == 1
    assert "ok" not in done.stdout.splitlines()


def test_the_input_files_are_what_their_script_makes(tmp_path: Path) -> None:
    from PIL import Image

    inputs = EXAMPLES / "inputs"
    subprocess.run([sys.executable, str(inputs / "make_inputs.py"), str(tmp_path)], check=True, timeout=50)

    assert (tmp_path / "prompt.txt").read_bytes() == (inputs / "prompt.txt").read_bytes()
    # Not the files' bytes: they depend on the release of zlib.
    with Image.open(tmp_path / "picture.png") as made, Image.open(inputs / "picture.png") as kept:
        assert made.size == kept.size
        assert made.tobytes() == kept.tobytes()
    with wave.open(str(tmp_path / "sound.wav")) as made_sound, wave.open(str(inputs / "sound.wav")) as sound:
        assert made_sound.getparams() == sound.getparams()
        count = sound.getnframes()
        a, b = (np.frombuffer(s.readframes(count), "<i2").astype(int) for s in (made_sound, sound))
    # The last bit of a sine may differ between C libraries.
    assert np.abs(a - b).max() <= 1
    assert sum(path.stat().st_size for path in inputs.iterdir() if path.is_file()) < 300_000
