"""Steps for children with little room: what the mount has, what the log says, whether a payload goes through."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np

MOUNT = "/dev/shm"
lines: list[str] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno > logging.DEBUG or message.startswith("put refused"):  # which is DEBUG when it is said again
            lines.append(message)


logging.getLogger().addHandler(_Keep())
logging.getLogger("omni_fastshm").setLevel(logging.DEBUG)


def mounted(options: str) -> tuple[str, ...]:
    """A command that puts a child before a shared memory mount of its own, as containers have it."""
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none {MOUNT} && exec "$@"', "sh")


def beside(pid: int) -> tuple[str, ...]:
    """A command that puts a child before the same mount as an earlier one."""
    return ("nsenter", "-t", str(pid), "-m", "--")


def there() -> list[str]:
    return sorted(os.listdir(MOUNT))


def free() -> int:
    found = os.statvfs(MOUNT)
    return found.f_bavail * found.f_frsize


def fill(spare: int = 0) -> None:
    """Leave nothing of the mount but `spare` bytes."""
    with open(f"{MOUNT}/filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free() - spare)


def empty() -> None:
    os.unlink(f"{MOUNT}/filler")


def carries(connector: Any, nbytes: int, request: str = "r") -> bool:
    """Does a payload of that size go through, whole?"""
    want = np.arange(nbytes // 8)
    ok, _, metadata = connector.put("a", "b", request, want)
    return bool(ok and np.array_equal(connector.get("a", "b", request, metadata)[0], want))


def refused(connector: Any, nbytes: int, request: str = "r") -> tuple[str, float]:
    """What the log says of a put that must be refused, and after how many seconds the answer came."""
    data = np.ones(nbytes // 8)
    lines.clear()
    start = time.monotonic()
    answer = connector.put("a", "b", request, data)
    took = time.monotonic() - start
    assert answer == (False, 0, None), answer
    assert len(lines) == 1, lines
    assert repr(request) in lines[0], lines
    return lines[0], took
