"""The short form of the fuzzing: each target for a moment, and proof that each kind of fault would be found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import native
from fuzz.runner import Batch
from support.child import environment

BOTH: tuple[str, ...] = ("read", "MetadataError")
TARGETS = dict.fromkeys(("frame", "lease", "race", "metadata", "control", "scribble", "names"), BOTH)
TARGETS["directory"] = ("read",)
SECONDS = 10


def fuzz(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``python -m fuzz``. In a process of its own: it forks, and must not have threads then."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def short_run() -> tuple[int, str]:
    targets = [word for name in TARGETS for word in ("--target", name)]
    return fuzz("--inputs", "30000", "--seconds", str(SECONDS), "--seed", "20240229", *targets)


def test_nothing_goes_wrong(short_run: tuple[int, str]) -> None:
    code, output = short_run
    assert code == 0, output
    assert " 0 findings" in output.splitlines()[-1]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_reaches_behind_the_first_check(short_run: tuple[int, str], target: str) -> None:
    """Inputs that are all refused at the door, or all harmless, would test nothing."""
    line = next(line for line in short_run[1].splitlines() if line.strip().startswith(f"{target}:"))
    answers = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)(?=,|$)", line.partition(";")[2])}
    assert all(answers.get(name) for name in TARGETS[target]), line


def test_each_kind_of_fault_is_found() -> None:
    expected = {
        "crash": "died: SIGSEGV",
        "bus": "died: SIGBUS",
        "hang": "no answer for 2 s",
        "flood": "took more than 64 MiB",
        "vast": "raised MemoryError",
        "foreign": "raised ValueError",
        "lookalike": "raised _Lookalike",
    }
    targets = [word for name in (*expected, "ours") for word in ("--target", f"trap-{name}")]
    code, output = fuzz("--inputs", "160", "--seconds", "60", "--hang", "2", *targets)
    assert code == 1, output
    for name, what in expected.items():
        again = f"--target trap-{name} --seed 1 --first 7 --inputs 1"
        assert f"FOUND 1 times: {what}: again by: python -m fuzz {again}" in output
    assert output.count("FOUND") == len(expected), "what is one of our errors was taken for a fault"
    assert re.search(r"trap-crash: 20 inputs", output), "it did not go on after a crash"


def test_nothing_is_left_on_the_mount(short_run: tuple[int, str]) -> None:
    assert not [
        name for name in os.listdir("/dev/shm") if re.match(r"omnifs\.\d+\.fuzz-\d+", name) and not owner_lives(name)
    ]


def owner_lives(name: str) -> bool:
    """Is the fuzzer that has this namespace still running (beside this test)?"""
    found = re.search(r"\.fuzz-(\d+)", name)
    return found is not None and Path(f"/proc/{found[1]}").exists()


@pytest.mark.parametrize("libfuzzer", [True, False], ids=["libfuzzer", "seeded"])
def test_the_core(libfuzzer: bool, tmp_path: Path) -> None:
    if libfuzzer and not native.has_libfuzzer():
        pytest.skip(native.MISSING)
    program = native.build(tmp_path, libfuzzer=libfuzzer)
    outcome = native.run(program, tmp_path, Batch("core", 1, 0, 20_000), 3)
    assert not outcome.findings, str(outcome.findings[0])
    assert outcome.done > len(native.kept())


def test_the_core_without_one_check_is_found(tmp_path: Path) -> None:
    """A number from shared memory that is believed must be a crash, else the harness looks at nothing."""
    src = tmp_path / "src"
    shutil.copytree(native.SRC, src, ignore=shutil.ignore_patterns("*.pyx", "*.pxd", "*.md"))
    text = (src / "ofs_block.c").read_text()
    check = "return ready < OFS_BLOCK_LIMIT ? ready : OFS_BLOCK_LIMIT;"
    assert check in text
    (src / "ofs_block.c").write_text(text.replace(check, "return ready;"))
    outcome = native.run(native.build(tmp_path, libfuzzer=False, src=src), tmp_path, Batch("core", 1, 0, 20_000), 10)
    assert outcome.findings
    assert "AddressSanitizer" in outcome.findings[0].text
