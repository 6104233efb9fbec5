"""What one connector has put and nobody has taken, as far as it knows, and the room that this takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from ._mooncake_keys import Item

__all__ = ["Ledger"]


class Ledger:
    """Items by nonce. `changed` is its lock, and tells of every change; it is re-entrant, because the garbage
    collector or a signal handler may close a connector while it is held.

    Args:
        limit: most bytes of untaken payloads; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        # The lock by itself: entering a Condition costs a call of Python's more.
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._items: dict[str, Item] = {}
        self._reserved = 0
        self._used = 0
        self.peak = 0  # the most that ever was in use
        self._line: deque[object] = deque()
        self._sweep_at = 64

    @property
    def used(self) -> int:
        """Bytes of what lies in the store."""
        return self._used

    @property
    def free(self) -> int:
        """Bytes that may still be put."""
        return 0 if self.limit is None else max(0, self.limit - self._used - self._reserved)

    def __len__(self) -> int:
        return len(self._items)

    def items(self, request: str | None = None) -> list[Item]:
        """All that are there, or those of one request."""
        with self.changed:
            return [item for item in self._items.values() if request is None or item.request == request]

    # -- room

    def reserve_at_once(self, size: int) -> bool:
        """Take room, if there is enough and nobody waits for some."""
        with self._lock:
            if self._line or (self.limit is not None and self._used + self._reserved + size > self.limit):
                return False
            self._reserved += size
            return True

    def queue(self) -> object:
        """A place in the line for room."""
        with self.changed:
            ticket = object()
            self._line.append(ticket)
            return ticket

    def leave(self, ticket: object) -> None:
        """The place is given up, with or without room."""
        with self.changed:
            self._line.remove(ticket)
            self.changed.notify_all()

    def is_first(self, ticket: object) -> bool:
        return self._line[0] is ticket

    def reserve(self, size: int) -> bool:
        """Take `size` bytes of the room; False where there is not so much."""
        with self.changed:
            if self.limit is not None and self._used + self._reserved + size > self.limit:
                return False
            self._reserved += size
            return True

    def give_back(self, size: int) -> None:
        """What was reserved is not needed."""
        with self.changed:
            self._reserved -= size
            self.changed.notify_all()

    # -- items

    def add(self, item: Item) -> None:
        """`item` lies in the store now; it takes what was reserved for it."""
        size = item.stored
        with self._lock:
            self._reserved -= size
            self._used += size
            if self._used > self.peak:
                self.peak = self._used
            self._items[item.nonce] = item

    def drop(self, nonces: Iterable[str]) -> int:
        """These are gone; how many of them were here."""
        with self.changed:
            gone = [item for nonce in nonces if (item := self._items.pop(nonce, None)) is not None]
            if gone:
                self._used -= sum(item.stored for item in gone)
                self.changed.notify_all()
            return len(gone)

    def should_sweep(self) -> bool:
        """Whether so many came in since the last look that those that were taken should be found."""
        return len(self._items) >= self._sweep_at

    def swept(self) -> None:
        """A look was taken; the next one is due when there are twice as many, so that its cost is spread."""
        self._sweep_at = max(64, 2 * len(self._items))
