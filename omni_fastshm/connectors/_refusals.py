"""Puts that found no room: counted by reason, and not each a warning, for whoever cannot put tries again at once."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["FULL", "MASTER_LOST", "MOUNT_FULL", "NO_INODES", "STORE", "SYSTEM", "TOO_LARGE", "Refusals"]

TOO_LARGE = "too_large"
FULL = "full"
MOUNT_FULL = "mount_full"
NO_INODES = "no_inodes"
SYSTEM = "system"
MASTER_LOST = "master_lost"
STORE = "store"

SAY_AGAIN_S = 5.0
_MOST = 1024  # edges and reasons that are told apart in the log


class Refusals:
    """What one connector could not place.

    Args:
        every_s: so often at most one and the same thing is to be logged.
    """

    def __init__(self, every_s: float = SAY_AGAIN_S) -> None:
        self.every_s = every_s
        self._lock = threading.RLock()  # a signal handler may put while the thread that it interrupts holds it
        self._counts: dict[str, int] = {}
        self._said: dict[tuple[str, ...], tuple[float, int]] = {}  # when it may be said again, and how many were not

    @property
    def by_reason(self) -> dict[str, int]:
        """How many, for each reason there was."""
        # Without the lock: a forked child may ask while a thread that it does not have holds it. A copy is one step.
        return self._counts.copy()

    def count(self, reason: str) -> None:
        """One more, which the log has no line for."""
        with self._lock:
            self._counts[reason] = self._counts.get(reason, 0) + 1

    def note(self, reason: str, *where: str) -> tuple[int, str]:
        """One more.

        Args:
            reason: why.
            where: what is told apart beside the reason, such as the edge.

        Returns:
            The level to log it at, which is DEBUG where the same was said a moment ago, and what the line has to add
            about those that were not said.
        """
        with self._lock:
            self.count(reason)
            key = (reason, *where)
            if key not in self._said and len(self._said) >= _MOST:
                key = (reason,)
            now = time.monotonic()
            again, silent = self._said.get(key, (now, 0))
            if now < again:
                self._said[key] = again, silent + 1
                return logging.DEBUG, ""
            self._said[key] = now + self.every_s, 0
        return logging.WARNING, f" ({silent} more since the last such line)" if silent else ""
