"""Counted, not timed: what a message through the ring costs once everything is warm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import steady_messages
from support.child import environment

CALL = re.compile(r"^(\d+)\s+(\w+)\((.*)")
# A producer looks whether one of its own names is still there, at most once in 100 µs: docs/decisions/0006.
LOOKS = ("fstat", "newfstatat")
WITHIN_S = 330.0

pytestmark = pytest.mark.time_limit(WITHIN_S + 20)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Messages, page faults of producer and consumer, and system calls by name."""
    trace = tmp_path_factory.mktemp("steady") / "trace"
    tracer = ["strace", "-f", "-qq", "-o", str(trace)]
    may = shutil.which("strace") and subprocess.run([*tracer, "true"], capture_output=True).returncode == 0
    if not may:
        reason = "system calls were not counted: strace is not installed here or may not trace"
        if os.environ.get("OMNI_FASTSHM_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        [*tracer, sys.executable, steady_messages.__file__, f"steady-{os.getpid()}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout), "calls": calls_between_marks(trace)}


def calls_between_marks(trace: Path) -> Counter[str]:
    """System calls between marks, of both processes together."""
    found: Counter[str] = Counter()
    running: set[str] = set()
    begun = 0
    for pid, call, rest in (match.groups() for match in map(CALL.match, trace.read_text().splitlines()) if match):
        if f"{steady_messages.MARK}/begin" in rest:
            running.add(pid)
            begun += 1
        elif f"{steady_messages.MARK}/end" in rest:
            running.remove(pid)
        elif pid in running:
            found[call] += 1
    assert begun == 2 * sum(steady_messages.COUNTED.values()) // steady_messages.BATCH
    return found


def test_a_message_through_the_ring_makes_no_system_call(counted: dict[str, Any]) -> None:
    calls = Counter(counted["calls"])
    # getrusage counts the page faults, once in each batch of each process.
    measuring = calls.pop("getrusage")
    looks = sum(calls.pop(call, 0) for call in LOOKS)

    assert measuring == 4 * counted["messages"] // steady_messages.BATCH
    assert looks <= counted["messages"]
    assert not calls


def test_a_message_through_the_ring_takes_no_page_fault(counted: dict[str, Any]) -> None:
    # A fault or two in a thousand messages are the process's own: its heap grew, the kernel looked at a page.
    assert sum(counted["faults"]) <= counted["messages"] // 100
