"""``omni-fastshm doctor``: what of this machine the library depends on, and what to do where it falls short."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from omni_fastshm.cli.checks import CHECKS, Finding, run_check
from omni_fastshm.cli.text import printable, table

__all__ = ["add_arguments", "main"]

FORMAT = 1  # of the JSON; changes when a key changes its meaning or goes

_NOTE = """ok: fine. warn: works, but less well than it could. fail: shared memory cannot be used as it is.
The exit status is 1 when something fails, else 0. Nothing is changed on the machine; docs/operating.md says more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--vllm-omni",
        action="store_true",
        help="instead: which connector each name stands for in the vllm-omni that is installed here (takes 10 to 20 s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Look at everything, and print what was found.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        1 when something fails, else 0.
    """
    findings = _vllm_omni() if arguments.vllm_omni else [run_check(check) for check in CHECKS]
    worst = _worst(findings)
    if arguments.json:
        print(json.dumps({"format": FORMAT, "status": worst, "checks": [asdict(each) for each in findings]}, indent=2))
    else:
        print("\n".join(_lines(findings)))
    return 1 if worst == "fail" else 0


def _vllm_omni() -> list[Finding]:
    from omni_fastshm.integrations._vllm_check import check  # here: it looks for a host, which few have

    return [Finding(*each) for each in check()]


def _worst(findings: Sequence[Finding]) -> str:
    return max((each.status for each in findings), key=("ok", "warn", "fail").index, default="ok")


def _lines(findings: Sequence[Finding]) -> list[str]:
    rows = table([["CHECK", "", "FOUND"], *([each.name, each.status, printable(each.found)] for each in findings)])
    lines = [rows[0]]
    for row, each in zip(rows[1:], findings, strict=True):
        lines.append(row)
        if each.advice:
            lines.append(f"    {printable(each.advice)}")
    return lines
