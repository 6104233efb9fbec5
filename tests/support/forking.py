"""Steps for scripts that fork."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator


def fork(body: Callable[[], None]) -> int:
    """Run `body` in a forked child that then ends through the interpreter's normal exit; give its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(7)
    sys.exit(0)


HANGS_S = 30.0  # below what whoever runs such a script gives it


def join(pid: int, seconds: float = HANGS_S) -> None:
    """Wait for a child; it must end well within the time."""
    code = wait(pid, seconds)
    assert code == 0, f"child {pid} ended with {code}"


def wait(pid: int, seconds: float = HANGS_S) -> int:
    """Wait for a child that must end within the time; give its exit code, negative for a signal."""
    deadline = time.monotonic() + seconds
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"child {pid} hangs")
    finally:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def barrier() -> Iterator[tuple[int, int]]:
    """A pipe: children wait until its writing end is closed everywhere."""
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        for end in (read, write):
            with contextlib.suppress(OSError):
                os.close(end)
