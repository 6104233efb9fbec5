"""The receiving half: producers that cannot be reached for a moment, that close meanwhile, or whose memory is gone."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import leftovers

from omni_fastshm import consumer, segments
from omni_fastshm._core import READER_SLOTS, Segment
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import MetadataError, SegmentError
from omni_fastshm.reading import LOCK_READER0

SMALL = {"segment_bytes": 1 << 20, "max_bytes": 8 << 20, "shm_threshold_bytes": 0}


@pytest.fixture
def make(connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that builds a connector, and sees the producers there are as another process would."""

    def build(**settings: Any) -> Any:
        # A process has one view of each producer; what is opened from here on is opened anew.
        monkeypatch.setattr(consumer, "_inboxes", weakref.WeakValueDictionary())
        return connect(SharedMemoryConnector, **{**SMALL, **settings})

    return build


class Closing:
    """A producer's view whose producer closes, and is let go of by another thread, while this one looks at it."""

    leases = 0

    def __init__(self, owner: consumer.Consumer) -> None:
        self._owner = owner
        self.forgotten = 0

    @property
    def closed(self) -> bool:
        self._owner.known.pop("gone", None)
        return True

    def forget_segments(self) -> None:
        self.forgotten += 1


class TestProducers:
    """Who can be reached."""

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
    def test_one_that_could_not_be_opened_is_looked_for_again(
        self, make: Any, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        sender = make(key_lookup=True)
        assert sender.put("a", "b", "r", np.arange(10))[0]
        receiver = make(key_lookup=True)
        asked = []

        def fails(name: str) -> Any:
            asked.append(name)
            raise SegmentError("no descriptors left", errno=number)

        with monkeypatch.context() as patch:
            patch.setattr(segments, "open_descriptor", fails)
            assert receiver.get("a", "b", "r") is None
        assert [name.rpartition(".")[2] for name in asked] == ["ctl"]
        assert "cannot be reached" in caplog.text
        got = receiver.get("a", "b", "r", timeout=5)
        assert got is not None
        assert got[0][9] == 9

    def test_one_that_stays_out_of_reach_is_told_once_in_an_epoch(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert make(key_lookup=True).put("a", "b", "r", np.arange(10))[0]
        receiver = make(key_lookup=True)
        reasons, open_descriptor = ["no descriptors left"], segments.open_descriptor

        def fails(name: str) -> Any:
            raise SegmentError(reasons[-1], errno=errno.EMFILE)

        def told() -> int:
            for _ in range(5):
                assert receiver.get("a", "b", "r") is None
            count = caplog.text.count("cannot be reached")
            caplog.clear()
            return count

        with monkeypatch.context() as patch:
            patch.setattr(segments, "open_descriptor", fails)
            assert told() == 1
            reasons.append("no memory left")
            assert [told(), told()] == [1, 0]
            patch.setattr(segments, "open_descriptor", open_descriptor)
            make(key_lookup=True).put("a", "b", "other", np.arange(10))  # somebody came: a new epoch
            patch.setattr(segments, "open_descriptor", fails)
            patch.setattr(consumer, "_inboxes", weakref.WeakValueDictionary())
            assert told() == 2
        assert receiver.get("a", "b", "r", timeout=5) is not None

    def test_one_that_cannot_be_opened_hides_no_other(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        senders = [make(key_lookup=True) for _ in range(3)]
        for n, sender in enumerate(senders):
            assert sender.put("a", "b", n, np.arange(10))[0]
        receiver = make(key_lookup=True)
        real, asked = segments.open_descriptor, []

        def fails_once(name: str) -> Any:
            asked.append(name)
            if len(asked) == 1:
                raise SegmentError("no descriptors left", errno=errno.EMFILE)
            return real(name)

        monkeypatch.setattr(segments, "open_descriptor", fails_once)
        found = [receiver.get("a", "b", n) is not None for n in (1, 0, 2)]
        assert found == [True, True, True]
        controls = [name for name in asked if name.endswith(".ctl")]
        assert len(controls) == 4, "the first look opened two, the second the one that had failed"
        caplog.clear()  # the log keeps the error, and with it the frames it went through

    def test_look_ups_without_news_open_nothing(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        sender = make(key_lookup=True)
        sender.put("a", "b", 0, np.arange(10))
        receiver = make(key_lookup=True)
        assert receiver.get("a", "b", 0) is not None

        def never(name: str) -> Any:
            raise AssertionError(f"opened {name} again")

        monkeypatch.setattr(segments, "open_descriptor", never)
        for n in range(1, 5):
            sender.put("a", "b", n, np.arange(10))
            assert receiver.get("a", "b", n) is not None

    def test_one_that_another_thread_let_go_of_first(self) -> None:
        own = consumer.Consumer()
        other = Closing(own)
        own.known["gone"] = other  # type: ignore[assignment]
        own.forget_closed()
        assert own.known == {}
        assert other.forgotten == 1
        assert own.leases == 0

    def test_health_while_producers_close(self, make: Any, run_thread: Any) -> None:
        receiver = make(key_lookup=True)
        stop: list[int] = []

        def look() -> int:
            count = 0
            while not stop:
                assert receiver.health()["status"] == "ok"
                receiver.cleanup("nobody")
                count += 1
            return count

        looking = [run_thread(look) for _ in range(3)]
        try:
            for n in range(15):
                sender = make(key_lookup=True, segment_bytes=65536)
                sender.put("a", "b", n, np.arange(10))
                assert receiver.get("a", "b", n) is not None
                sender.close()
        finally:
            stop.append(1)
        assert all(future.result(20) for future in looking)


class TestGone:
    """Memory that went away between the look and the reading."""

    @pytest.fixture
    def parts(self, make: Any, namespace: str) -> tuple[Any, Any]:
        """A sender, and metadata of a payload with its frame in one segment and a loan in another."""
        sender = make()
        rest = sender.allocate(1_000_000, np.uint8)
        loan = sender.allocate(500_000, np.uint8)
        del rest
        loan[:] = 7
        _, _, metadata = sender.put("a", "b", "r", {"loan": loan})
        assert len(leftovers.data_names(namespace)) == 2
        return sender, metadata

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("copy", [None, True])
    def test_one_of_two_segments(
        self, make: Any, parts: Any, namespace: str, number: int, copy: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sender, metadata = parts
        real, opened = segments.open_data, []

        def vanishes(control: str, wanted: int) -> Any:
            opened.append(wanted)
            if wanted == number:
                os.unlink(leftovers.MOUNT / segments.data_name(control, wanted))
            return real(control, wanted)

        monkeypatch.setattr(segments, "open_data", vanishes)
        receiver = make()
        assert receiver.get("a", "b", "r", metadata, copy=copy) is None
        assert opened == [0, 1][: number + 1], "the frame is read first, then what lies outside of it"
        assert receiver.health()["leases"] == 0
        assert (receiver.health()["errors"], receiver.health()["misses"]) == (0, 1)
        inbox = consumer.open_inbox(metadata["shm"]["name"])
        assert inbox is not None
        [(block, sequence, pending, holders, *_)] = inbox.blocks()
        assert (block, sequence) == (metadata["shm"]["block"], metadata["shm"]["sequence"])
        assert (pending, holders) == (1, 0)
        sender.cleanup("r")
        assert sender.health()["live_blocks"] == 0

    def test_other_errors_are_not_hidden(self, make: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        _, metadata = parts

        def fails(control: str, number: int) -> Any:
            raise SegmentError("no memory for it", errno=errno.ENOMEM)

        with monkeypatch.context() as patch:
            patch.setattr(segments, "open_data", fails)
            receiver = make()
            with pytest.raises(SegmentError, match="no memory for it"):
                receiver.get("a", "b", "r", metadata)
        assert receiver.health()["leases"] == 0


def test_a_late_comer_with_wrong_metadata_leaves_the_shared_slot(make: Any) -> None:
    """All processes from the 32nd on wait for it; the error that its caller keeps must not keep the lease."""
    sender = make()
    metadata = sender.put("a", "b", "r", np.arange(10_000))[2]
    others = segments.open_descriptor(metadata["shm"]["name"])
    assert others is not None
    try:
        for slot in range(READER_SLOTS - 1):
            assert Segment.lock(others, "others", LOCK_READER0 + slot)
        late = make()
        wrong = {"shm": {**metadata["shm"], "size": 7}, "size": 7}
        with pytest.raises(MetadataError, match="7 bytes") as kept:
            late.get("a", "b", "r", wrong)
        assert not Segment.locked(others, "others", LOCK_READER0 + READER_SLOTS - 1)
        assert late.health()["leases"] == 0
        assert late.get("a", "b", "r", metadata)[0][-1] == 9999
        del kept
    finally:
        os.close(others)
