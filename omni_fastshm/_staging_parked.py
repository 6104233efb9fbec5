"""What a device is still reading or writing: kept here until the device is done, whoever else has let go of it.

A lease must be given back as soon as its upload is complete, not at the next call: the producer may wait for the room.
So a thread sleeps on the oldest event as long as anything is parked, and ends a moment after nothing is.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from omni_fastshm._staging_runtime import DeviceRuntime

__all__ = ["Parked", "parked"]

logger = logging.getLogger("omni_fastshm")

_IDLE_S = 0.5  # the thread outlives the last copy by so much, for the next one


class _Entry:
    __slots__ = ("event", "keep", "runtime")

    def __init__(self, runtime: DeviceRuntime, event: Any, keep: Any) -> None:
        self.runtime, self.event, self.keep = runtime, event, keep

    def done(self) -> bool:
        try:
            return self.runtime.query(self.event)
        except Exception as error:
            return _failed(error)

    def wait(self) -> None:
        try:
            self.runtime.synchronize(self.event)
        except Exception as error:
            _failed(error)


def _failed(error: Exception) -> bool:
    """A device that reports an error does nothing more with this memory."""
    # Only the text: a log record that is kept would keep all frames, and with them what is let go of here.
    logger.error("a copy between shared memory and a device failed: %s: %s", type(error).__name__, str(error))
    return True


class Parked:
    """What waits for devices in this process.

    Args:
        helper: let go of things from a thread as well; without, only `poll` does.
    """

    def __init__(self, helper: bool = True) -> None:
        self._helper = helper
        self._for_good: list[Any] = []
        self._entries: list[_Entry] = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    def _forget(self) -> None:
        """In a forked child: to let go of it here would touch the parent's devices, so it stays for good."""
        self._for_good.append(self._entries)
        self._entries = []
        self._start_anew()

    def __len__(self) -> int:
        return len(self._entries)

    def park(self, runtime: DeviceRuntime, event: Any, keep: Any) -> None:
        """Keep `keep` until `event` is complete."""
        with self._changed:
            self._entries.append(_Entry(runtime, event, keep))
            if self._helper and self._thread is None:
                self._start_helper()
            self._changed.notify()

    def _start_helper(self) -> None:
        self._thread = threading.Thread(target=self._run, name="omni-fastshm-devices", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are no more threads now: `poll` lets go, and the next one to be parked tries again
            self._thread = None
        except BaseException:
            self._thread = None  # if it runs after all there may be two, which does no harm
            raise

    def keep_for_good(self, keep: Any) -> None:
        """For what a device may be writing to, when the device cannot even say that any more."""
        logger.error("a device takes no more work: the shared memory it may be writing to stays in use")
        self._for_good.append(keep)

    def poll(self) -> None:
        """Let go of what is complete."""
        for entry in [entry for entry in list(self._entries) if entry.done()] if self._entries else ():
            self._let_go(entry)

    def _let_go(self, entry: _Entry) -> None:
        entry.keep = None  # outside of the lock: leases are given back here
        with self._changed:
            if entry in self._entries:
                self._entries.remove(entry)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._entries and not self._changed.wait_for(lambda: self._entries, _IDLE_S):
                    self._thread = None
                    return
                entry = self._entries[0]
            entry.wait()
            self._let_go(entry)
            del entry


parked = Parked()
"""Of this process."""

os.register_at_fork(after_in_child=lambda: parked._forget())
