"""Whether a connector is open, and how its calls wait for something to change."""

from __future__ import annotations

import math
import threading
import time

from omni_fastshm.errors import ConnectorClosed, ForkedConnector

__all__ = ["LONGEST_PAUSE_S", "PAUSE_S", "Gate", "Pauses", "Waits"]

PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.01


class Gate:
    """Closed until `stopped` is set to False, and again from when it is set to True.

    Args:
        changed: what waiting calls wait on; whoever closes the connector notifies it.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.stopped = True
        self.forked = False
        self.changed = changed

    def check(self, op: str) -> None:
        """Raise `ConnectorClosed` or `ForkedConnector` unless the connector is open."""
        if not self.stopped:
            return
        if self.forked:
            raise ForkedConnector("this connector was made before a fork: build one of its own in the child", op=op)
        raise ConnectorClosed(f"{op} on a connector that is closed", op=op)

    def pause(self, pauses: Pauses) -> bool:
        """Wait a little for something to change; False when the time is over."""
        seconds = pauses.next()
        if seconds <= 0:
            return False
        with self.changed:
            if not self.stopped:
                self.changed.wait(seconds)
        return True


class Pauses:
    """How long to sleep between two looks: first short, then longer, never beyond the deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause = PAUSE_S

    def next(self) -> float:
        left = self._deadline - time.monotonic()
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE_S)
        return min(left, pause)


class Waits(Pauses):
    """The same for a get: a twentieth of what was waited so far, from 0.2 to 20 ms."""

    def __init__(self, wait_s: float | None) -> None:
        self._start = time.monotonic()
        super().__init__(math.inf if wait_s is None else self._start + wait_s)

    def next(self) -> float:
        now = time.monotonic()
        return min(self._deadline - now, max(0.0002, min((now - self._start) / 20, 0.02)))
