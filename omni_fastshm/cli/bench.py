"""``omni-fastshm bench``: measure this library beside its peers, and turn the figures into tables and images.

The measurements themselves stand in the project's bench/, which is not part of the installed package: this command
finds a checkout and runs them there.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from omni_fastshm.errors import FastShmError

__all__ = ["add_arguments", "main"]

_NOTE = """examples, from a checkout of the project with `pip install '.[bench]'`:
  omni-fastshm bench --json out/bench.json             everything: six to ten minutes on an idle machine
  omni-fastshm bench --loads S1,S4 --peers ours,zmq_ipc,memcpy --seconds 0.5
  omni-fastshm bench --render out/bench.json --out out  the page with its images, from figures that are there

With --loads or --peers only latency and throughput are measured. docs/benchmarks.md says what the figures show, and
what they do not. The exit status is that of the measurements: 0 when all of them worked.
"""
# The figures are about this library as it is installed: the checkout must not come before it on the path.
_PYTEST = "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
_SAME_PROCESS_S = 0.6  # for each load and peer; those between two processes have --seconds
_BY_PEER = ("bench/test_same_process.py", "bench/test_two_process.py", "bench/test_streaming.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--loads", metavar="S1,…", help="which payloads, of S1 to S8 (all)")
    parser.add_argument("--peers", metavar="NAME,…", help="which peers, as the files in bench/peers/ (all installed)")
    parser.add_argument("--seconds", metavar="S", type=_seconds, help="time for each load and peer (1.5)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep all figures there")
    parser.add_argument("--render", metavar="FILE", type=Path, help="measure nothing: show the figures of this file")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write benchmarks.md and img/*.png there as well")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from above 0 to 600")
    return seconds


def main(arguments: argparse.Namespace) -> int:
    """Measure, or read what was measured, and print the tables.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0, or the status of the measurements or of the report, whichever failed first.

    Raises:
        FastShmError: there is no checkout, no such file of figures, or a package is missing.
    """
    root = _checkout()
    if arguments.out is not None:
        _need("matplotlib")
    if arguments.render is not None:
        if not arguments.render.is_file():
            raise FastShmError(f"bench --render: there is no file {arguments.render}")
        return _report(root, arguments.render, arguments.out)
    _need("pytest", "pytest_benchmark")
    with tempfile.TemporaryDirectory() as folder:
        figures = arguments.json or Path(folder) / "bench.json"
        figures.parent.mkdir(parents=True, exist_ok=True)
        status = subprocess.run([*_measure(arguments), f"--benchmark-json={figures.absolute()}"], cwd=root).returncode
        return status or _report(root, figures, arguments.out)


def _checkout() -> Path:
    """The project's folder: the one we are in, or the one that this package stands in."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (folder / "bench" / "report.py").is_file() and (folder / "src" / "_core.pyx").is_file():
            return folder
    raise FastShmError(
        "bench: the measurements are not part of the installed package: run this in the folder of a checkout of the "
        "project, the one with bench/ in it"
    )


def _need(*packages: str) -> None:
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        raise FastShmError(f"bench needs {', '.join(missing)}: pip install '.[bench]' in the project's folder")


def _measure(arguments: argparse.Namespace) -> list[str]:
    """The command line of the measurements, but for where the figures go."""
    columns = "--benchmark-columns=median,iqr,rounds"
    command = [sys.executable, "-c", _PYTEST, "-q", columns, f"--benchmark-max-time={_SAME_PROCESS_S}"]
    if arguments.seconds is not None:
        command.append(f"--bench-seconds={arguments.seconds}")
    for option, value in (("--bench-loads", arguments.loads), ("--bench-peers", arguments.peers)):
        if value is not None:
            command.append(f"{option}={value}")
    narrowed = arguments.loads is not None or arguments.peers is not None
    return [*command, *(_BY_PEER if narrowed else ("bench",))]


def _report(root: Path, figures: Path, out: Path | None) -> int:
    command = [sys.executable, "-m", "bench.report", str(figures.absolute())]
    if out is not None:
        command += ["--out", str(out.absolute())]
    return subprocess.run(command, cwd=root).returncode
