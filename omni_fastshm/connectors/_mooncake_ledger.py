"""What one connector has put and nobody has taken, as far as it knows, and the room that this takes.

An item has its room from before it is put. A signal handler may raise between any two steps; then `recount` makes the
sum anew from what there is, so that nothing stays reserved for a put that was interrupted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from ._mooncake_keys import Item

__all__ = ["Ledger", "Room"]


class Room:
    """The segment of one client, which all its connectors put into. `changed` is the lock of their ledgers, and tells
    of every change; it is re-entrant, because the garbage collector or a signal handler may close a connector while it
    is held.

    Args:
        size: bytes of the segment; 0 where there is none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # The lock by itself: entering a Condition costs a call of Python's more.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.ledgers: list[Ledger] = []
        self.line: deque[str] = deque()


class Ledger:
    """Items by nonce.

    Args:
        room: what the payloads lie in.
        limit: most bytes of this connector's untaken payloads; None leaves it at what the segment holds for all its
            connectors together.
        bounded: False for no limit at all.
    """

    def __init__(self, room: Room, limit: int | None = None, *, bounded: bool = True) -> None:
        self.most = limit if limit is not None else (room.size or None) if bounded else None
        """Bytes that an empty ledger has room for; None for no limit."""
        self.changed = room.changed
        self.under_way: dict[str, int] = {}
        """Puts that have not returned yet, by nonce, and their threads: what they put may not be in the store yet."""
        self._room = room
        self._lock = room.lock
        shared = bounded and limit is None
        self._counted = room.ledgers if shared else [self]
        self._line = room.line if shared else deque()  # puts that wait; the first one gets room first
        self._items: dict[str, Item] = {}
        self._used = 0
        self.peak = 0  # the most that ever was in use
        self._sweep_at = 64
        self.look: Callable[[], None] = lambda: None
        """Finds out what was taken; whoever can look sets it."""
        self.sweep_due = False
        """Whether so many came in since the last look that those that were taken should be found."""
        room.ledgers.append(self)

    def retire(self) -> None:
        """The connector is closed: the room is there for the others."""
        with self._lock:
            if self in self._room.ledgers:
                self._room.ledgers.remove(self)
            self._items.clear()
            self.recount()

    def look_around(self) -> None:
        """Find what was taken of all that fills the room which this ledger counts."""
        for ledger in list(self._counted):
            ledger.look()

    @property
    def used(self) -> int:
        """Bytes of what lies in the store, or is on its way there."""
        return self._used

    @property
    def free(self) -> int:
        """Bytes that may still be put."""
        return 0 if self.most is None else max(0, self.most - sum(ledger._used for ledger in self._counted))

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return item.nonce in self._items

    def items(self, request: str | None = None) -> list[Item]:
        """All that are in the store, or those of one request."""
        with self._lock:
            return [
                item
                for item in self._items.values()
                if (request is None or item.request == request) and item.nonce not in self.under_way
            ]

    # -- room

    def add(self, item: Item, size: int, *, in_line: bool = False) -> bool:
        """Give `item` its `size` bytes of room; False where there is not so much, or others wait for some and `item` is
        not the first in that line."""
        with self._lock:
            if self._line and not in_line:
                return False
            if self.most is not None:
                taken = size
                for ledger in self._counted:
                    taken += ledger._used
                if taken > self.most:
                    return False
            items = self._items
            items[item.nonce] = item
            self._used += size
            if self._used > self.peak:
                self.peak = self._used
            self.sweep_due = len(items) >= self._sweep_at
            return True

    def rename(self, old: Item, new: Item) -> None:
        """`new` has the place of `old`, which is of the same size."""
        with self._lock:
            self.under_way[new.nonce] = self.under_way[old.nonce]
            self._items[new.nonce] = new
            self._items.pop(old.nonce, None)

    def queue(self, nonce: str) -> None:
        """A place in the line for room."""
        with self._lock:
            self._line.append(nonce)

    def leave(self, nonce: str) -> None:
        """The place is given up, if there was one."""
        with self._lock:
            if nonce in self._line:
                self._line.remove(nonce)
            self.changed.notify_all()

    def is_first(self, nonce: str) -> bool:
        return self._line[0] == nonce

    def drop(self, nonces: Iterable[str]) -> int:
        """These are gone; how many of them were here."""
        with self._lock:
            gone = [item for nonce in nonces if (item := self._items.pop(nonce, None)) is not None]
            if gone:
                self._used -= sum([item.stored for item in gone])
                self.changed.notify_all()
            return len(gone)

    def recount(self) -> None:
        """Say anew how much there is, after a call that was interrupted somewhere."""
        with self._lock:
            self._used = sum([item.stored for item in self._items.values()])
            self.changed.notify_all()

    # -- looks

    def swept(self) -> None:
        """A look was taken; the next one is due when there are twice as many, so that its cost is spread."""
        self._sweep_at, self.sweep_due = max(64, 2 * len(self._items)), False
