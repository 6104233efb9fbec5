"""How often it is said that a put found no room, and how many are counted."""

from __future__ import annotations

import errno
import threading
from logging import DEBUG, WARNING

import numpy as np
import pytest

from omni_fastshm import SegmentError, SharedMemoryConnector
from omni_fastshm.connectors import _refusals
from omni_fastshm.connectors._refusals import Refusals

SAID, SILENT = (WARNING, ""), (DEBUG, "")


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(_refusals, "time", made)
    return made


def test_the_first_then_one_in_a_while_with_the_number(clock: Clock) -> None:
    refusals = Refusals(5.0)
    assert [refusals.note("full", "a", "b") for _ in range(3)] == [SAID, SILENT, SILENT]
    clock.now = 4.9
    assert refusals.note("full", "a", "b") == SILENT
    clock.now = 5.0
    assert refusals.note("full", "a", "b") == (WARNING, " (3 more since the last such line)")
    assert refusals.note("full", "a", "b") == SILENT
    clock.now = 10.0
    assert refusals.note("full", "a", "b") == (WARNING, " (1 more since the last such line)")
    clock.now = 15.0
    assert refusals.note("full", "a", "b") == SAID
    assert refusals.by_reason == {"full": 8}


def test_other_edges_and_other_reasons_are_said(clock: Clock) -> None:
    refusals = Refusals()
    told = [refusals.note(*what) for what in (("full", "a", "b"), ("full", "a", "c"), ("too_large", "a", "b"))]
    assert told == [SAID, SAID, SAID]
    refusals.count("full")
    assert refusals.by_reason == {"full": 3, "too_large": 1}


def test_of_very_many_edges_some_share_a_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_refusals, "_MOST", 3)
    refusals = Refusals()
    assert [refusals.note("full", "a", str(n)) for n in range(6)] == [SAID] * 4 + [SILENT] * 2
    assert len(refusals._said) <= 4
    assert refusals.by_reason == {"full": 6}


def test_the_counts_are_there_while_another_thread_counts() -> None:
    """A child may be forked at that moment, and has no such thread to wait for."""
    refusals = Refusals()
    refusals.count("full")
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with refusals._lock:
            held.set()
            over.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    found: list[dict[str, int]] = []
    reader = threading.Thread(target=lambda: found.append(refusals.by_reason), daemon=True)
    reader.start()
    reader.join(5)
    over.set()
    holder.join()
    assert found == [{"full": 1}]


def test_threads_lose_none() -> None:
    refusals = Refusals()
    threads = [threading.Thread(target=lambda: [refusals.note("full", "a") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals.by_reason == {"full": 8000}


def test_free_room_that_lies_in_pieces_is_told_as_that(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"namespace": namespace, "segment_bytes": 1 << 20, "max_bytes": 1 << 20, "put_timeout_s": 0}
    with SharedMemoryConnector(settings) as connector:
        sent = [connector.put("a", "b", str(n), np.zeros(200_000, np.uint8))[2] for n in range(5)]
        for n in (0, 2, 4):
            connector.get("a", "b", str(n), sent[n])
        assert connector.put("a", "b", "wide", np.zeros(300_000, np.uint8))[0] is False
        with pytest.raises(
            SegmentError, match=r"no room for a loan: .* in pieces, the longest of 2\d{5} bytes"
        ) as caught:
            connector.allocate(300_000, np.uint8)
        assert caught.value.errno == errno.ENOSPC
        for n in (1, 3):
            connector.cleanup(str(n))
    assert any("in pieces, the longest of 2" in record.message for record in caplog.records)
