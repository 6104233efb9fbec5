"""The receiving half of a shared memory endpoint: whose payloads it can reach, and how."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable

from omni_fastshm import segments
from omni_fastshm._core import Directory, Inbox, Segment, find_newest
from omni_fastshm.errors import FastShmError, MetadataError

logger = logging.getLogger("omni_fastshm")

# One view of each producer for the whole process: its leases share one reader slot, and with it one bit per block.
_inboxes: weakref.WeakValueDictionary[str, Inbox] = weakref.WeakValueDictionary()
_inboxes_lock = threading.RLock()


def _forget_inherited() -> None:
    global _inboxes_lock
    _inboxes_lock = threading.RLock()  # may have been held by a thread that does not exist in the child
    _inboxes.clear()


os.register_at_fork(after_in_child=_forget_inherited)


def open_inbox(name: str) -> Inbox | None:
    """This process's view of the producer with that control segment, or None when it is gone.

    Raises:
        MetadataError: what stands under the name is not a control segment of ours.
        SegmentError: it cannot be mapped.
    """
    with _inboxes_lock, segments.no_fork:
        inbox = _inboxes.get(name)
        if inbox is None:
            parts = segments.parse_control_name(name)
            if parts is None or parts.uid != segments.user_id():
                raise MetadataError(f"{name} is no segment of user {segments.user_id()}", op="open", segment=name)
            fd = segments.open_descriptor(name)
            if fd is None:
                return None
            if os.pread(fd, 8, 0) == bytes(8):  # a hole: to look at it through a mapping would take memory
                os.close(fd)
                raise MetadataError(f"{name} is not a control segment, or not yet", op="open", segment=name)
            inbox = Inbox(Segment(name, fd, False, True), functools.partial(segments.open_data, name))
            _inboxes[name] = inbox
        return inbox


class Consumer:
    """One endpoint's producers. Calls may come from any thread."""

    def __init__(self) -> None:
        self.known: dict[str, Inbox] = {}
        self._all: tuple[Inbox, ...] = ()
        self._directory: Directory | None = None
        self._epoch: int | None = None  # of that directory
        self._left: list[weakref.ref[Inbox]] = []  # let go while leases of them were alive
        self._lock = threading.RLock()
        self._told: set[tuple[int, str]] = set()
        self._told_in: int | None = None  # which epoch

    def inbox(self, name: str) -> Inbox | None:
        """The producer with that control segment, or None when it is gone."""
        inbox = self.known.get(name)
        if inbox is None:
            self.forget_closed()
            inbox = open_inbox(name)
            if inbox is not None:
                self.known[name] = inbox
        return inbox

    def producers(self, directory: Directory, namespace: str) -> tuple[Inbox, ...]:
        """All producers of the namespace; looked up anew only when one came or went."""
        epoch: int | None = directory.epoch
        if epoch == self._epoch and directory is self._directory:
            return self._all
        with self._lock:
            found = []
            for endpoint in directory.endpoints():
                try:
                    inbox = self.inbox(segments.control_name(namespace, endpoint))
                except FastShmError as error:  # one bad neighbour must not cut off the others
                    self._tell(directory.epoch, namespace, endpoint, str(error))
                    epoch = None  # look again next time: it may have been a want of descriptors
                    continue
                if inbox is not None:
                    found.append(inbox)
            self._all = tuple(found)
            self._directory, self._epoch = directory, epoch
            self.forget_closed()
        return self._all

    def _tell(self, epoch: int, namespace: str, endpoint: int, reason: str) -> None:
        """Log who cannot be reached, once in an epoch: a get that waits looks many times a second."""
        if epoch != self._told_in:
            self._told_in = epoch
            self._told.clear()
        if (endpoint, reason) not in self._told:
            self._told.add((endpoint, reason))
            logger.warning("a producer of namespace %s cannot be reached: %s", namespace, reason)

    def find(
        self, directory: Directory, namespace: str, edge: int, request: tuple[int, int]
    ) -> tuple[Inbox, int, int, int, bool] | None:
        """The newest untaken payload under a key: ``(inbox, block, sequence, stamp, are there older ones)``."""
        return find_newest(self.producers(directory, namespace), edge, *request)

    def forget_closed(self) -> None:
        """Let go of producers that have closed: views keep what they need of them."""
        for name, inbox in list(self.known.items()):
            if inbox.closed:
                self.known.pop(name, None)
                inbox.forget_segments()
                self._remember([inbox])

    def _remember(self, inboxes: Iterable[Inbox]) -> None:
        alive = [ref for ref in self._left if ref() is not None]
        self._left = [*alive, *(weakref.ref(inbox) for inbox in inboxes if inbox.leases)]

    @property
    def leases(self) -> int:
        """Leases of this process on the producers that this endpoint knows."""
        return sum(inbox.leases for inbox in self._reached())

    @property
    def oldest_lease_s(self) -> float:
        """How long the oldest of them has been there, in seconds; 0 without leases."""
        return max((age for inbox in self._reached() if inbox.leases for _, _, age in inbox.held()), default=0.0)

    def _reached(self) -> set[Inbox]:
        left = [inbox for inbox in (ref() for ref in self._left) if inbox is not None]
        return {*self.known.values(), *left}

    def close(self) -> None:
        """Let go of all producers; leases that are left are still counted."""
        self._remember(self.known.values())
        self.known.clear()
        self._all = ()
        self._directory = self._epoch = None
