"""Builds a model's verifier with spin and gcc, searches its whole state space, explains what it finds.

``python tests/model/check.py`` searches all cases (``--slow``: the large ones too), with a name only that one; with
``--list`` it shows the names. ``--weaken N`` searches with weakening N. What is found is told step by step, as short as
it can be.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

from model.catalogue import CASES, LIMITS, WEAKENINGS, Case, Weakening  # noqa: E402

TOOLS = ("spin", "gcc")
MEMORY_MB = 1500
DEPTH = 10_000  # steps of one run; the longest takes a few hundred


@dataclass
class Outcome:
    """What a search found.

    Attributes:
        fault: what was violated, None if nothing was.
        complete: every state that can be reached was looked at.
        states: how many those were.
        depth: steps of the longest run.
        seconds: building and searching.
        story: the steps that lead to the fault, or what the verifier said if it could not finish.
    """

    fault: str | None
    complete: bool
    states: int
    depth: int
    seconds: float
    story: str


def missing() -> list[str]:
    """Which of the programs needed are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def weakened(weakening: Weakening) -> str:
    """The model's text with one thing in it made weaker."""
    text = (HERE / weakening.case.model).read_text()
    for old, new in weakening.changes:
        if text.count(old) != 1:
            raise ValueError(f"{weakening.case.model}: occurs {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    return text


def search(
    case: Case,
    folder: Path,
    *,
    text: str | None = None,
    cycles: bool = False,
    shortest: bool = False,
    seconds: float = 150.0,
) -> Outcome:
    """Search the state space of `case`.

    Args:
        case: the model and its sizes.
        folder: an empty one, for what is built.
        text: the model, if not as it stands in the file.
        cycles: look for runs that never end instead of wrong and stuck ones; any cycle is one.
        shortest: breadth first, for a short counterexample; takes more memory.
        seconds: the search may not take longer.
    """
    start = time.monotonic()
    (folder / "model.pml").write_text((HERE / case.model).read_text() if text is None else text)
    defines = [f"-D{setting}" for setting in case.settings.split()]
    made = _call(["spin", "-a", *defines, "model.pml"], folder, 60)
    if "Error" in made or not (folder / "pan.c").exists():
        raise ValueError(f"{case.name}: spin refuses the model\n{made}")
    kind = ["-DNP"] if cycles else ["-DSAFETY", *(["-DBFS"] if shortest else [])]
    # What is gained by optimizing is less than it costs where the search ends soon.
    large = text is None and case.states > 600_000
    flags = ["-O1" if large else "-O0", "-w", *kind, f"-DMEMLIM={MEMORY_MB}", *(["-DCOLLAPSE"] if case.slow else [])]
    made = _call(["gcc", *flags, "-o", "pan", "pan.c"], folder, 150)
    if not (folder / "pan").exists():
        raise ValueError(f"{case.name}: the verifier does not compile\n{made}")
    said = _call(["./pan", f"-m{DEPTH}", "-w20", *(["-l"] if cycles else [])], folder, seconds)
    return _judge(said, folder, defines, time.monotonic() - start)


def _call(command: list[str], folder: Path, seconds: float) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} was stopped after {seconds:g} s\n"
    return done.stdout


def _judge(said: str, folder: Path, defines: list[str], seconds: float) -> Outcome:
    fault = re.search(r"^pan:\d+: (.*) \(at depth", said, re.MULTILINE)
    errors = re.search(r"errors: (\d+)", said)
    complete = (
        errors is not None
        and errors[1] == "0"
        and "Full statespace search for:" in said
        and not re.search(r"Search not completed|max search depth too small|[Mm]emory limit|out of memory|error:", said)
    )
    states = re.search(r"(\d+) states, stored", said)
    depth = re.search(r"depth reached (\d+)", said)
    story = _call(["spin", "-t", "-T", "-B", *defines, "model.pml"], folder, 30) if fault else "" if complete else said
    return Outcome(
        None if fault is None else " ".join(fault[1].split()),
        complete,
        int(states[1]) if states else 0,
        int(depth[1]) if depth else 0,
        seconds,
        story,
    )


def _report(name: str, outcome: Outcome) -> None:
    verdict = outcome.fault or ("complete" if outcome.complete else "NOT COMPLETE")
    print(
        f"{name:44} {outcome.states:>9} states {outcome.depth:>4} deep {outcome.seconds:6.1f} s  {verdict}", flush=True
    )
    if outcome.story:
        print(outcome.story)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case", nargs="?", help="only this one")
    parser.add_argument("--slow", action="store_true", help="also the large ones")
    parser.add_argument("--weaken", type=int, metavar="N", help="with this weakening; without a number there is a list")
    parser.add_argument("--list", action="store_true", help="names of the cases, numbers of the weakenings")
    arguments = parser.parse_args()
    if absent := missing():
        parser.error(f"please install {' and '.join(absent)}")
    known = WEAKENINGS + LIMITS
    if arguments.list:
        print(*(f"{case.name:44} {case.what}" for case in CASES), sep="\n")
        print(*(f"{number:3} {each.case.name:20} {each.what}" for number, each in enumerate(known)), sep="\n")
        return 0
    if arguments.case and arguments.case not in [case.name for case in CASES]:
        parser.error(f"no case is named {arguments.case!r}: --list shows them")
    bad = 0
    if arguments.weaken is not None:
        weakening = known[arguments.weaken]
        with tempfile.TemporaryDirectory() as folder:
            _report(weakening.what, search(weakening.case, Path(folder), text=weakened(weakening), shortest=True))
        return 0
    for case in CASES:
        if (case.name == arguments.case) if arguments.case else (arguments.slow or not case.slow):
            with tempfile.TemporaryDirectory() as folder:
                outcome = search(case, Path(folder), cycles=case.cycles, shortest=bool(arguments.case), seconds=1800)
            _report(case.name, outcome)
            bad += not outcome.complete
    return bad


if __name__ == "__main__":
    sys.exit(main())
