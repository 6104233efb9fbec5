"""The keys that one connector has put and that are perhaps still unread: hashes in shared memory do not tell them."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["SentKeys"]

_ENOUGH = 1024  # so many are kept without asking whether they are still unread


class SentKeys:
    """Bounded by what is unread: whenever it has doubled, the ones that were read go.

    Args:
        unread: is there still a payload under this key?
    """

    def __init__(self, unread: Callable[[str], bool]) -> None:
        self._unread = unread
        self._keys: dict[str, None] = {}
        self._limit = _ENOUGH
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str) -> None:
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self.reap(self._limit)
            self._limit = max(2 * len(self._keys), _ENOUGH)

    def discard(self, key: str) -> None:
        self._keys.pop(key, None)

    def reap(self, at_most: int) -> None:
        """Forget those of the oldest `at_most` keys that were read."""
        if not self._keys or not self._lock.acquire(blocking=False):  # somebody else is at it
            return
        try:
            for key in list(self._keys)[:at_most] if at_most < len(self._keys) else list(self._keys):
                if self._keys.pop(key, self) is None and self._unread(key):
                    self._keys[key] = None  # as the newest: the next call looks at others
        finally:
            self._lock.release()

    def numbered(self, prefix: str) -> list[str]:
        """Those that are `prefix` and a number, and nothing else."""
        end = len(prefix)
        return [
            key
            for key in list(self._keys)
            if key.startswith(prefix) and (rest := key[end:]).isascii() and rest.isdigit()
        ]
