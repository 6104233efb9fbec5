"""Builds the wheel for several Pythons and runs the quick tests on several releases of NumPy and torch.

    python tools/matrix.py                              every Python 3.10 to 3.13 on the PATH; oldest and newest NumPy
    python tools/matrix.py --python /opt/py/bin/python3.12 --numpy 1.26.4 --numpy 2.4.6
    python tools/matrix.py --torch 2.4.1 --torch 2.13.0 also with these, where there is a wheel
    python tools/matrix.py --only-torch --torch 2.4.1 --remove --pip=--no-cache-dir   5 GB of disk at a time, none after

Without --torch only what needs no torch is tested: tests/unit/test_without_torch.py and its like. With it, all tests of
the modules, of the connectors' contract, of staging and of the integrations run, and those of two processes. PyPI's
torch comes with CUDA, which it needs in order to be imported, but no GPU. Each combination has a virtual environment of
its own under build/matrix, and a line in the table at the end. The exit status is 1 when one failed; what cannot be
installed, for want of a wheel for that Python, is `absent`, with the reason, unless everything is. Needs a git
checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "matrix"
# What the caller's shell adds to the path of modules must not stand in front of the wheel.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# The oldest that there is a wheel of, and the newest.
NUMPY = {
    "3.10": ("1.26.4", "2.2.6"),
    "3.11": ("1.26.4", "2.4.6"),
    "3.12": ("1.26.4", "2.5.5"),
    "3.13": ("2.1.3", "2.5.5"),
}
BUILD = ("setuptools==84.2.1", "cython==3.3.1", "wheel")
NEEDS = ("posix_ipc>=1.1", "msgspec>=0.18.6", "PyYAML>=6.0", "pytest==9.2.0", "pytest-benchmark==5.3.1", "hypothesis")
WITHOUT_TORCH = (
    "tests/unit/test_without_torch.py",
    "tests/unit/test_settings.py",
    "tests/unit/test_metadata.py",
    "tests/unit/test_directory.py",
    "tests/unit/test_core_directory.py",
    "tests/unit/test_core_handover.py",
    "tests/unit/test_inventory.py",
    "tests/unit/test_janitor.py",
    "tests/test_import_light.py",
    "tests/test_layout.py",
)
WITH_TORCH = (
    "tests/unit",
    "tests/contract",
    "tests/staging",
    "tests/integrations",
    "tests/process/test_two_processes.py",
    "tests/process/test_pipeline.py",
    "tests/test_import_light.py",
    "tests/test_layout.py",
)
NEEDS_WITH_TORCH = ("pillow>=10", "rich>=13", "prometheus_client>=0.20", "setuptools")
INSTALL_S, TEST_S = 2400, 1800


class Row(NamedTuple):
    """One line of the table."""

    python: str
    numpy: str
    torch: str
    result: str


def run(command: Sequence[str | Path], log: Path, cwd: Path = ROOT, limit: float = 900) -> bool:
    """Run a command with its output in a file."""
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        try:
            done = subprocess.run(
                command, cwd=cwd, env=ENVIRONMENT, stdout=file, stderr=file, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"ran past {limit:g} s", file=file)
            return False
    return done.returncode == 0


def version_of(interpreter: str) -> str | None:
    """ "3.12" where this runs and is one."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """Interpreters by version: those given, else what the PATH has."""
    found = {}
    for candidate in given or [path for name in PYTHONS if (path := shutil.which(f"python{name}"))]:
        version = version_of(candidate)
        if version in PYTHONS:
            found[version] = candidate
        else:
            print(f"{candidate}: left out, it is {version or 'no interpreter that runs'}")
    return found


def pip(folder: Path, log: Path, *words: str) -> bool:
    command = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    return run(command, log, limit=INSTALL_S)


def build(version: str, interpreter: str, log: Path) -> Path | None:
    """The wheel for one Python, made from a copy of what git tracks: a checkout's own build must not get in."""
    folder, copy = WORK / version / "build", WORK / version / "source"
    shutil.rmtree(WORK / version, ignore_errors=True)
    copy.mkdir(parents=True)
    names = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    )
    for name in filter(None, names):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    made = run([interpreter, "-m", "venv", folder], log) and pip(folder, log, *BUILD)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(copy / "dist")]
    made = made and run([folder / "bin/python", "-m", "pip", "wheel", *options, copy], log)
    return next((copy / "dist").glob("*.whl"), None) if made else None


def test(
    version: str, interpreter: str, wheel: Path, numpy: str, torch: str | None, options: argparse.Namespace
) -> Row:
    """One combination."""
    name = f"numpy-{numpy}" + (f"-torch-{torch}" if torch else "")
    folder, log = WORK / version / name, WORK / f"{version}-{name}.log"
    log.write_text("")
    try:
        return tried(version, interpreter, wheel, folder, log, Row(version, numpy, torch or "-", ""), options)
    finally:
        if options.remove:
            shutil.rmtree(folder, ignore_errors=True)


def tried(
    version: str, interpreter: str, wheel: Path, folder: Path, log: Path, row: Row, options: argparse.Namespace
) -> Row:
    """The row with its result: what `test` keeps in order around."""
    torch = row.torch != "-"
    packages = [f"numpy=={row.numpy}", *NEEDS, *((f"torch=={row.torch}", *NEEDS_WITH_TORCH) if torch else ())]
    if not run([interpreter, "-m", "venv", folder], log):
        return row._replace(result=f"failed: no virtual environment, {log}")
    if not pip(folder, log, *options.pip, "--only-binary", "numpy,torch", *packages):
        reason = [line for line in log.read_text().splitlines() if line.startswith("ERROR: ")]
        return row._replace(result=f"absent: {reason[-1].removeprefix('ERROR: ')}" if reason else f"failed: {log}")
    if not pip(folder, log, "--no-deps", str(wheel)):
        return row._replace(result=f"failed: the wheel cannot be installed, {log}")
    source = WORK / version / "source"
    shutil.rmtree(source / "omni_fastshm", ignore_errors=True)  # the wheel is tested, not the sources beside the tests
    started = time.monotonic()
    tests = options.tests or (WITH_TORCH if torch else WITHOUT_TORCH)
    passed = run([folder / "bin/python", "-m", "pytest", "-q", "--maxfail=50", *tests], log, cwd=source, limit=TEST_S)
    summary = log.read_text().strip().splitlines()[-1].strip("= ")
    return row._replace(
        result=f"{'ok' if passed else 'failed'}: {summary} ({time.monotonic() - started:.0f} s), {log.name}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Test the wheel on several Pythons and releases of NumPy and torch.")
    parser.add_argument(
        "--python", action="append", default=[], help="an interpreter; default: python3.10 … on the PATH"
    )
    parser.add_argument("--numpy", action="append", default=[], help="a release; default: the oldest and the newest")
    parser.add_argument("--torch", action="append", default=[], help="a release to test with, too; default: none")
    parser.add_argument("--only-torch", action="store_true", help="leave out the runs without torch")
    parser.add_argument("--pip", action="append", default=[], help="one more word for pip, as in --pip=--no-cache-dir")
    parser.add_argument("--remove", action="store_true", help="remove each virtual environment after its tests")
    parser.add_argument("--tests", action="append", default=[], help="run these of tests/ in place of the usual ones")
    options = parser.parse_args(words)
    torches = [*([] if options.only_torch else [None]), *options.torch]
    if not torches:
        parser.error("--only-torch needs a --torch")
    rows = []
    for version, interpreter in interpreters(options.python).items():
        log = WORK / f"build-{version}.log"
        WORK.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        wheel = build(version, interpreter, log)
        if wheel is None:
            rows.append(Row(version, "-", "-", f"failed: the wheel cannot be built, {log}"))
            continue
        for numpy in options.numpy or NUMPY[version]:
            for torch in torches:
                rows.append(test(version, interpreter, wheel, numpy, torch, options))
                print("  ".join(rows[-1]), flush=True)
    print("\nPYTHON  NUMPY   TORCH   RESULT")
    for row in rows:
        print(f"{row.python:7} {row.numpy:7} {row.torch:7} {row.result}")
    wrong = [row for row in rows if not row.result.startswith(("ok", "absent"))]
    return 1 if wrong or not any(row.result.startswith("ok") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
