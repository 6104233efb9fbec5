"""The control plane between the two processes of a measurement, the same for all peers.

A note goes one way and a pair of time stamps comes back, through a small shared page that both sides watch
without a system call. A pipe's wake-up costs more than a small message itself and would bury what is to be
measured.
"""

from __future__ import annotations

import os
import platform
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from bench import notes
from bench.payloads import buffer_of

# Word numbers, one cache line apart, so that the sides do not take lines from each other; then the note.
SENT, ANSWERED, STAMP_GOT, STAMP_READ, FAILED = 0, 8, 9, 10, 11
NOTES = 192
CAPACITY = 128 * 1024  # of one note
WINDOW = 4  # notes that may be under way at once
SIZES = 16  # word numbers of their sizes begin here; a note's kind is in the lowest byte

# Looks at the word this often before giving the core away: with fewer cores than busy processes, spinning on
# would keep the very process from running that is waited for. Between pinned, idle cores it is never reached.
SPINS = 200_000


class Mailbox:
    """One end; both ends name the same shared page.

    Python has no memory fences: publishing the note by storing a number after it is correct on x86-64, whose
    stores become visible in order.

    Args:
        name: of the page in /dev/shm.
        create: one end creates it, and unlinks it in the end.
        yields: give the core away when nothing came for some milliseconds. False where system calls are counted.
        limit_s: how long to wait for the other side, in seconds.
    """

    def __init__(self, name: str, *, create: bool, yields: bool = True, limit_s: float = 60.0) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise RuntimeError("the spinning control plane relies on the store order of x86-64")
        self._segment = SharedMemory(name, create=create, size=NOTES + WINDOW * CAPACITY if create else 0)
        self._owner = create
        self._bytes = buffer_of(self._segment)
        self._words = self._bytes[:NOTES].cast("Q")
        self._yields = yields
        self._limit = limit_s
        self.reset()

    def reset(self, window: int = 1) -> None:
        """Begin anew; both ends, while no message is on its way.

        Args:
            window: how many notes may be under way at once, at most `WINDOW`.
        """
        self._window = window
        self._sent = self._taken = 0
        for word in (SENT, ANSWERED, FAILED) if self._owner else ():
            self._words[word] = 0

    def send(self, note: Any) -> None:
        kind, message = notes.pack(note)
        size = len(message)
        slot = self._sent % self._window
        start = NOTES + slot * CAPACITY
        self._bytes[start : start + size] = message
        self._words[SIZES + slot] = size << 8 | kind
        self._sent += 1
        self._words[SENT] = self._sent

    def receive(self) -> Any:
        slot = self._taken % self._window
        self._taken += 1
        self._wait(SENT, self._taken)
        start = NOTES + slot * CAPACITY
        size = self._words[SIZES + slot]
        return notes.unpack(size & 255, self._bytes[start : start + (size >> 8)])

    def sent_elsewhere(self) -> None:
        """Count a message that travelled without a note."""
        self._sent += 1

    def taken_elsewhere(self) -> None:
        """Count a message that travelled without a note."""
        self._taken += 1

    def room(self) -> None:
        """Wait until another message may be under way."""
        if self._sent >= self._window:
            self._wait(ANSWERED, self._sent - self._window + 1)

    def answer(self, got_ns: int, read_ns: int) -> None:
        self._words[STAMP_GOT] = got_ns
        self._words[STAMP_READ] = read_ns
        self._words[ANSWERED] = self._taken

    def fail(self) -> None:
        """Say that this side has given up; the other side's wait raises `BrokenPipeError`."""
        self._words[FAILED] = 1

    def answers(self) -> tuple[int, int]:
        """Wait until the other side has answered what was sent last; its two stamps."""
        self._wait(ANSWERED, self._sent)
        return self._words[STAMP_GOT], self._words[STAMP_READ]

    def _wait(self, word: int, value: int) -> None:
        words = self._words
        limit = 0.0
        while True:
            for _ in range(SPINS):
                if words[word] >= value:
                    return
            if words[FAILED]:
                raise BrokenPipeError("the other process failed")
            now = time.monotonic()
            limit = limit or now + self._limit
            if now > limit:
                raise TimeoutError(f"the other process did not answer within {self._limit} s")
            if self._yields:
                self._give_way(word, value)

    def _give_way(self, word: int, value: int) -> None:
        for _ in range(SPINS // 100):
            os.sched_yield()
            if self._words[word] >= value:
                return

    def close(self) -> None:
        self._words.release()
        self._segment.close()
        if self._owner:
            self._segment.unlink()
