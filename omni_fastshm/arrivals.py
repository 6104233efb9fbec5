"""Arrivals for event loops: one thread per receiving stage, whatever the number of tasks that wait for payloads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_fastshm._core import Directory

if TYPE_CHECKING:
    import asyncio  # when running where it is used: alone it takes longer than the rest of this package

SLICE_NS = 50_000_000  # whoever waits for arrivals looks this often for signals, for close, and for its directory
_IDLE_S = 5.0  # a thread that nobody needs for so long ends


class Change:
    """A future of an event loop that any thread may end, once or more often."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[None] = loop.create_future()

    def tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
            self.future.get_loop().call_soon_threadsafe(self._end)

    @property
    def orphaned(self) -> bool:
        """Is its loop closed, whatever still waits there?"""
        return self.future.get_loop().is_closed()

    def _end(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


@dataclass(eq=False)
class _Waiting:
    change: Change
    there: Callable[[], bool]
    seen: int  # what the bell showed when it was last found not to be there


class Arrivals:
    """Tells the tasks that wait for one receiving stage when what they wait for is there.

    Args:
        directory: of the namespace.
        stage: hash of the receiving stage.
    """

    def __init__(self, directory: Directory, stage: int) -> None:
        self.directory = directory
        self._stage = stage
        self._waiting: set[_Waiting] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def listen(self) -> int:
        """What the bell shows now, for `wait`. Look for payloads after this."""
        seen: int = self.directory.listen(self._stage)
        return seen

    async def wait(self, there: Callable[[], bool], seen: int, left_s: float | None) -> None:
        """Wait until it is there, the time is over, or there is another reason to look.

        Args:
            there: asked after each ring of the bell, by the thread: one ring must not wake all tasks for one payload.
            seen: what the bell showed before it was looked for in vain.
            left_s: seconds, or None for ever.
        """
        import asyncio

        waiting = _Waiting(Change(asyncio.get_running_loop()), there, seen)
        with self._changed:
            if self._stopped:
                return
            watched = self._start()
            if watched:
                self._waiting.add(waiting)
                self._changed.notify()
        if not watched:  # no more threads: the caller looks now and then
            await asyncio.sleep(SLICE_NS / 1e9 if left_s is None else min(left_s, SLICE_NS / 1e9))
            return
        try:
            if (self.listen() ^ seen) & ~1:
                return  # it rang before the thread knew of this one, and may not ring again
            await asyncio.wait([waiting.change.future], timeout=left_s)
        finally:
            with self._changed:
                self._waiting.discard(waiting)
            waiting.change.future.cancel()

    def _start(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._watch, name="omni-fastshm-arrivals", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def disown(self) -> None:
        """After a fork, in the child: the lock may have been held by a thread that does not exist here."""
        self._changed = threading.Condition()
        self._stopped = True

    def stop(self) -> None:
        """Wake everybody, and end the thread; whoever comes later does not wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._tell_all()

    def _watch(self) -> None:
        while self._needed():
            now = self.listen()
            self._tell_of(now)
            if not self.directory.wait(self._stage, now, 0, SLICE_NS, 2**63) and self.directory.lost():
                self._tell_all()  # nothing new rings here any more

    def _needed(self) -> bool:
        with self._changed:
            if not self._waiting and not self._stopped:
                self._changed.wait(_IDLE_S)
            needed = bool(self._waiting) and not self._stopped
            if not needed:
                self._thread = None  # under the lock: the next one to wait starts another
            return needed

    def _tell_of(self, now: int) -> None:
        # A function of its own: while the thread idles, its variables must keep no task and no connector.
        for each in self._all():
            if (now ^ each.seen) & ~1:
                if each.there():
                    each.change.tell()
                each.seen = now

    def _all(self) -> list[_Waiting]:
        with self._changed:
            orphans = [each for each in self._waiting if each.change.orphaned]
            self._waiting.difference_update(orphans)  # they die outside of the lock
            return list(self._waiting)

    def _tell_all(self) -> None:
        for each in self._all():
            each.change.tell()
