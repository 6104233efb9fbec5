"""SIGKILL before and after each change that another process can see: the survivors go on and nothing is left."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fault_places import places

import omni_fastshm

ROOT = Path(__file__).resolve().parents[2]
SCENES = (  # in tests/support/fault_scenes.py
    "First",
    "Producer",
    "Consumer",
    "LateComer",
    "Canceller",
    "WaitsForRoom",
    "WaitsForArrival",
    "Janitor",
    "Reaper",
)
NAMES = ("name made", "mode set", "name removed")  # made by Python, not by the core
SIDES = ("before", "after")


class Stage:
    """A process that plays scenes, with a core that dies on demand."""

    def __init__(self, package: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT / "tests")])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.fault_scenes"],
            cwd=package,  # `-m` looks there first: not in this checkout
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, scene: str, place: str | None, skip: int = 0) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"scene": scene, "place": place, "skip": skip}) + "\n")
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply

    @functools.cached_property
    def reach(self) -> dict[str, list[str]]:
        """By scene: the places that its victim comes by when it does not die, in order."""
        found = {}
        for scene in SCENES:
            reply = self.play(scene, None)
            assert reply["died"] is False, f"{scene}: {reply['error']}"
            found[scene] = reply["passed"]
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The package beside this checkout's, with a core built to die."""
    package = tmp_path_factory.mktemp("faults")
    ignored = shutil.ignore_patterns("_core.*.so", "__pycache__")
    shutil.copytree(Path(omni_fastshm.__file__).parent, package / "omni_fastshm", ignore=ignored)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(package)]
    done = subprocess.run(
        [*build, "--build-temp", str(package / "build")],
        cwd=ROOT,
        env={**os.environ, "OMNI_FASTSHM_FAULTS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = Stage(package)
    yield made
    made.close()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("place", [*places(), *NAMES])
def test_survivors_go_on(stage: Stage, place: str, side: str) -> None:
    """Dies the first and the last time that it comes by, in every scene that does."""
    whole = f"{place} {side}"
    times = {scene: passed.count(whole) for scene, passed in stage.reach.items() if whole in passed}
    assert times, "no scene comes by this place: write one that does"
    for scene, count in times.items():
        for skip in {0, count - 1}:
            reply = stage.play(scene, whole, skip)
            assert not reply["error"], f"{scene}, {whole}, passed {skip} times\n{reply['error']}"
            # The number of times depends a little on timing (waits come in slices); the first is always reached.
            assert reply["died"] or skip, f"{scene} did not come by {whole} again"


def test_a_released_core_has_no_places_to_die_at() -> None:
    import omni_fastshm._core as core

    text = Path(core.__file__).read_bytes()
    assert b"OMNI_FASTSHM_FAULT" not in text
    assert b"ofs_fault" not in text
