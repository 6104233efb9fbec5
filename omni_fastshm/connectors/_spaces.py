"""Where the payloads of in-process connectors lie until they are taken: a space per namespace and process."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from threading import Condition, RLock
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["Account", "Entry", "Key", "Space", "this_process"]

Key = tuple[str, str, str]
"""From, to, request id."""


@dataclass
class Account:
    """What one connector has put and nobody has taken.

    Entries point to it, not to the connector: one that nobody takes must not keep alive what drops it.
    """

    live: int = 0
    used: int = 0
    peak: int = 0  # the most that ever was in use


class Entry:
    """One payload.

    Args:
        key: its edge and request id.
        data: the object.
        size: its bytes.
        consumers: how many times it can be taken.
        account: of the connector that put it.
        by_key: whether it can be found by its key.
    """

    __slots__ = (
        "account",
        "busy",
        "by_key",
        "cancelled",
        "consumers",
        "data",
        "key",
        "number",
        "pending",
        "size",
    )

    def __init__(self, key: Key, data: Any, size: int, consumers: int, account: Account, by_key: bool) -> None:
        self.key = key
        self.data = data
        self.size = size
        self.consumers = consumers
        self.account = account
        self.by_key = by_key
        self.pending = consumers
        self.busy = 0
        self.cancelled = False
        self.number = 0


class Space:
    """All payloads of one namespace. `changed` is the lock for everything in it and tells of every change.

    The lock is re-entrant, because the garbage collector may close a forgotten connector while it is held.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self._numbers = count(1)
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[Key, Entry] = {}
        self._by_request: dict[str, set[int]] = {}
        self.watchers: dict[Key, list[Callable[[], object]]] = {}

    def tell(self, key: Key) -> None:
        """There is something new under this key, or a reason to look."""
        with self.changed:
            self.changed.notify_all()
            for watcher in [
                *self.watchers.get(key, ())
            ]:  # the garbage collector may end a task that waits, and with it one
                watcher()

    def add(self, entry: Entry) -> None:
        """Take in a payload; one that is found by the same key and not yet taken is cancelled."""
        with self.changed:
            replaced = self.replaced_by(entry)
            if replaced is not None:
                self._cancel([replaced])
            entry.number = next(self._numbers)
            self._entries[entry.number] = entry
            self._by_request.setdefault(entry.key[2], set()).add(entry.number)
            if entry.by_key:
                self._by_key[entry.key] = entry
            entry.account.live += 1
            entry.account.used += entry.size
            entry.account.peak = max(entry.account.peak, entry.account.used)

    def replaced_by(self, entry: Entry) -> Entry | None:
        """The payload that would have to go if `entry` came in."""
        return self._by_key.get(entry.key) if entry.by_key else None

    def find(self, key: Key, number: int | None) -> Entry | None:
        """The payload of that number, or of that key where there is no number, if it can be taken."""
        entry = self._by_key.get(key) if number is None else self._entries.get(number)
        return entry if entry is not None and entry.pending > 0 and entry.key == key else None

    def claim(self, entry: Entry) -> None:
        """Reserve one taking. It ends with `done` or `give_back`; until then the payload keeps its place."""
        with self.changed:
            entry.pending -= 1
            entry.busy += 1

    def done(self, entry: Entry) -> None:
        """The claimed payload was taken."""
        with self.changed:
            entry.busy -= 1
            if entry.pending == 0 and entry.busy == 0:
                self._remove(entry)
            self.changed.notify_all()

    def give_back(self, entry: Entry) -> None:
        """The claimed payload was not taken after all, and can be again unless it was cancelled meanwhile."""
        with self.changed:
            if not entry.cancelled:
                entry.pending += 1
        self.done(entry)
        self.tell(entry.key)

    def cancel_request(self, request_id: str) -> None:
        """Drop all payloads of one request."""
        with self.changed:
            numbers = list(self._by_request.get(request_id, ()))
            gone = self._cancel([self._entries[number] for number in numbers if number in self._entries])
        # The payloads die here, outside of the lock: what they hold may do anything when it dies.
        del gone

    def cancel_account(self, account: Account) -> list[tuple[Key, int]]:
        """Drop all payloads of one connector.

        Returns:
            Their keys and sizes.
        """
        with self.changed:
            gone = self._cancel([entry for entry in list(self._entries.values()) if entry.account is account])
        return [(entry.key, entry.size) for entry in gone]

    def _cancel(self, entries: Iterable[Entry]) -> list[Entry]:
        gone = []
        for entry in entries:
            if entry.pending > 0:
                gone.append(entry)
            entry.cancelled = True
            entry.pending = 0
            if self._by_key.get(entry.key) is entry:
                del self._by_key[entry.key]
            if entry.busy == 0:
                self._remove(entry)
        self.changed.notify_all()
        return gone

    def _remove(self, entry: Entry) -> None:
        if self._entries.pop(entry.number, None) is None:
            return
        numbers = self._by_request.get(entry.key[2], set())
        numbers.discard(entry.number)
        if not numbers:
            self._by_request.pop(entry.key[2], None)
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        entry.account.live -= 1
        entry.account.used -= entry.size


class Process:
    """What belongs to one process; a forked child makes its own and never touches its parent's locks."""

    def __init__(self) -> None:
        self.id = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.host = socket.gethostname()
        self._lock = RLock()
        self._spaces: WeakValueDictionary[str, Space] = WeakValueDictionary()

    def space(self, namespace: str) -> Space:
        """The space of a namespace; it lives as long as one of its connectors."""
        with self._lock:
            return self._spaces.setdefault(namespace, Space())


_processes: dict[int, Process] = {}


def this_process() -> Process:
    """The process that runs this, told from all others, also from an earlier one of the same number."""
    pid = os.getpid()
    # One step under the interpreter's lock: a lock of our own could be held by another thread during a fork.
    return _processes.get(pid) or _processes.setdefault(pid, Process())
