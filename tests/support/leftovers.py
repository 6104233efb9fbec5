"""What a test may leave behind: names in shared memory, descriptors, processes, threads."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from multiprocessing import resource_tracker
from pathlib import Path

MOUNT = Path("/dev/shm")


def names(namespace: str) -> list[str]:
    """Names on the shared memory mount that belong to `namespace`, of whatever user, sorted."""
    own = re.compile(rf"omnifs\.\d+\.{re.escape(namespace)}(\..*)?", re.DOTALL)
    return sorted(name for name in os.listdir(MOUNT) if own.fullmatch(name))


def data_names(namespace: str) -> list[str]:
    """The data segments among them (``<prefix>.<endpoint>.d<k>``)."""
    return [n for n in names(namespace) if n.rsplit(".", 1)[-1].startswith("d") and not n.endswith(".dir")]


def remove(namespace: str) -> None:
    """Remove whatever is left, so that one failing test does not fill the mount for the next."""
    for name in names(namespace):
        path = MOUNT / name
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def child_processes() -> set[int]:
    """Children of this process, also those that ended and were not waited for."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    # multiprocessing starts one tracker and keeps it until the interpreter ends.
    found.discard(getattr(resource_tracker._resource_tracker, "_pid", None) or 0)
    return found


class Snapshot:
    """The state before a test; `difference` says in words what is more now."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.descriptors = descriptors()
        self.children = child_processes()
        self.threads = set(threading.enumerate())

    def difference(self) -> list[str]:
        left = [f"  /dev/shm/{name}" for name in names(self.namespace)]
        now = descriptors()
        # One more descriptor under the same number is as much a leak as one under a new number.
        if len(now) > len(self.descriptors):
            new = {n: t for n, t in now.items() if self.descriptors.get(n) != t}
            left += [f"  descriptor {number} -> {target}" for number, target in new.items()]
        left += [f"  child process {pid}" for pid in child_processes() - self.children]
        left += [f"  thread {thread.name}" for thread in set(threading.enumerate()) - self.threads]
        return left
