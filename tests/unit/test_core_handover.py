"""Outbox, Inbox, Lease and views of `_core` used directly: what is handed over, how long it lives, what is refused."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from support import forking
from support.child import environment

from omni_fastshm import _core, segments
from omni_fastshm._core import Inbox, Lease, Outbox, Segment
from omni_fastshm.errors import ForkedConnector, LiveViews, MetadataError, SegmentError

KEY = (11, 22, 33)  # edge, both halves of the request's hash
DATA = 65536
READER0 = 1  # byte of the first reader slot's lock


@dataclass
class Place:
    """One producer with one data segment, and this process's view of it."""

    name: str
    outbox: Outbox
    inbox: Inbox

    def put(self, text: bytes, takers: int = 1, key: tuple[int, int, int] = KEY, stamp: int = 0) -> tuple[int, int]:
        room = self.outbox.reserve(len(text))
        assert room is not None
        ctypes.memmove(room.address, text, len(text))
        return self.outbox.publish(room, *key, len(text), takers, stamp)

    def get(self, at: tuple[int, int]) -> Lease:
        lease = self.inbox.hold(*at)
        assert lease is not None
        return lease


def open_inbox(name: str) -> Inbox:
    fd = segments.open_descriptor(name)
    assert fd is not None
    return Inbox(Segment(name, fd, False, True), functools.partial(segments.open_data, name))


@pytest.fixture
def make_place(namespace: str) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def build(size: int = DATA, key_slots: int = 0, first_sequence: int = 1) -> Place:
        control, endpoint = segments.make_control(namespace, _core.CONTROL_SIZE, _core.control_fixed_size(key_slots))
        outbox = Outbox(control, endpoint, key_slots, 60 * 10**9, first_sequence)
        outbox.add_segment(segments.make(segments.data_name(control.name, 0), size), 0)
        made.append(Place(control.name, outbox, open_inbox(control.name)))
        return made[-1]

    yield build
    for place in made:
        # The test's arguments live on until after the check for open descriptors.
        for segment in (place.outbox.control, place.inbox.control, *place.outbox.data_segments()):
            segment.close_descriptor()
    for name in segments.list_names(segments.owner_prefix() + namespace):
        segments.unlink(name)


@pytest.fixture
def place(make_place: Callable[..., Place]) -> Place:
    return make_place()


class TestReserve:
    def test_reservations_at_the_same_time_do_not_overlap(self, place: Place) -> None:
        rooms = [place.outbox.reserve(100) for _ in range(20)]
        at = sorted(room.address for room in rooms if room is not None)
        assert len(at) == 20
        assert all(b - a >= 128 for a, b in pairwise(at))
        assert place.outbox.live_blocks == 20

    def test_a_dropped_reservation_gives_its_bytes_back(self, place: Place) -> None:
        rooms = [place.outbox.reserve(100) for _ in range(5)]
        assert place.outbox.ring.used == 640
        del rooms[2]
        assert place.outbox.ring.used == 512
        rooms.clear()
        assert place.outbox.ring.used == 0
        assert place.outbox.live_blocks == 0

    def test_a_reservation_is_published_once(self, place: Place) -> None:
        room = place.outbox.reserve(10)
        assert room is not None
        place.outbox.publish(room, *KEY, 10, 1)
        with pytest.raises(ValueError, match="already"):
            place.outbox.publish(room, *KEY, 10, 1)
        del room
        assert place.outbox.pending() == 1

    def test_full_is_none_and_ends_when_a_block_is_free(self, place: Place) -> None:
        at = [place.put(b"x" * 16000) for _ in range(4)]
        assert place.outbox.reserve(16000) is None
        lease = place.get(at[1])
        assert lease.take()
        assert place.outbox.reserve(16000) is None
        del lease
        assert place.outbox.reserve(16000) is not None

    def test_more_blocks_than_one_chunk_of_descriptors(self, place: Place) -> None:
        at = [place.put(b"%d" % n) for n in range(700)]
        for n in (0, 255, 256, 511, 699):
            with memoryview(place.get(at[n])) as frame:
                assert bytes(frame) == b"%d" % n
        assert place.outbox.pending() == 700
        assert place.outbox.cancel_all() == 700
        assert place.outbox.sweep() == 700
        assert place.outbox.ring.used == 0

    def test_sequences_go_on_beyond_32_bits(self, make_place: Callable[..., Place]) -> None:
        """Field fault R22: the id counter starts at 2**32 - 5."""
        place = make_place(first_sequence=2**32 - 5)
        for n in range(10):
            at = place.put(b"%d" % n)
            assert at[1] == 2**32 - 5 + n
            assert place.inbox.hold(at[0], at[1] & 0xFFFFFFFF) is None or at[1] < 2**32
            lease = place.get(at)
            assert bytes(lease.view(0, 1)) == b"%d" % n
            assert lease.take()


class TestTake:
    def test_bytes_and_description_arrive(self, place: Place) -> None:
        lease = place.get(place.put(b"hello", key=(1, 2**64 - 1, 3)))
        assert bytes(memoryview(lease)) == b"hello"
        assert memoryview(lease).readonly
        assert (lease.key, lease.size, lease.shared, lease.brief) == ((1, 2**64 - 1, 3), 5, False, False)

    def test_hold_alone_uses_nothing_up(self, place: Place) -> None:
        at = place.put(b"a")
        lease = place.get(at)
        lease.release()
        assert place.outbox.pending() == 1
        assert place.get(at).take()
        assert place.inbox.hold(*at) is None

    def test_one_process_takes_twice(self, place: Place) -> None:
        at = place.put(b"twice", takers=2)
        first, second = place.get(at), place.get(at)
        assert first.shared
        assert first.take()
        assert second.take()
        assert not second.take()
        assert place.inbox.hold(*at) is None
        assert place.inbox.leases == 2
        del first
        assert place.outbox.sweep() == 0, "the second lease still looks at it"
        assert bytes(second.view(0, 5)) == b"twice"
        del second
        assert place.outbox.sweep() == 1

    def test_cancelled_while_held(self, place: Place) -> None:
        at = place.put(b"kept")
        lease = place.get(at)
        assert place.inbox.cancel(*at)
        assert not place.inbox.cancel(*at)
        assert not lease.take()
        assert bytes(lease.view(0, 4)) == b"kept"
        assert place.outbox.sweep() == 0

    def test_cancel_a_request_on_all_edges(self, place: Place) -> None:
        for edge in range(3):
            place.put(b"a", key=(edge, 5, 6))
        other = place.put(b"b", key=(0, 5, 7))
        assert place.inbox.cancel_request(5, 6) == 3
        assert place.inbox.cancel_request(5, 6) == 0
        assert place.get(other).take()

    def test_stale_handles_find_nothing(self, place: Place) -> None:
        old = place.put(b"old")
        assert place.get(old).take()
        place.outbox.sweep()
        new = place.put(b"new")
        assert new[0] == old[0], "the test needs the same descriptor"
        assert place.inbox.hold(*old) is None
        assert not place.inbox.cancel(*old)
        assert not place.outbox.cancel(*old)
        assert bytes(memoryview(place.get(new))) == b"new"

    @pytest.mark.parametrize("block", [256, 2**31, 2**32 - 1])
    def test_blocks_that_do_not_exist(self, place: Place, block: int) -> None:
        place.put(b"a")
        with pytest.raises(MetadataError, match=str(block)):
            place.inbox.hold(block, 1)
        assert not place.inbox.cancel(block, 1)

    @pytest.mark.parametrize("wrong", [(-1, 1), (2**32, 1), (0, -1), (0, 2**64), ("0", 1), (None, 1)])
    def test_weird_handles(self, place: Place, wrong: tuple[object, object]) -> None:
        at = place.put(b"a")
        with pytest.raises((TypeError, OverflowError)):
            place.inbox.hold(*wrong)  # type: ignore[arg-type]
        assert place.get(at).take()

    def test_a_missing_data_segment_keeps_no_bit(self, place: Place) -> None:
        at = place.put(b"a")
        segments.unlink(segments.data_name(place.name, 0))
        with pytest.raises(SegmentError, match="is gone"):
            place.inbox.hold(*at)
        assert place.inbox.leases == 0
        assert place.outbox.cancel(*at)
        assert place.outbox.sweep() == 1


class TestViews:
    def test_a_view_keeps_the_block(self, place: Place) -> None:
        lease = place.get(place.put(b"0123456789"))
        assert lease.take()
        view = lease.view(2, 5)
        assert (len(view), view.nbytes, view.readonly, lease.views) == (5, 5, False, 1)
        piece = memoryview(view)[1:3]
        del lease, view
        assert place.outbox.sweep() == 0
        assert bytes(piece) == b"34"
        del piece
        assert place.inbox.leases == 0
        assert place.outbox.sweep() == 1

    def test_release_with_live_views_is_refused(self, place: Place) -> None:
        lease = place.get(place.put(b"0123456789"))
        view = lease.view(0, 4)
        with pytest.raises(LiveViews, match="1 view"):
            lease.release()
        with pytest.raises(BufferError):
            lease.release()
        assert bytes(view) == b"0123"
        del view
        lease.release()
        lease.release()
        with pytest.raises(ValueError, match="given back"):
            lease.view(0, 1)
        with pytest.raises(ValueError, match="given back"):
            memoryview(lease)
        with pytest.raises(ValueError, match="given back"):
            lease.take()
        assert place.inbox.leases == 0

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, 11), (10, 1), (11, 0), (2**64 - 1, 2), (5, 2**64 - 3), (2**63, 2**63)]
    )
    def test_nothing_outside_the_frame(self, place: Place, offset: int, nbytes: int) -> None:
        lease = place.get(place.put(b"0123456789"))
        with pytest.raises(MetadataError, match="outside its frame"):
            lease.view(offset, nbytes)
        assert lease.views == 0

    def test_the_whole_frame_and_nothing_of_it(self, place: Place) -> None:
        lease = place.get(place.put(b"0123456789"))
        assert bytes(lease.view(0, 10)) == b"0123456789"
        assert bytes(lease.view(10, 0)) == b""

    def test_readonly_views_refuse_to_be_written(self, place: Place) -> None:
        lease = place.get(place.put(b"0123456789"))
        with pytest.raises(TypeError):
            memoryview(lease.view(0, 4, True))[0] = 1
        writable = lease.view(0, 4)
        memoryview(writable)[0] = 65
        assert bytes(memoryview(lease))[:1] == b"A"

    def test_pieces_outside_need_the_flag(self, place: Place) -> None:
        lease = place.get(place.put(b"plain"))
        with pytest.raises(MetadataError, match="no pieces"):
            lease.external(0, 0, 1)

    @pytest.mark.parametrize("kind", ["view", "lease", "inbox", "outbox", "room", "extent", "control", "ring"])
    def test_handles_are_neither_copied_nor_pickled(self, place: Place, kind: str) -> None:
        """A copy would give the same bytes back a second time."""
        lease = place.get(place.put(b"x" * 10))
        handle = {
            "view": lambda: lease.view(0, 1),
            "lease": lambda: lease,
            "inbox": lambda: place.inbox,
            "outbox": lambda: place.outbox,
            "room": lambda: place.outbox.reserve(10),
            "extent": lambda: place.outbox.lend(10),
            "control": lambda: place.outbox.control,
            "ring": lambda: place.outbox.ring,
        }[kind]()
        with pytest.raises(TypeError):
            copy.copy(handle)
        with pytest.raises(TypeError):
            pickle.dumps(handle)


class TestLoans:
    def test_a_loan_is_given_back_with_its_last_owner(self, place: Place) -> None:
        extent = place.outbox.lend(1000)
        assert extent is not None
        memoryview(extent)[:3] = b"abc"
        found = place.outbox.claim(extent.address + 64, 100)
        assert found is not None
        owner, number, offset = found
        assert owner is extent
        room = place.outbox.reserve(10)
        assert room is not None
        at = place.outbox.publish(room, *KEY, 1010, 1, 0, (extent,))
        assert place.outbox.claim(extent.address, 10) is None, "sent: it may not be claimed again"
        del extent, owner, found
        assert place.outbox.ring.used == 1024 + 64
        lease = place.get(at)
        assert bytes(lease.external(number, offset - 64, 3)) == b"abc"
        with pytest.raises(MetadataError, match="outside its segment"):
            lease.external(number, DATA - 10, 11)
        with pytest.raises(MetadataError, match="outside its segment"):
            lease.external(number, 2**64 - 1, 2)
        with pytest.raises(SegmentError, match="is gone"):
            lease.external(7, 0, 1)
        assert lease.take()
        del lease
        place.outbox.sweep()
        assert place.outbox.ring.used == 0
        assert place.outbox.lent == 0

    def test_only_whole_pieces_of_a_loan_are_claimed(self, place: Place) -> None:
        extent = place.outbox.lend(100)
        assert extent is not None
        for start, size in ((-1, 10), (0, 101), (95, 10), (1000, 1)):
            assert place.outbox.claim(extent.address + start, size) is None
        assert place.outbox.claim(extent.address + 90, 10) is not None
        assert place.outbox.claim(extent.address + 90, 10) is None, "claimed: another put has to copy it"
        extent.unclaim()
        assert place.outbox.claim(extent.address, 100) is not None
        assert extent.claim(extent.address + 50, 2**64 - 1 - extent.address) is None
        assert extent.claim(2**64 - 1, 2) is None


class TestKeys:
    def test_newest_of_several_producers(self, make_place: Callable[..., Place]) -> None:
        one, two = make_place(key_slots=64), make_place(key_slots=64)
        inboxes = (one.inbox, two.inbox)
        assert _core.find_newest(inboxes, *KEY) is None
        one.put(b"1", stamp=5)
        newer = two.put(b"2", stamp=6)
        assert _core.find_newest(inboxes, *KEY) == (two.inbox, *newer, 6, True), "one more, of another producer"
        newest = one.put(b"3", stamp=7)
        assert _core.find_newest(inboxes, *KEY) == (one.inbox, *newest, 7, True)
        assert _core.cancel_older((one.inbox,), *KEY, 7) == 1
        assert one.get(newest).take()
        assert _core.find_newest(inboxes, *KEY) == (two.inbox, *newer, 6, False)
        assert _core.find_newest(inboxes, 0, 0, 0) is None

    def test_entries_go_with_their_blocks(self, make_place: Callable[..., Place]) -> None:
        place = make_place(key_slots=64)
        for n in range(1000):
            at = place.put(b"x", key=(1, n, n), stamp=n + 1)
            assert _core.find_newest((place.inbox,), 1, n, n) == (place.inbox, *at, n + 1, False)
            assert place.get(at).take()
            assert _core.find_newest((place.inbox,), 1, n, n) is None


READER = """
import functools, sys
from omni_fastshm import segments
from omni_fastshm._core import Inbox, Segment
name, block, sequence = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
inbox = Inbox(Segment(name, segments.open_descriptor(name), False, True), functools.partial(segments.open_data, name))
lease = inbox.hold(block, sequence)
view = lease.view(0, 1)
print("holding", lease.take() if sys.argv[4] == "take" else "", flush=True)
sys.stdin.read()
"""


class TestDeadReaders:
    @pytest.mark.parametrize("taken", [True, False])
    def test_what_a_killed_reader_held_is_freed(self, place: Place, taken: bool) -> None:
        at = place.put(b"x" * 100)
        command = [sys.executable, "-c", READER, place.name, *map(str, at), "take" if taken else "hold"]
        with subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline().startswith("holding")
            assert place.inbox.blocks()[0][:4] == (*at, 0 if taken else 1, 1)
            assert place.outbox.reap() == 0, "it lives"
            reader.send_signal(signal.SIGKILL)
            assert reader.wait(20) == -signal.SIGKILL
        assert place.outbox.sweep() == 0
        assert place.outbox.reap() == 1
        assert place.outbox.reap() == 0
        if not taken:  # died while it decoded: somebody else may have it
            assert place.get(at).take()
        assert place.outbox.sweep() == 1

    def test_the_heir_frees_it_as_well(self, place: Place) -> None:
        at = place.put(b"x")
        command = [sys.executable, "-c", READER, place.name, *map(str, at), "take"]
        with subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            reader.kill()
            reader.wait(20)
        assert place.inbox.reap() == 1
        assert place.inbox.blocks() == []

    def test_late_comers_share_the_last_slot(self, place: Place) -> None:
        first, second = place.put(b"one"), place.put(b"two")
        others = segments.open_descriptor(place.name)
        assert others is not None
        try:
            for slot in range(_core.READER_SLOTS - 1):
                assert Segment.lock(others, place.name, READER0 + slot)
            late = open_inbox(place.name)
            assert not late.settled
            for at, text in ((first, b"one"), (second, b"two")):
                lease = late.hold(*at)
                assert lease is not None
                assert lease.brief
                assert bytes(memoryview(lease)) == text
                assert Segment.locked(others, place.name, READER0 + 31)
                assert [b[3] for b in late.blocks() if b[0] == at[0]] == [1 << 31]
                assert lease.take()
                lease.release()
                assert not Segment.locked(others, place.name, READER0 + 31)
            assert late.hold(*first) is None
            assert not Segment.locked(others, place.name, READER0 + 31)
            Segment.unlock(others, place.name, READER0 + 7)
            third = place.put(b"three")
            lease = late.hold(*third)
            assert lease is not None
            assert not lease.brief
            assert late.settled
            assert lease.take()
            del lease
        finally:
            os.close(others)
            late.control.close_descriptor()
        place.outbox.sweep()
        assert place.outbox.live_blocks == 0

    def test_a_late_comers_get_inside_another_leaves_the_outer_hold(self, place: Place) -> None:
        """Decoding may run any code, so may a signal; the inner get must not claim, and clear, the slot anew."""
        outer_at, inner_at = place.put(b"outer", takers=2), place.put(b"inner")
        others = segments.open_descriptor(place.name)
        assert others is not None
        try:
            for slot in range(_core.READER_SLOTS - 1):
                assert Segment.lock(others, place.name, READER0 + slot)
            late = open_inbox(place.name)
            outer = late.hold(*outer_at)
            assert outer is not None
            Segment.unlock(others, place.name, READER0 + 7)  # not for now: bits under two slots would be one too many
            for at in (inner_at, outer_at):
                inner = late.hold(*at)
                assert inner is not None
                assert {b[3] for b in late.blocks()} == {1 << 31} or at is outer_at
                assert inner.take()
                inner.release()
                assert [b[3] for b in late.blocks() if b[0] == outer_at[0]] == [1 << 31]
                assert Segment.locked(others, place.name, READER0 + 31)
            assert outer.take()
            outer.release()
            assert not Segment.locked(others, place.name, READER0 + 31)
            assert late.blocks() == []
        finally:
            os.close(others)
            late.control.close_descriptor()

    def test_a_slot_taken_over_is_cleared_first(self, place: Place) -> None:
        """Bits of a dead predecessor that nobody reaped would otherwise become the new owner's."""
        at = place.put(b"x")
        command = [sys.executable, "-c", READER, place.name, *map(str, at), "take"]
        with subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            reader.kill()
            reader.wait(20)
        other = place.put(b"y")
        lease = place.get(other)  # takes slot 0, the dead one's
        assert place.outbox.sweep() == 1
        assert lease.take()


OWNER_WITH_CHILD = """
import os, sys
from omni_fastshm import _core, segments
control, endpoint = segments.make_control(sys.argv[1], _core.CONTROL_SIZE, 4096)
outbox = _core.Outbox(control, endpoint, 0, 10**9)
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, b"x")  # what it inherited is disowned by now
    sys.stdin.read()  # until the test ends
    os._exit(0)
os.read(read, 1)
print(control.name, flush=True)
sys.stdin.read()
"""


class TestFork:
    def test_a_child_releases_nothing_of_its_parent(self, place: Place) -> None:
        at = place.put(b"parent")
        lease = place.get(at)
        assert lease.take()
        view = lease.view(0, 6)
        room = place.outbox.reserve(10)
        used = place.outbox.ring.used

        def child() -> None:
            nonlocal lease, view, room
            assert bytes(view) == b"parent"
            del lease, view, room
            gc.collect()
            for call in (
                lambda: place.outbox.reserve(1),
                lambda: place.outbox.lend(1),
                lambda: place.outbox.reap(),
                lambda: place.outbox.wait(0, 1, 1),
                lambda: place.inbox.hold(*at),
            ):
                try:
                    call()
                except ForkedConnector:
                    continue
                raise AssertionError("an inherited handle worked in the child")
            os._exit(0)

        forking.join(forking.fork(child))
        assert place.inbox.blocks()[0][3] == 1, "the child has cleared its parent's bit"
        assert place.outbox.ring.used == used
        assert bytes(view) == b"parent"
        fd = os.open(f"/dev/shm/{place.name}", os.O_RDWR)
        try:
            assert Segment.locked(fd, place.name, _core.LOCK_OWNER)
        finally:
            os.close(fd)

    def test_a_living_child_does_not_keep_a_dead_parents_lock(self, namespace: str) -> None:
        """Descriptors are not all that a child inherits: a mapping keeps the same open file, and with it its locks."""
        with subprocess.Popen(
            [sys.executable, "-c", OWNER_WITH_CHILD, namespace],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner:
            assert owner.stdout is not None
            name = owner.stdout.readline().strip()
            fd = segments.open_descriptor(name)
            assert fd is not None
            try:
                assert Segment.locked(fd, name, _core.LOCK_OWNER)
                owner.kill()
                owner.wait(20)
                locked = Segment.locked(fd, name, _core.LOCK_OWNER)
            finally:
                os.close(fd)
                segments.unlink(name)
        assert not locked, "the dead owner still counts as alive, for as long as a child of it lives"


class TestSegments:
    def test_what_is_not_a_control_segment_is_refused(self, namespace: str) -> None:
        for n, size in enumerate((64, 4096, _core.CONTROL_SIZE)):
            name = f"{segments.owner_prefix()}{namespace}.{n}"
            segment = segments.make(name, size, backed=min(size, 4096), populate=False)
            segments.unlink(name)
            with pytest.raises(MetadataError, match="not a control segment"):
                Inbox(segment, None)

    def test_an_empty_segment_maps_nothing(self, namespace: str) -> None:
        name = f"{segments.owner_prefix()}{namespace}.empty"
        fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        segments.unlink(name)
        segment = Segment(name, fd, True, False)
        assert (segment.size, segment.fd) == (0, -1)
        with pytest.raises(MetadataError):
            Inbox(segment, None)

    def test_errors_name_the_segment(self) -> None:
        with pytest.raises(SegmentError, match=r"inspect nowhere: Bad file descriptor") as caught:
            Segment("nowhere", 99999, True, False)
        assert (caught.value.op, caught.value.segment, caught.value.errno) == ("inspect", "nowhere", 9)

    def test_dropped_segments_give_their_memory_back(self, place: Place) -> None:
        at = place.put(b"x" * 1000)
        assert place.outbox.idle_segments() == []
        [used] = place.outbox.data_segments()
        assert not place.outbox.drop_segment(0, used)
        assert place.get(at).take()
        [(arena, number, segment)] = place.outbox.idle_segments()
        assert (arena, number) == (0, 0)
        assert place.outbox.drop_segment(arena, segment)
        assert not place.outbox.drop_segment(arena, segment)
        assert Segment.inspect(segment.fd, "x")[:2] == (0, 0)
        segment.close_descriptor()
        assert place.outbox.data_segments() == []
        assert place.outbox.reserve(1) is None
