"""How many instructions a put and a get of 4 KiB take, counted by valgrind's callgrind.

``python tests/support/instructions.py`` counts and prints; with ``--renew`` the counts become those that
`tests/test_instructions.py` compares with, for interpreters and machines of this kind.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from support import counted_messages as program  # noqa: E402
from support.child import environment  # noqa: E402

FIGURES = HERE.parent / "instructions.json"
WITHIN_S = 330.0
DUMPS_PER_PHASE = 3


def kind() -> str:
    """What the counts depend on besides our own code: figures of one kind say nothing about another."""
    features = Path("/proc/cpuinfo").read_text()
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    libc = "-".join(platform.libc_ver())
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("numpy", "msgspec", "posix_ipc")]
    parts = [
        f"{sys.implementation.name}-{platform.python_version()}",
        platform.machine() + ("+avx2" if re.search(r"\bavx2\b", features) else ""),
        platform.python_compiler(),
        libc,
        *versions,
        valgrind,
    ]
    return ", ".join(parts)


def missing() -> str | None:
    """Why nothing can be counted here."""
    return None if shutil.which("valgrind") else "valgrind is not installed"


def count() -> dict[str, int]:
    """Instructions per put and per get, each way.

    Raises:
        RuntimeError: the program failed, or callgrind did not see its marks.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        done = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                f"--dump-before={program.MARK}",
                f"--callgrind-out-file={out}",
                sys.executable,
                program.__file__,
                f"instructions-{os.getpid()}",
            ],
            env={**environment(), "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"counting failed:\n{done.stderr[-4000:]}")
        dumps = sorted(out.parent.glob("counts.*"), key=lambda path: int(path.suffix[1:]))
        totals = [int(_total(path)) for path in dumps][1:]  # the first one is what came before _core's import
    phases = [totals[index : index + DUMPS_PER_PHASE] for index in range(0, len(totals), DUMPS_PER_PHASE)]
    if len(totals) != DUMPS_PER_PHASE * 3 * len(program.WAYS):
        raise RuntimeError(f"{len(totals)} marks were seen: callgrind did not recognise {program.MARK}")
    counts = {}
    for index, way in enumerate(program.WAYS):
        _, once, twice = phases[3 * index : 3 * index + 3]
        for place, what in ((1, "put"), (2, "get")):
            counts[f"{what}, {way}"] = round((twice[place] - once[place]) / program.MESSAGES)
    return counts


def _total(dump: Path) -> str:
    found = re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{dump.name} has no totals")
    return found[1]


def kept() -> dict[str, dict[str, int]]:
    """The figures to compare with, by kind."""
    figures: dict[str, dict[str, int]] = json.loads(FIGURES.read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--renew", action="store_true", help=f"keep the counts in {FIGURES.name}")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"nothing counted: {reason}")
    here, counts = kind(), count()
    before = kept().get(here, {})
    for what, number in counts.items():
        change = f"{number / before[what] - 1:+.1%} from {before[what]}" if what in before else "no figure so far"
        print(f"{what}: {number} ({change})")
    if options.renew:
        FIGURES.write_text(json.dumps({**kept(), here: counts}, indent=1, sort_keys=True) + "\n")
        print(f"kept for: {here}")


if __name__ == "__main__":
    main()
