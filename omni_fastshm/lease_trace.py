"""Where leases were taken, for finding the one that somebody forgot: `OMNI_FASTSHM_TRACE_LEASES`."""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from typing import Any, NamedTuple

from omni_fastshm._core import Inbox, Lease
from omni_fastshm.errors import ConfigError

VARIABLE = "OMNI_FASTSHM_TRACE_LEASES"
_DEPTH = 12  # calls shown of each place
_OURS = os.path.dirname(__file__) + os.sep


class _Trace(NamedTuple):
    inbox: weakref.ref[Inbox]
    edge: tuple[str, str]
    request: str
    size: int
    place: traceback.StackSummary


def make_trace() -> LeaseTrace | None:
    """A trace where the environment asks for one.

    Raises:
        ConfigError: the variable is no number of seconds.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"{VARIABLE}: {text!r:.40} is no number of seconds: from so many on leases are long; 0 is off"
        )
    return LeaseTrace(seconds) if seconds else None


class LeaseTrace:
    """Remembers for each block that was taken where that was, for as long as somebody looks at it.

    Args:
        long_s: from so many seconds on a lease is a long one.
    """

    def __init__(self, long_s: float) -> None:
        self._long_s = long_s
        self._traces: dict[tuple[str, int, int], _Trace] = {}
        self._tidy_at = 256
        self._lock = threading.RLock()

    def note(self, inbox: Inbox, block: int, sequence: int, edge: tuple[str, str], request: str, lease: Lease) -> None:
        """That block has been taken now, by whoever called."""
        stack = traceback.extract_stack(limit=_DEPTH + 8)
        place = traceback.StackSummary.from_list([each for each in stack if not each.filename.startswith(_OURS)])
        trace = _Trace(weakref.ref(inbox), edge, request, lease.size, place)
        with self._lock:
            self._traces.setdefault((inbox.control.name, block, sequence), trace)
            if len(self._traces) >= self._tidy_at:
                self._ages()
                self._tidy_at = max(256, 2 * len(self._traces))

    def _ages(self) -> dict[tuple[str, int, int], float]:
        """Ages of the blocks that are still looked at; the rest is forgotten."""
        inboxes = {key[0]: trace.inbox() for key, trace in self._traces.items()}
        held = {
            (name, block, sequence): age
            for name, inbox in inboxes.items()
            if inbox is not None
            for block, sequence, age in inbox.held()
        }
        self._traces = {key: trace for key, trace in self._traces.items() if key in held}
        return held

    def long_leases(self) -> list[dict[str, Any]]:
        """The long ones, oldest first: edge, request id, bytes, age, and where they were taken, innermost call last."""
        with self._lock:
            ages = self._ages()
            found = [
                {
                    "from_stage": trace.edge[0],
                    "to_stage": trace.edge[1],
                    "request_id": trace.request,
                    "bytes": trace.size,
                    "age_s": ages[key],
                    "taken_at": [f"{each.filename}:{each.lineno} in {each.name}" for each in trace.place[-_DEPTH:]],
                }
                for key, trace in self._traces.items()
                if ages[key] >= self._long_s
            ]
        return sorted(found, key=lambda each: -each["age_s"])
