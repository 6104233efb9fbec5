"""What is counted instead of timed. These are the only figures that a test asserts: they do not depend on the
machine.

Ratios of times are recorded here, and judged by nobody but the reader of the report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import payloads, steady
from bench.conftest import PLACE
from bench.peers import load_peer

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = {"S3": 1000, "S4": 1000, "S5": 100, "S6": 30, "S7": 60, "S8": 500}
FLAT_MESSAGES = 100_000
MIB = payloads.MIB


def run(*arguments: str, trace: Path | None = None) -> Any:
    """Run `bench.steady` as a program of its own; what it printed."""
    tracer = ["strace", "-f", "-qq", "-o", str(trace)] if trace else []
    command = [*tracer, sys.executable, "-m", "bench.steady", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def strace() -> None:
    if shutil.which("strace") is None or subprocess.run(["strace", "-qq", "-o", os.devnull, "true"]).returncode:
        pytest.skip("system calls were not counted: strace is not installed here or may not trace")


def counted(tmp_path: Path, peer: str, mode: str, quick: bool) -> dict[str, dict[str, Any]]:
    """Per load: messages, system calls by name, files created, page faults of each process."""
    wanted = {load: 20 if quick else count for load, count in MESSAGES.items() if not quick or load in ("S3", "S8")}
    trace = tmp_path / "trace"
    items = [f"{load}:{steady.warm_up(load) if peer == 'ours' else 5}:{count}" for load, count in wanted.items()]
    faults = run("faults", peer, mode, f"{PLACE}-{mode}", *items, trace=trace)
    result = {}
    for load, count in wanted.items():
        calls = steady.system_calls(trace, load)
        created = calls.pop("file created", 0)
        result[load] = {
            "messages": count,
            "system_calls": dict(calls),
            "files_created": created,
            "minor_faults": faults[load],
        }
    return result


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("mode", ["same", "two"])
def test_a_message_through_the_ring_makes_no_system_call_no_file_and_no_page_fault(
    tmp_path: Path, record: dict[str, Any], quick: bool, mode: str
) -> None:
    found = counted(tmp_path, "ours", mode, quick)
    record[f"steady_{mode}"] = found
    for load, figures in found.items():
        assert figures["files_created"] == 0, (load, figures)
        # A producer looks at one of its own names (fstat), at most once in 100 µs and so at most once per message.
        looks = sum(figures["system_calls"].pop(call, 0) for call in ("fstat", "newfstatat"))
        assert looks <= figures["messages"], (load, figures)
        assert not figures["system_calls"], (load, figures)
        figures["looks_at_names"] = looks
        # A fault or two are the process's own (its heap grew, the kernel looked at a page), however few the messages.
        assert sum(figures["minor_faults"]) <= max(2, figures["messages"] // 100), (load, figures)


@pytest.mark.usefixtures("strace")
def test_the_counter_sees_what_a_segment_per_message_costs(tmp_path: Path, record: dict[str, Any], quick: bool) -> None:
    found = counted(tmp_path, "new_segment", "same", quick)
    record["steady_new_segment"] = found
    for load, figures in found.items():
        assert figures["files_created"] >= figures["messages"], (load, figures)
        assert sum(figures["system_calls"].values()) > 5 * figures["messages"], (load, figures)
        assert figures["minor_faults"][0] > figures["messages"], (load, figures)


def test_memory_stays_flat(record: dict[str, Any], quick: bool) -> None:
    count = 30_000 if quick else FLAT_MESSAGES
    moments = run("flat", "ours", f"{PLACE}-flat", "S3", str(count))
    record["flat"] = {"messages": count, "moments": moments}
    warm = moments[4:]  # by then every page of the ring was touched and every table of the library is full
    resident = [moment["resident_bytes"] for moment in warm]
    assert max(resident) - resident[0] <= MIB, moments
    assert len({moment["shm_bytes"] for moment in warm}) == 1, moments


def test_cost_of_get_by_size(record: dict[str, Any], quick: bool, pinned: int | None) -> None:
    """Records how long `get` alone takes for one tensor of 64 KiB and of 64 MiB, under equal conditions.

    Both payloads lie ready before either is taken, a third one is taken first so that both find the code
    warm, and the two take turns at going first: otherwise the copy of 64 MiB just before would be paid for by
    the get after it.
    """
    peer = load_peer("ours")
    end = peer.open(f"{PLACE}-get", "both", "S3", 1)
    small, large = payloads.make("S3"), payloads.make("S6")
    times: dict[str, list[int]] = {"small": [], "large": []}
    now = time.monotonic_ns
    try:
        for turn in range(4 if quick else 200):
            notes = {"small": peer.put(end, small), "large": peer.put(end, large)}
            peer.get(end, peer.put(end, small))
            for size in sorted(notes, reverse=bool(turn % 2)):
                note = notes[size]
                start = now()
                data = peer.get(end, note)
                times[size].append(now() - start)
                del data
    finally:
        end.close()
    median = {size: float(np.median(values)) / 1e3 for size, values in times.items()}
    record["get_cost"] = {
        "64 KiB, µs": median["small"],
        "64 MiB, µs": median["large"],
        "ratio": median["large"] / median["small"],
    }
