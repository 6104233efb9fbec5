"""The limit of waking somebody: a store and one FUTEX_WAKE; the consumer sleeps in one FUTEX_WAIT.

There is no message: both ends know the load beforehand.
"""

from __future__ import annotations

import ctypes
import errno
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from bench import payloads

label = "bare futex wake (limit)"
role = "limit"
own_channel = True
one_process = False

SYS_FUTEX = 202  # of x86-64, as the measurements' control plane
WAIT, WAKE = 0, 1
WITHIN_S = 60


class TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    def __init__(self, place: str, side: str, load: str) -> None:
        self.owner = side != "get"
        self.segment = SharedMemory(f"{place}-futex", create=self.owner, size=4096 if self.owner else 0)
        self.word = ctypes.c_uint32.from_buffer(payloads.buffer_of(self.segment))
        self.address = ctypes.c_void_p(ctypes.addressof(self.word))
        self.call = ctypes.CDLL(None, use_errno=True).syscall
        self.limit = ctypes.byref(TimeSpec(WITHIN_S, 0))
        self.data = payloads.make(load)
        self.seen = 0

    def close(self) -> None:
        del self.word
        self.segment.close()
        if self.owner:
            self.segment.unlink()


def open(place: str, side: str, load: str, depth: int) -> Word:
    return Word(place, side, load)


def put(end: Word, data: Any) -> None:
    end.word.value += 1
    end.call(SYS_FUTEX, end.address, WAKE, 1, None, None, 0)


def get(end: Word, note: None) -> Any:
    while end.word.value == end.seen:
        failed = end.call(SYS_FUTEX, end.address, WAIT, end.seen, end.limit, None, 0)
        if failed and ctypes.get_errno() == errno.ETIMEDOUT:
            raise TimeoutError(f"nobody woke it within {WITHIN_S} s")
    end.seen = end.word.value
    return end.data
