"""A signal handler at every single place where the interpreter may run one, one place after the other.

No signals: a trace function calls the handler, where a function of the package begins and where a call in it is over.
So the search is complete, and the same each time.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import logging
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
from support import leftovers
from support.waiting import within

import omni_fastshm
from omni_fastshm import segments
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConnectorClosed, SegmentError

PACKAGE = os.path.dirname(omni_fastshm.__file__)
SETTINGS = {"segment_bytes": 1 << 18, "max_bytes": 1 << 18, "put_timeout_s": 0, "shm_threshold_bytes": 0}
MOST_PLACES = 10_000


@functools.cache
def after_calls(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that follow a call."""
    found = list(dis.get_instructions(code))
    pairs = itertools.pairwise(found)
    return frozenset(after.offset for before, after in pairs if before.opname.startswith("CALL"))


class Interrupted:
    """Runs `handler` at place number `at` of what it traces; afterwards `places` says how many there were."""

    def __init__(self, handler: Callable[[], None], at: int) -> None:
        self.handler, self.at = handler, at
        self.places = 0
        self.where = "nowhere"
        self.fault = ""

    def __enter__(self) -> Interrupted:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "call" or (event == "opcode" and frame.f_lasti in after_calls(code)):
            if self.places == self.at:
                self.where = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"
                try:
                    self.handler()
                except Exception as error:
                    self.fault = f"the handler: {error!r}"
            self.places += 1
        return self.trace


class Life:
    """A connector from its first put to its close, and what a handler may do with it meanwhile."""

    def __init__(self, settings: dict[str, Any], consumer: Any) -> None:
        self.settings, self.consumer = settings, consumer
        self.connector: Any = SharedMemoryConnector(settings)
        self.sent: dict[str, Any] = {}

    def send(self, name: str) -> None:
        ok, _, metadata = self.connector.put("a", "b", name, np.zeros(1000))
        if ok:
            self.sent[name] = metadata

    def live(self, interrupted: Interrupted, removed: str) -> None:
        """With `removed`, somebody takes away names that end so, after the first put."""
        with interrupted, contextlib.suppress(ConnectorClosed):
            self.send("first")
            if removed:
                for name in leftovers.names(self.settings["namespace"]):
                    if name.endswith(removed):
                        segments.unlink(name)
                self.send("second")
            self.connector.cleanup("unknown")
        if not removed:  # otherwise some of it can be got no more, and its segments are beside those of the others
            self.look()
        with interrupted:
            self.connector.close()

    def look(self) -> None:
        """What was sent is there, and all segments together keep to the limit."""
        health = self.connector.health()
        if health["status"] == "ok":
            assert health["capacity_bytes"] <= self.settings["max_bytes"]
            for name, metadata in self.sent.items():
                assert self.consumer.get("a", "b", name, metadata) is not None, f"{name} is lost"

    def put(self) -> None:
        with contextlib.suppress(ConnectorClosed):
            self.send("joined")

    def close(self) -> None:
        self.connector.close()

    def put_and_close(self) -> None:
        self.put()
        self.close()

    def cleanup(self) -> None:
        self.connector.cleanup("unknown")

    def another(self) -> None:
        # By key it cannot be made while the directory is being made or removed.
        with contextlib.suppress(SegmentError), SharedMemoryConnector(self.settings) as another:
            another.put("a", "b", "another", np.zeros(1000))


def search(namespace: str, what: str, keyed: bool, removed: str) -> tuple[int, list[str]]:
    """How many places there were, and at which something went wrong."""
    settings = {**SETTINGS, "namespace": namespace, "key_lookup": keyed}
    faults: list[str] = []
    with SharedMemoryConnector({"namespace": namespace}) as consumer:
        for at in range(MOST_PLACES):
            life = Life(settings, consumer)
            interrupted = Interrupted(getattr(life, what), at)
            try:
                life.live(interrupted, removed)
            except Exception as error:
                interrupted.fault += repr(error)
            life.close()
            # A janitor that looks at all namespaces may just be taking away what it found half-made.
            if interrupted.fault or not within(1, lambda: not leftovers.names(namespace)):
                faults.append(f"{interrupted.where}: {interrupted.fault or leftovers.names(namespace)}")
                leftovers.remove(namespace)
            if interrupted.places <= at:
                break  # the life was over before
    return at, faults


def main(what: str, keyed: bool, removed: str) -> None:
    logging.disable(logging.CRITICAL)
    places, faults = search(os.environ["OMNI_FASTSHM_NAMESPACE"], what, keyed, removed)
    assert not faults, "\n".join(faults)
    assert 300 < places < MOST_PLACES, places
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "keyed", "".join(sys.argv[3:]))
