"""How much shared memory is in use."""

from __future__ import annotations

import contextlib
import os
import time

from support import leftovers

EVERY_NS = 200_000_000


class Mount:
    """The shm mount as far as one namespace goes, looked at every now and then."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._next = 0
        self._before = self._used()
        self.names_max = 0
        self.used_max = 0

    @staticmethod
    def _used() -> int:
        found = os.statvfs(leftovers.MOUNT)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def due(self, now_ns: int) -> bool:
        return now_ns >= self._next

    def look(self) -> tuple[int, int]:
        """Bytes behind the namespace's names, and by how many the whole mount has grown, which others may use too."""
        self._next = time.monotonic_ns() + EVERY_NS
        used = 0
        for name in leftovers.names(self._namespace):
            with contextlib.suppress(OSError):
                used += os.stat(leftovers.MOUNT / name).st_blocks * 512
        self.names_max = max(self.names_max, used)
        grown = self.grown()
        self.used_max = max(self.used_max, grown)
        return used, grown

    def grown(self) -> int:
        """Bytes of the whole mount, also those without a name, on top of what there was at the beginning."""
        return self._used() - self._before
