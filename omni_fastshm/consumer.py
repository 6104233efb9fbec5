"""The receiving half of a shared memory endpoint: whose payloads it can reach, and how."""

from __future__ import annotations

import functools
import os
import threading
import weakref

from omni_fastshm import segments
from omni_fastshm._core import Directory, Inbox, Segment, find_newest

# One view of each producer for the whole process: its leases share one reader slot, and with it one bit per block.
_inboxes: weakref.WeakValueDictionary[str, Inbox] = weakref.WeakValueDictionary()
_inboxes_lock = threading.Lock()


def _forget_inherited() -> None:
    global _inboxes_lock
    _inboxes_lock = threading.Lock()  # may have been held by a thread that does not exist in the child
    _inboxes.clear()


os.register_at_fork(after_in_child=_forget_inherited)


def open_inbox(name: str) -> Inbox | None:
    """This process's view of the producer with that control segment, or None when it is gone.

    Raises:
        MetadataError: what stands under the name is not a control segment of ours.
        SegmentError: it cannot be mapped.
    """
    with _inboxes_lock:
        inbox = _inboxes.get(name)
        if inbox is None:
            fd = segments.open_descriptor(name)
            if fd is None:
                return None
            inbox = Inbox(Segment(name, fd, False, True), functools.partial(segments.open_data, name))
            _inboxes[name] = inbox
        return inbox


class Consumer:
    """One endpoint's producers. Calls may come from any thread."""

    def __init__(self) -> None:
        self.known: dict[str, Inbox] = {}
        self._all: tuple[Inbox, ...] = ()
        self._epoch: int | None = None
        self._lock = threading.Lock()

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
        epoch = directory.epoch
        if epoch == self._epoch:
            return self._all
        with self._lock:
            found = []
            for endpoint in directory.endpoints():
                inbox = self.inbox(segments.control_name(namespace, endpoint))
                if inbox is not None:
                    found.append(inbox)
            self._all = tuple(found)
            self._epoch = epoch
            self.forget_closed()
        return self._all

    def find(
        self, directory: Directory, namespace: str, edge: int, request: tuple[int, int]
    ) -> tuple[Inbox, int, int] | None:
        """The newest untaken payload under a key: ``(inbox, block, sequence)``."""
        return find_newest(self.producers(directory, namespace), edge, *request)

    def forget_closed(self) -> None:
        """Let go of producers that have closed: views keep what they need of them."""
        for name, inbox in list(self.known.items()):
            if inbox.closed:
                del self.known[name]
                inbox.forget_segments()

    @property
    def leases(self) -> int:
        """Leases of this process on the producers that this endpoint knows."""
        return sum(inbox.leases for inbox in list(self.known.values()))

    def close(self) -> None:
        """Let go of all producers."""
        self.known.clear()
        self._all = ()
        self._epoch = None
