"""`python -m torture`, with tests/ on the path: what shared memory must survive, at the size that is asked for."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Processes are forked: no threads of NumPy's before that.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

from support import leftovers  # noqa: E402
from support.child import environment  # noqa: E402
from torture import kills, messages, pressure  # noqa: E402

OWN_MOUNT = "OMNI_FASTSHM_TORTURE_OWN_MOUNT"
MOUNTED = 'mount -t tmpfs -o size=8g none /dev/shm && exec "$@"'


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What is asked for; a part with 0 is left out."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="processes to kill at random moments")
    parser.add_argument("--messages", type=int, default=1_000_000, help="payloads of random sizes through the ring")
    parser.add_argument("--waits", type=int, default=100, help="readers that die with all that a waiting put needs")
    parser.add_argument("--fuzz", type=int, default=100_000, help="inputs of bad bytes")
    parser.add_argument("--seconds", type=float, default=7200.0, help="limit for kills and for fuzz, each")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; printed")
    parser.add_argument("--json", type=Path, help="where to write all figures, besides the last line")
    parser.add_argument("--own-mount", action="store_true", help="on a mount of its own, for exact memory (needs root)")
    return parser.parse_args(given)


def main() -> int:
    """Run the parts that are asked for; 0 when nothing went wrong."""
    asked = arguments()
    if asked.own_mount and OWN_MOUNT not in os.environ:
        again = [sys.executable, "-m", "torture", *sys.argv[1:]]
        env = {**environment(), OWN_MOUNT: "1"}
        os.execvpe("unshare", ["unshare", "-m", "sh", "-c", MOUNTED, "sh", *again], env)
    seed = int(time.time()) if asked.seed is None else asked.seed
    namespace = f"torture{os.getpid()}"
    figures: dict[str, Any] = {"seed": seed, "machine": machine()}
    faults = 0
    parts: list[tuple[str, int, Callable[[], tuple[dict[str, Any], list[str]]]]] = [
        ("kills", asked.kills, lambda: run_kills(asked.kills, seed, asked.seconds, namespace)),
        ("messages", asked.messages, lambda: run_messages(asked.messages, seed, namespace)),
        ("pressure", asked.waits, lambda: run_pressure(asked.waits, seed, namespace)),
        ("fuzz", asked.fuzz, lambda: run_fuzz(asked.fuzz, seed, asked.seconds)),
    ]
    try:
        for name, size, part in parts:
            if size:
                print(f"{name}: {size:,}, seed {seed}", flush=True)
                figures[name], found = part()
                faults += len(found)
                for text in found:
                    print(f"FAULT in {name}, seed {seed}: {text}", flush=True)
    finally:
        leftovers.remove(namespace)
    figures["faults"] = faults
    line = json.dumps(figures)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(line)
    return 1 if faults else 0


def run_kills(count: int, seed: int, seconds: float, namespace: str) -> tuple[dict[str, Any], list[str]]:
    """Processes that die."""
    result = kills.run(
        count, seed=seed, seconds=seconds, namespace=namespace + "k", own_mount=OWN_MOUNT in os.environ, say=progress
    )
    texts = ["\n    ".join((f"{fault.kind}: {fault.text}", *fault.events)) for fault in result.faults]
    return result.summary(), texts


def run_messages(count: int, seed: int, namespace: str) -> tuple[dict[str, Any], list[str]]:
    """Payloads of all sizes."""
    result = messages.run(count, seed=seed, namespace=namespace + "m")
    return result.summary(), result.faults


def run_pressure(count: int, seed: int, namespace: str) -> tuple[dict[str, Any], list[str]]:
    """A full ring."""
    result = pressure.run(rounds=-(-count // 10), deaths=count, seed=seed, namespace=namespace + "p")
    return result.summary(), result.faults


def run_fuzz(count: int, seed: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Bad bytes: a command of its own."""
    command = [sys.executable, "-m", "fuzz", "--inputs", str(count), "--seed", str(seed), "--seconds", str(seconds)]
    start = time.monotonic()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    last = re.search(r"^(\d+) inputs, (\d+) findings", done.stdout, re.MULTILINE)
    figures = {
        "asked": count,
        "inputs": int(last[1]) if last else 0,
        "findings": int(last[2]) if last else 0,
        "seconds": round(time.monotonic() - start, 1),
    }
    good = done.returncode == 0 and last is not None
    return figures, [] if good else [done.stdout + done.stderr]


def progress(text: str) -> None:
    """A sign of life, for a person who waits."""
    print(f"  {text}", flush=True)


def machine() -> dict[str, Any]:
    """On what the figures were made."""
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_before": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
