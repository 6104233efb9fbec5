"""The namespace's directory as `_core` gives it: producers, order, bells, waiting with signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from omni_fastshm import segments
from omni_fastshm._core import Directory, Segment

SIZE = 16384
NEVER = 2**63
SECOND = 10**9


@pytest.fixture
def segment(namespace: str) -> Iterator[Segment]:
    name = segments.directory_name(namespace)
    segment = segments.make(name, SIZE)
    yield segment
    segment.close_descriptor()  # the test's arguments live on until after the check for open descriptors
    segments.unlink(name)


@pytest.fixture
def directory(segment: Segment) -> Directory:
    return Directory(segment, True)


def test_valid_only_once_made(segment: Segment) -> None:
    assert not Directory.valid(segment)
    assert not Directory.made(segment)
    Directory(segment, True)
    assert Directory.valid(segment)
    assert Directory.made(segment)


def test_a_short_one_is_not_valid(namespace: str) -> None:
    name = f"{segments.directory_name(namespace)}.short"
    short = segments.make(name, 8)
    segments.unlink(name)
    assert not Directory.valid(short)
    assert not Directory.made(short)


def test_enter_leave_and_epoch(directory: Directory) -> None:
    epoch = directory.epoch
    assert directory.enter(5)
    assert directory.enter(2**64 - 1)
    assert directory.endpoints() == [5, 2**64 - 1]
    assert directory.epoch != epoch
    epoch = directory.epoch
    directory.leave(6)
    assert directory.epoch == epoch
    directory.leave(5)
    assert directory.endpoints() == [2**64 - 1]
    assert directory.epoch != epoch


def test_full(directory: Directory) -> None:
    assert all(directory.enter(n + 1) for n in range(1024))
    assert not directory.enter(9999)
    directory.leave(500)
    assert directory.enter(9999)
    assert len(directory.endpoints()) == 1024


def test_stamps_rise_from_one(directory: Directory) -> None:
    assert [directory.stamp() for _ in range(3)] == [1, 2, 3]


def test_a_ring_wakes_only_its_stage(directory: Directory) -> None:
    mine, other = directory.listen(3), directory.listen(4)
    directory.ring(3)
    assert directory.listen(3) != mine
    assert directory.listen(4) == other
    assert directory.listen(3 + 64) == directory.listen(3)
    assert directory.wait(3, mine, 0, NEVER, NEVER)
    start = time.monotonic()
    assert not directory.wait(4, other, 0, SECOND // 20, NEVER)
    assert time.monotonic() - start >= 0.05


def test_waiting_lets_other_threads_run_and_ends_with_the_ring(directory: Directory) -> None:
    seen = directory.listen(1)
    ring = threading.Thread(target=directory.ring, args=(1,))
    ring.start()
    try:
        assert directory.wait(1, seen, 0, 20 * SECOND, NEVER)
    finally:
        ring.join()


def test_a_signal_handler_runs_while_waiting(directory: Directory) -> None:
    calls = []
    seen = directory.listen(1)
    old = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    sender = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    sender.start()
    try:
        start = time.monotonic()
        while not calls and time.monotonic() - start < 20:
            assert not directory.wait(1, seen, 0, 20 * SECOND, NEVER)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, old)
    assert calls == [1]
    assert time.monotonic() - start < 15


def test_an_exception_from_a_handler_ends_the_wait(directory: Directory) -> None:
    seen = directory.listen(1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGUSR1, stop)
    sender = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            directory.wait(1, seen, 0, 20 * SECOND, NEVER)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, old)
