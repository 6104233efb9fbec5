"""The sending half of a shared memory endpoint: its segments, their growth, waiting for room, handing over."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from omni_fastshm import janitor, segments
from omni_fastshm._core import (
    CONTROL_SIZE,
    KEY_LIMIT,
    LOCK_OWNER,
    Directory,
    Extent,
    Outbox,
    Reservation,
    Segment,
    control_fixed_size,
)
from omni_fastshm.errors import SegmentError
from omni_fastshm.reading import read_untaken

T = TypeVar("T")

_LIVENESS_NS = 50_000_000  # a put that waits for room looks this often whether the readers still live
_LINGER_NS = 5_000_000  # takes ring no bell, so closing looks this often whether all is taken
_FIRST = 4 << 20  # so many bytes of a segment, or what the first payload needs, have memory before it is used
_STEP = 4 << 20  # and so many more are added at a time
_MANY = 16  # segments hold whole payloads when fewer than this would fit, so that no large rest is wasted


def _rounded(size: int) -> int:
    """What an allocation of `size` bytes takes: whole cache lines, at least one."""
    return max(-(-size // 64) * 64, 64)


def _usual_limit(namespace: str) -> int:
    """Half of what is free, or would be without what dead producers left: that gives way when there is no room."""
    return int(min((segments.mount_free() + janitor.preview(namespace, force=True).freed) // 2, 4 << 30))


class _Ticket:
    """A place in the queue for room, for as long as it lives."""

    __slots__ = ("__weakref__",)


class Producer:
    """One producing endpoint: made when the first payload needs it.

    Args:
        namespace: where it is found.
        directory: the namespace's directory, in use by this endpoint.
        segment_bytes: usual size of a data segment.
        max_bytes: limit for all data segments; None takes half of what the mount has free, what dead producers left
            included, at most 4 GiB.
        keyed: keep a key table, so that consumers find payloads by edge and request id.
        orphan_ttl_s: how long untaken payloads stay when this process is killed.
        idle_segment_s: how long a data segment beyond the first may be unused before its memory is given back.

    Raises:
        SegmentError: there is no room even for the control segment.
    """

    def __init__(
        self,
        namespace: str,
        directory: Directory,
        *,
        segment_bytes: int,
        max_bytes: int | None,
        keyed: bool,
        orphan_ttl_s: float,
        idle_segment_s: float,
    ) -> None:
        slots = KEY_LIMIT if keyed else 0
        control, endpoint = segments.make_control(namespace, CONTROL_SIZE, control_fixed_size(slots))
        self.name = control.name
        self.endpoint = endpoint
        self.directory = directory
        self.closed = False
        self.given_up = False  # somebody removed its names: only what is in it keeps it
        self._namespace = namespace
        self.blocked_s = 0.0
        self._segments = 0
        self.extra = False  # is there more than one segment of usual size?
        self._trim_at = 0.0
        self.max_bytes = max_bytes if max_bytes is not None else _usual_limit(namespace)
        self._segment_bytes = segment_bytes
        self._idle_ns = int(idle_segment_s * 1e9)
        self._next_number = 0
        self._coming: list[int] = []  # bytes of segments that are about to be added
        self._growing: Segment | None = None  # its memory is still being taken, by a thread
        self._taker: threading.Thread | None = None
        # Held while segments are added, and when their names go. Re-entrant, for a signal handler may put, or close,
        # while the thread that it interrupts holds it; a close then leaves the rest to that thread.
        self._changing = threading.RLock()
        # Whoever wants that lock holds this one first, and the thread that takes memory passes here before each step:
        # a lock alone goes to the one that runs, again and again, and a put would wait until all memory is there.
        self._door = threading.RLock()
        self._shut_later = False
        self._torn_down = False
        self.untaken: dict[int, tuple[int, int]] = {}
        """What `close` dropped: payloads and bytes, by the hash of their edge."""
        # First come, first served among those who wait for room. Weak: whoever leaves by an exception that a signal
        # handler raised, at whatever instruction, must not stay at the head for ever.
        self.queue: deque[weakref.ref[_Ticket]] = deque()
        try:
            self.outbox = Outbox(
                control, endpoint, slots, min(int(orphan_ttl_s * 1e9), 2**63), directory=directory.segment
            )
            self._enter(namespace)
        except BaseException:
            segments.unlink(self.name)
            raise

    def _enter(self, namespace: str) -> None:
        if not self.directory.enter(self.endpoint):
            janitor.sweep(namespace)
            if not self.directory.enter(self.endpoint):
                raise SegmentError(
                    f"namespace {namespace} has no place for another producer: use one per pipeline", op="put"
                )

    @property
    def capacity(self) -> int:
        """Bytes of all data segments there are now, with what is still to come of the one that grows."""
        growing = self._growing
        capacity: int = self.outbox.ring.capacity
        return capacity if growing is None else capacity + growing.room - growing.size

    def room(self, size: int, timeout_s: float) -> Reservation | None:
        """Room for a frame, or None when there is none within the time.

        Raises:
            SegmentError: somebody else removed names of this producer (its `errno` is ENOENT): it is of no more use.
        """
        if self.extra and time.monotonic() >= self._trim_at:
            self.trim_idle()
        if self._segments > 1 and self.capacity + self._segment_bytes > self.max_bytes:
            with self._change():  # not the segment that another thread has just added for its own payload
                self._reshape(size)
        if not self.queue:
            room = self.outbox.reserve(size)
            if room is not None:
                return room
        return self._wait_for(size, lambda: self.outbox.reserve(size), timeout_s)

    def can_fit(self, size: int) -> bool:
        """Could an idle ring take this?"""
        return _rounded(size) <= min(self.max_bytes, segments.mount_size())

    def lend(self, size: int, timeout_s: float) -> Extent | None:
        """Memory for a loan, or None when there is none within the time."""
        return self._wait_for(size, lambda: self.outbox.lend(size), timeout_s)

    def _wait_for(self, size: int, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        if not self.can_fit(size):
            return None  # no use in waiting
        if not self.queue:
            made = self._find_room(size, attempt)
            if made is not None or timeout_s == 0:
                return made
        return self._queue_up(size, attempt, time.monotonic() + timeout_s)

    def _find_room(self, size: int, attempt: Callable[[], T | None]) -> T | None:
        with self._change():  # whoever finds another thread adding a segment waits for it, whatever his time limit
            return None if self.closed else self._make_room(size, attempt)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Change segments; a close that a signal handler could not finish meanwhile is finished at the end."""
        try:
            with self._door, self._changing:
                yield
        finally:
            if self._shut_later:
                self._shut()

    def _make_room(self, size: int, attempt: Callable[[], T | None]) -> T | None:
        made = attempt()
        if self.outbox.lost:
            raise SegmentError(
                f"names of {self.name} were removed from {segments.MOUNT} by somebody else",
                errno=errno.ENOENT,
                op="put",
                segment=self.name,
            )
        if made is None and self.outbox.reap():
            made = attempt()  # dead readers held enough: no need for more memory
        if made is None:
            made = self._attempt_with_more(attempt)
        if made is None and self._grow(size) and not self.closed:
            made = self._attempt_with_more(attempt)  # another thread's put may have been there first
        return made

    def _attempt_with_more(self, attempt: Callable[[], T | None]) -> T | None:
        made = attempt()
        while made is None and self._take_more():
            made = attempt()
        return made

    def _queue_up(self, size: int, attempt: Callable[[], T | None], deadline: float) -> T | None:
        deadline_ns = min(int(deadline * 1e9), 2**63)
        ticket = _Ticket()
        start = time.monotonic()
        try:
            self.queue.append(weakref.ref(ticket))
            while not self.closed:
                seen = self.outbox.announce()  # before the last look: a release after it rings the bell
                made = self._find_room(size, attempt) if self._first() is ticket else None
                if made is not None or time.monotonic() >= deadline:
                    return made
                self.outbox.wait(seen, _LIVENESS_NS, deadline_ns)
            return None
        finally:
            self.blocked_s += time.monotonic() - start
            self._leave(ticket)

    def _first(self) -> _Ticket | None:
        while self.queue:
            ticket = self.queue[0]()
            if ticket is not None:
                return ticket
            self._leave(None)
        return None

    def _leave(self, ticket: _Ticket | None) -> None:
        for each in list(self.queue):
            if each() in (None, ticket):
                with contextlib.suppress(ValueError):  # another thread was faster
                    self.queue.remove(each)
        if self.queue:
            self.outbox.wake()  # the next one's turn

    def _grow(self, size: int) -> bool:
        """Add a data segment that holds `size` bytes, if the limit and the mount allow it."""
        need = _rounded(size)
        wanted = self._segment_size(need)
        if wanted < need:
            self._trim(0)  # empty segments of the wrong size are in the way
            wanted = self._segment_size(need)
        if wanted < need:
            return False
        for attempt in (wanted, need):
            try:
                self._add_segment(attempt, need)
                return True
            except SegmentError as error:
                if error.errno == errno.EAGAIN:
                    continue
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                janitor.sweep(self._namespace, force=True, wanted=attempt)
                self._trim(0)
        return False

    def _segment_size(self, need: int) -> int:
        return self._usual_size(need, max(self.max_bytes - self.capacity, 0) // 64 * 64)

    def _usual_size(self, need: int, room: int) -> int:
        size = min(max(self._segment_bytes // 64 * 64, need), room)
        return size // need * need if size < _MANY * need else size

    def _add_segment(self, size: int, need: int = 0) -> None:
        if not self.name.startswith(segments.owner_prefix()):  # its readers would refuse somebody else's segment
            raise SegmentError(
                f"{self.name} cannot grow: this process has become user {segments.user_id()}; build another connector",
                op="make",
                segment=self.name,
            )
        for _ in range(16):
            number = self._next_number
            self._next_number += 1  # first: whatever is raised in between, the name is not tried again
            with contextlib.suppress(FileExistsError):  # somebody put something there: leave it, take the next
                # Locked, so that no janitor takes it for a dead producer's, whatever stands under the control's name.
                name, first = segments.data_name(self.name, number), min(size, max(need, _FIRST))
                segment = segments.make(name, first, lock=LOCK_OWNER, room=size)
                break
        else:
            raise SegmentError(f"cannot make a data segment for {self.name}: every name was taken", op="make")
        self._coming.append(segment.room)  # before the look: a signal handler's put after it counts this one as well
        try:
            if self.capacity + sum(self._coming) > self.max_bytes:  # a signal handler's put has added one meanwhile
                segments.unlink(segment.name)
                # EAGAIN, not ENOSPC: for our own limit nobody's orphans are to give way.
                raise SegmentError(f"no room for {segment.name} any more", errno=errno.EAGAIN, op="put")
            self.outbox.add_segment(segment, number)
        finally:
            self._coming.remove(segment.room)
        self._segments += 1
        if segment.size < segment.room:
            self._growing = segment
            self._grow_on()
        self._count_extra()

    def _grow_on(self) -> None:
        """Take the rest of its memory while the first payloads are on their way: that takes 0.5 ms for each MiB."""
        self._taker = threading.Thread(target=self._take_rest, name="omni-fastshm-memory", daemon=True)
        try:
            self._taker.start()
        except RuntimeError:  # no more threads: then at once
            self._take_rest()

    def _take_rest(self) -> None:
        more = True
        while more:
            with self._door:  # a put that needs the lock waits for one step
                pass
            with self._changing:
                more = self._take_more()
            if self._shut_later:
                self._shut()

    def _take_more(self) -> bool:
        """Take some more memory for the segment that grows; False when it has all, or there is no more to have."""
        segment = self._growing
        if segment is None or self._torn_down:
            return False
        try:
            if segment.room - segment.size > segments.mount_free():  # as when it was made: not all there is left
                raise SegmentError("no room", errno=errno.ENOSPC, op="make", segment=segment.name)
            segment.extend(min(segment.size + _STEP, segment.room))
        except SegmentError:
            self._growing = None  # it stays as long as it is
            return False
        if not self.outbox.extend_segment(segment) or segment.size == segment.room:
            self._growing = None
        return True

    def trim_idle(self) -> None:
        """Look for blocks that are free again and for segments that nothing has used for a while."""
        self._trim_at = time.monotonic() + self._idle_ns / 2e9
        with self._change():
            self._trim(self._idle_ns)

    def _trim(self, idle_ns: int) -> None:
        """Give back segments that nothing has used for that long, all but one of usual size; 0 spares none."""
        if self._torn_down:
            return  # loans that readers look at no longer count as in use: to take their memory would be a SIGBUS
        for arena, _, segment in self.outbox.idle_segments(idle_ns):
            if idle_ns == 0 or self._segments > 1 or segment.size > self._segment_bytes:
                self._drop(arena, segment)

    def _reshape(self, size: int) -> None:
        """Near the limit and idle: start anew when the segments, cut for other sizes, hold fewer of this one."""
        self.outbox.sweep()
        if self.outbox.ring.used:
            return
        need = _rounded(size)
        growing = self._growing
        sizes = [each.room if each is growing else each.size for each in self.outbox.data_segments()]
        now = sum(each // need for each in sizes) + (self.max_bytes - sum(sizes)) // need
        usual = self._usual_size(need, self.max_bytes)
        if usual and now < self.max_bytes // usual * (usual // need) + self.max_bytes % usual // need:
            self._trim(0)

    def _drop(self, arena: int, segment: Segment) -> None:
        if self.outbox.drop_segment(arena, segment):  # unless another thread has begun to use it meanwhile
            segments.unlink(segment.name)
            if self._growing is segment:
                self._growing = None
            self._segments -= 1
            self._count_extra()

    def _count_extra(self) -> None:
        self.extra = self._segments > 1 or self.capacity > self._segment_bytes

    @property
    def idle(self) -> bool:
        """Is nothing of it waiting for a taker, looked at or lent?"""
        self.outbox.sweep()
        return not self.outbox.ring.used

    def close(self, linger_s: float) -> int:
        """Stop: wait up to `linger_s` for takers, drop the rest, take all names away.

        Returns:
            How many payloads were dropped.
        """
        try:
            self._linger(time.monotonic() + linger_s)
        finally:  # Ctrl-C ends the waiting, but the names go all the same
            dropped = self._shut()
        self._let_taker_end()
        return dropped

    def _let_taker_end(self) -> None:
        """What it holds on to would be seen after the close. At most one step is left to it."""
        taker = self._taker
        if taker is None or taker is threading.current_thread() or self._shut_later or sys.is_finalizing():
            return
        if taker.is_alive():
            taker.join(1.0)

    def _linger(self, deadline: float) -> None:
        while self.outbox.pending() and time.monotonic() < deadline:
            seen = self.outbox.announce()
            if self.outbox.pending():
                self.outbox.wait(seen, _LINGER_NS, min(int(deadline * 1e9), 2**63))

    def _shut(self) -> int:
        self.closed = True
        self.outbox.wake()
        if self._changing._is_owned():  # type: ignore[attr-defined]  # a signal handler in the middle of our own change
            self._shut_later = True
            return 0
        # At the interpreter's end the thread that takes memory stands still, perhaps with the lock.
        held = self._changing.acquire(timeout=0.1 if sys.is_finalizing() else -1)
        try:
            return self._tear_down()
        finally:
            if held:
                self._changing.release()

    def _tear_down(self) -> int:
        """Idempotent: a change that was under way may have to do it once more at its end."""
        try:
            if self.outbox.pending():
                with contextlib.suppress(OSError, ValueError):  # of a daemon that closes all descriptors
                    self.untaken = read_untaken(self.outbox.control.fd)
        finally:  # that was for the log alone: whatever a signal handler raises in it, the names go
            dropped = self._take_down()
        return dropped

    def _take_down(self) -> int:
        dropped: int = self.outbox.cancel_all()
        self.outbox.mark_closed()
        self.outbox.reap()
        self._trim(0)  # what nobody looks at gives its memory back even to readers that still have it mapped
        self._torn_down = True
        for name in segments.list_names(segments.data_name(self.name, 0)[:-1]):
            segments.unlink(name)  # by what is there: an exception from a signal handler may have cut a change short
        self.directory.leave(self.endpoint)  # before the name goes: a janitor takes out only what has one
        segments.unlink(self.name)
        self.outbox.discard_extents()
        return dropped
