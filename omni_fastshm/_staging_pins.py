"""Which mapped segments are page-locked for devices: each at most once, and never after it was unmapped."""

from __future__ import annotations

import bisect
import logging
import os
import threading
import weakref
from collections.abc import Iterator

from omni_fastshm._core import Segment, segment_at
from omni_fastshm._staging_runtime import DeviceRuntime

__all__ = ["CHUNK_BYTES", "Pins", "pins"]

logger = logging.getLogger("omni_fastshm")

CHUNK_BYTES = 256 << 20  # a device's driver holds locks of its own for as long as it pins one range


class Pinned:
    """What is known of one segment: how much of it, from its start on, is page-locked.

    Attributes:
        address: where the segment begins.
        end: where its mapping ends; memory may come to it up to there.
        chunks: the ranges that were registered, ``(address, nbytes)``, each beginning where the one before ends.
        done: up to there it stays page-locked, and whoever sees this may copy without asking for the lock. Chunks that
            lie behind it may be unregistered yet, when the driver refuses the next one.
        whole: no more of it will be registered: the driver refused, or the cap is reached.
    """

    __slots__ = ("address", "chunks", "done", "end", "ref", "runtime", "whole")

    def __init__(self, segment: Segment, runtime: DeviceRuntime, ref: weakref.ref[Segment]) -> None:
        self.address = self.done = segment.address
        self.end = segment.address + segment.room
        self.chunks: list[tuple[int, int]] = []
        self.whole = False
        self.runtime = runtime
        self.ref = ref

    def covers(self, address: int, nbytes: int) -> bool:
        """Is there nothing more to be done for that range?"""
        return self.whole or min(address + nbytes, self.end) <= self.done

    def reached(self) -> int:
        """Where the last chunk ends."""
        return sum(self.chunks[-1]) if self.chunks else self.address

    def pieces(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """``(offset, nbytes)`` of the parts of a range that no boundary between chunks cuts.

        One copy must not cross such a boundary: to the driver these are separate ranges.
        """
        done = 0
        for start, size in self.chunks:
            cut = start + size - address
            if done < cut < nbytes:
                yield done, cut - done
                done = cut
        yield done, nbytes - done


class Pins:
    """The page-locked segments of this process.

    Args:
        chunk_bytes: at most so many bytes in one registration.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        """Also in the child after a fork: what the parent registered is none of the child's."""
        self._lock = threading.RLock()  # a segment can die, and be unregistered, while this very thread has the lock
        self._known: dict[int, Pinned] = {}
        self._starts: list[int] = []
        self.total = 0

    def find(self, address: int) -> Pinned | None:
        """What is known of the segment with that address in it; None when no device has touched it yet."""
        starts = self._starts  # replaced as a whole, never changed
        index = bisect.bisect_right(starts, address) - 1
        found = self._known.get(starts[index]) if index >= 0 else None
        return found if found is not None and address < found.end else None

    def ensure(self, address: int, nbytes: int, runtime: DeviceRuntime, limit: int) -> Pinned | None:
        """Page-lock the segment with that range in it, as far as it has memory, unless that was done or tried before.

        Args:
            address: of memory in a mapped segment.
            nbytes: how much of it is about to be used.
            runtime: who registers it.
            limit: no more bytes than this in the whole process; of a segment that is larger than what is left, the
                chunks that fit.

        Returns:
            What became of it; None for memory that is in no segment.
        """
        found = self.find(address)
        if found is not None and found.covers(address, nbytes):
            return found
        segment = segment_at(address)
        if segment is None:
            return None
        with self._lock:
            found = self.find(address) or self._add(segment, runtime)
            if not found.covers(address, nbytes):
                self._register(found, segment, limit)
        return found

    def _add(self, segment: Segment, runtime: DeviceRuntime) -> Pinned:
        base = segment.address
        pinned = Pinned(segment, runtime, weakref.ref(segment, lambda _: self._release(base)))
        self._known[base] = pinned
        self._starts = sorted(self._known)
        return pinned

    def _register(self, pinned: Pinned, segment: Segment, limit: int) -> None:
        end = pinned.address + segment.size  # it may grow meanwhile: what comes later is registered later
        first = pinned.done == pinned.address
        while (at := pinned.reached()) < end:
            size = min(self._chunk_bytes, end - at)
            if self.total + size > limit:
                logger.info("%s: pin_bytes ends its page-locking at %d bytes", segment.name, at - pinned.address)
                pinned.whole = True
                break
            code = pinned.runtime.register(at, size)
            if code:
                self._give_up(pinned, segment, code, first)
                break
            pinned.chunks.append((at, size))
            self.total += size
        pinned.done = pinned.reached()

    def _give_up(self, pinned: Pinned, segment: Segment, code: int, undo: bool) -> None:
        """The driver refuses. Copies go on without: slower, and right."""
        why = pinned.runtime.describe_error(code)
        pinned.runtime.clear_error()
        if undo:  # what was there before may have copies on their way
            self._unregister(pinned)
        pinned.whole = True  # not before: from now on others copy, and no range may go under their copies
        self.warn(
            f"{segment.name} cannot be page-locked: {why}. Copies from and to devices go on through unlocked memory, "
            "which is slower; `omni-fastshm doctor` shows the limits, `pin: false` silences this"
        )

    def warn(self, text: str) -> None:
        """Once per process: whatever is the matter, it is so for every segment."""
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)

    def _unregister(self, pinned: Pinned) -> None:
        chunks, pinned.chunks = pinned.chunks, []
        for address, size in chunks:
            self.total -= size
            if pinned.runtime.unregister(address):
                pinned.runtime.clear_error()
        pinned.done = pinned.address

    def _release(self, base: int) -> None:
        """A segment is about to be unmapped: the last reference to it is gone, and with it every copy that used it."""
        with self._lock:
            pinned = self._known.pop(base, None)
            self._starts = sorted(self._known)
            if pinned is not None:
                self._unregister(pinned)


pins = Pins()
"""Of this process."""

os.register_at_fork(after_in_child=lambda: pins._forget())
