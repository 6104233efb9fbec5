"""Copying one large payload with several threads."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from omni_fastshm._core import Reservation
from omni_fastshm.codec import Plan

# A part names the room that it is written to: while somebody writes, that memory goes to no other payload, also when
# Ctrl-C ends the put at whatever instruction.
_Part = tuple[Plan, Reservation, int, int]
_Job = tuple[list[_Part], "SimpleQueue[Exception | None]"]


class Copiers:
    """Threads that copy beside the one that puts; they are started when first needed.

    No locks, for a signal handler may put, or close, while the thread that it interrupts is in here.

    Args:
        threads: how many copy together, the caller's own included; at least 2.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._unstarted = list(range(1, threads))
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False

    def pack(self, plan: Plan, room: Reservation) -> None:
        """`plan.pack_into`; returns when all of it is written.

        Nobody waits for a thread that is busy, or could not be started: whoever is free takes the next part.
        """
        ended: SimpleQueue[Exception | None] = SimpleQueue()
        parts: list[_Part] = [(plan, room, part, self._threads) for part in range(self._threads)]
        try:
            for _ in range(self._helpers()):
                self._jobs.put((parts, ended))
            _work(parts, ended)
            errors = [ended.get() for _ in range(self._threads)]
        finally:
            parts.clear()
        for error in errors:
            if error is not None:
                raise error

    def _helpers(self) -> int:
        """How many threads help, with all that can be had started."""
        while self._unstarted and not self._closed:
            number = self._unstarted.pop()
            try:
                threading.Thread(
                    target=_serve, args=(self._jobs,), name=f"omni-fastshm-copy-{number}", daemon=True
                ).start()
            except RuntimeError:  # no more threads
                self._unstarted.append(number)
                break
        return 0 if self._closed else self._threads - 1 - len(self._unstarted)

    def close(self) -> None:
        """The threads end with what they are copying."""
        self._closed = True
        for _ in range(1, self._threads):
            self._jobs.put(None)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _work(*job)
        del job  # while it waits for the next one, it keeps nothing of this one


def _work(parts: list[_Part], ended: SimpleQueue[Exception | None]) -> None:
    while True:
        try:
            plan, room, part, count = parts.pop()
        except IndexError:  # all are done, or somebody does them
            return
        try:
            plan.pack_part(room.address, part, count)
            ended.put(None)
        except Exception as error:  # the caller's, who waits for each part
            ended.put(error)
