"""The keys that one connector has put and that are perhaps still unread: hashes in shared memory do not tell them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["SentKeys"]

_ENOUGH = 1024  # so many are kept without asking whether they are still unread
_MOST = 131072  # a producer cannot have more payloads unread


class SentKeys:
    """Bounded by what is unread: whenever it has doubled, the ones that were read go.

    Args:
        unread: is there still a payload under this key?
    """

    def __init__(self, unread: Callable[[str], bool]) -> None:
        self._unread = unread
        self._keys: dict[str, float] = {}  # when it was put
        self._limit = _ENOUGH
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str) -> None:
        self._keys[key] = time.monotonic()
        if len(self._keys) > self._limit:
            self.reap(self._limit)
            for old in list(self._keys)[:-_MOST]:
                self._keys.pop(old, None)
            self._limit = max(2 * len(self._keys), _ENOUGH)

    def discard(self, key: str) -> None:
        self._keys.pop(key, None)

    def reap(self, at_most: int) -> None:
        """Forget those of the oldest `at_most` keys that were read."""
        if not self._keys or not self._lock.acquire(blocking=False):  # somebody else is at it
            return
        try:
            for key in list(self._keys)[:at_most]:
                put_at = self._keys.pop(key, None)
                if put_at is not None and self._unread(key):
                    self._keys.setdefault(key, put_at)  # behind all others: the next call looks at those
        finally:
            self._lock.release()

    def older_than(self, seconds: float) -> list[str]:
        """Those that were put at least so long ago."""
        until = time.monotonic() - seconds
        return [key for key, put_at in list(self._keys.items()) if put_at <= until]

    def numbered(self, prefix: str) -> list[str]:
        """Those that are `prefix` and a number, and nothing else."""
        end = len(prefix)
        return [
            key
            for key in list(self._keys)
            if key.startswith(prefix) and (rest := key[end:]).isascii() and rest.isdigit()
        ]
