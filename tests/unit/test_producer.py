"""The sending half: giving segments back beside running puts, the queue for room, exceptions at any moment, loans."""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.waiting import until

from omni_fastshm import codec, producer, segments
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import CodecError, ConnectorClosed, SegmentError

KIB = 1024
SEGMENT = 64 * KIB
WHOLE = SEGMENT - KIB  # with its header a payload of this size fills most of a segment


class Interrupted(BaseException):
    """What a signal handler may raise, as KeyboardInterrupt is."""


class Around:
    """Another object with some of its methods replaced; compiled classes cannot be patched."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds a connector with small segments, whose payloads all go to shared memory."""
    small = {"segment_bytes": SEGMENT, "max_bytes": 4 * SEGMENT, "put_timeout_s": 5, "shm_threshold_bytes": 0}
    return lambda **settings: connect(SharedMemoryConnector, **{**small, **settings})


def whole(seed: int = 0, nbytes: int = WHOLE) -> np.ndarray:
    return np.full(nbytes, seed, np.uint8)


def put(connector: Any, request: Any, data: Any) -> Any:
    ok, _, metadata = connector.put("a", "b", request, data)
    assert ok, f"put of {request} was refused"
    return metadata


def first(connector: Any, request: Any, metadata: Any) -> int:
    got = connector.get("a", "b", request, metadata)
    assert got is not None, f"{request} is gone"
    return int(got[0][0])


class TestTrimming:
    """Segments are given back while other threads put."""

    @pytest.fixture
    def two(self, make: Any) -> Any:
        """A connector with two idle segments."""
        connector = make(idle_segment_s=1000)
        for n, metadata in [(n, put(connector, n, whole(n))) for n in range(2)]:
            first(connector, n, metadata)
        sender = connector._producer
        assert len(sender.outbox.data_segments()) == 2
        sender._idle_ns = 1
        return connector

    def test_a_segment_that_is_in_use_again_is_not_dropped(self, two: Any) -> None:
        sender = two._producer
        idle = sender.outbox.idle_segments(0)
        rooms = [sender.outbox.reserve(WHOLE) for _ in range(2)]
        assert None not in rooms
        assert [sender.outbox.drop_segment(arena, segment) for arena, _, segment in idle] == [False, False]
        assert len(sender.outbox.data_segments()) == 2

    def test_a_place_taken_over_by_another_segment_is_not_dropped(self, two: Any) -> None:
        sender = two._producer
        arena, _, old = sender.outbox.idle_segments(0)[1]
        sender._drop(arena, old)
        sender._add_segment(SEGMENT)
        assert [s.name for s in sender.outbox.data_segments()] != [old.name]
        assert not sender.outbox.drop_segment(arena, old)
        assert len(sender.outbox.data_segments()) == 2

    def test_puts_between_the_look_and_the_drop(self, two: Any, make: Any) -> None:
        connector, sender = two, two._producer
        real, sent = sender.outbox, []

        def idle_segments(for_ns: int = 0) -> Any:
            found = real.idle_segments(for_ns)
            sender.outbox = real
            sent.extend(put(connector, f"between{n}", whole(n)) for n in range(2))
            return found

        sender.outbox = Around(real, idle_segments=idle_segments)
        health = connector.health()
        sender.outbox = real
        assert health["capacity_bytes"] >= 2 * WHOLE
        consumer = make()  # it has nothing mapped: a name that is gone shows
        assert [first(consumer, f"between{n}", sent[n]) for n in range(2)] == [0, 1]

    def test_two_that_trim_at_once(self, two: Any, namespace: str) -> None:
        connector, sender = two, two._producer
        real, depth = sender.outbox, []

        def idle_segments(for_ns: int = 0) -> Any:
            found = real.idle_segments(for_ns)
            if not depth:
                depth.append(1)
                sender.trim_idle()
                for n, metadata in [(n, put(connector, n, whole(n))) for n in range(2)]:
                    first(connector, n, metadata)  # a new segment in the place of the one that went
            return found

        sender.outbox = Around(real, idle_segments=idle_segments)
        sender._trim_at = 0
        assert connector.health()["status"] == "ok"
        sender.outbox = real
        assert sender._segments == len(real.data_segments()) == len(leftovers.data_names(namespace))

    def test_the_name_goes_only_after_the_segment(self, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        connector, sender = two, two._producer
        unlink, seen = segments.unlink, []

        def watched(name: str) -> None:
            seen.append(name)
            assert name not in [segment.name for segment in sender.outbox.data_segments()]
            unlink(name)

        with monkeypatch.context() as patch:
            patch.setattr(segments, "unlink", watched)
            connector.health()
        assert len(seen) == 1

    def test_room_that_is_reserved_and_not_yet_published_is_in_use(self, two: Any) -> None:
        connector, sender = two, two._producer
        room = sender.room(WHOLE, 0)
        assert room is not None
        sender._trim(0)
        others = [put(connector, n, whole(n)) for n in range(3)]
        address = room.address
        block, sequence = sender.outbox.publish(room, 1, 2, 3, WHOLE, 1)
        assert [first(connector, n, metadata) for n, metadata in enumerate(others)] == [0, 1, 2]
        del others
        rooms = [sender.room(WHOLE, 0) for _ in range(3)]
        assert all(other is not None and abs(other.address - address) >= WHOLE for other in rooms)
        assert sender.outbox.cancel(block, sequence)

    @pytest.mark.parametrize("before", [WHOLE, 20 * KIB])
    def test_an_idle_ring_takes_again_what_a_new_one_takes(self, make: Any, before: int) -> None:
        wanted = 40 * KIB

        def fits(connector: Any, nbytes: int) -> int:
            count = 0
            while connector.put("a", "b", count, whole(0, nbytes))[0]:
                count += 1
            return count

        settings = {"max_bytes": 10 * SEGMENT, "put_timeout_s": 0, "idle_segment_s": 1000}
        used, new = make(**settings), make(**settings)
        for n in range(fits(used, before)):
            used.cleanup(n)
        assert fits(used, wanted) == fits(new, wanted) > 10


class TestQueue:
    """Who waits for room, and in which order."""

    def test_a_large_put_that_waits_comes_before_a_small_one(self, make: Any, run_thread: Any) -> None:
        connector = make(max_bytes=SEGMENT, put_timeout_s=30)
        step = SEGMENT // 4 - KIB
        for n in range(4):
            put(connector, n, whole(n, step))
        sender = connector._producer
        real, waiting, served = sender.outbox, threading.Condition(), []
        threads: set[int] = set()

        def announce() -> int:
            with waiting:
                threads.add(threading.get_ident())
                waiting.notify_all()
            return real.announce()  # type: ignore[no-any-return]

        def reserve(size: int) -> Any:
            made = real.reserve(size)
            if made is not None:
                served.append(size > 2 * step)
            return made

        def both_wait(count: int) -> None:
            with waiting:
                assert waiting.wait_for(lambda: len(threads) == count, 20)

        sender.outbox = Around(real, announce=announce, reserve=reserve)
        large = run_thread(put, connector, "large", whole(1, 3 * step))
        both_wait(1)
        small = run_thread(put, connector, "small", whole(2, step))
        both_wait(2)
        connector.cleanup(0)  # room for the small one alone
        with pytest.raises(NotYet):
            small.result(0.2)
        assert served == []
        for n in range(1, 4):
            connector.cleanup(n)
        large.result(20)
        small.result(20)
        assert served == [True, False]
        assert not sender.queue

    def test_a_late_put_does_not_overtake(self, make: Any, run_thread: Any) -> None:
        """A put that never had to wait must not take what one in the queue waits for."""
        connector = make(max_bytes=SEGMENT, put_timeout_s=0)
        step = SEGMENT // 4 - KIB
        for n in range(4):
            put(connector, n, whole(n, step))
        sender = connector._producer
        ticket = producer._Ticket()
        sender.queue.append(producer.weakref.ref(ticket))
        connector.cleanup(0)
        assert not connector.put("a", "b", "late", whole(0, step))[0]
        del ticket
        assert connector.put("a", "b", "late", whole(0, step))[0]
        assert not sender.queue

    def test_no_waiting_still_means_waiting_for_a_segment_that_is_being_added(
        self, make: Any, run_thread: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connector = make(put_timeout_s=0, max_bytes=2 * SEGMENT)
        put(connector, "first", whole())
        real, inside, go_on = segments.make, threading.Event(), threading.Event()

        def slow(*args: Any, **kwargs: Any) -> Any:
            inside.set()
            assert go_on.wait(20)
            return real(*args, **kwargs)

        monkeypatch.setattr(segments, "make", slow)
        one = run_thread(connector.put, "a", "b", "one", whole(1, WHOLE // 2))
        assert inside.wait(20)
        two = run_thread(connector.put, "a", "b", "two", whole(2, WHOLE // 2))
        try:
            with pytest.raises(NotYet):
                two.result(0.2)
        finally:
            go_on.set()
        assert one.result(20)[0]
        assert two.result(20)[0]
        assert connector.health()["capacity_bytes"] <= 2 * SEGMENT

    def test_many_threads_on_an_idle_connector_without_waiting(self, make: Any, run_thread: Any) -> None:
        connector = make(put_timeout_s=0, max_bytes=64 * SEGMENT)
        start = threading.Barrier(8)

        def work(me: int) -> list[bool]:
            start.wait(20)
            return [connector.put("a", "b", f"{me}-{n}", whole())[0] for n in range(4)]

        answers = [future.result(30) for future in [run_thread(work, me) for me in range(8)]]
        assert answers == [[True] * 4] * 8


PLACES = {"_wait_for", "_find_room", "_queue_up", "_first", "_leave"}


class Interrupt:
    """Raises in the functions of `PLACES`, at the n-th of the instructions after which signal handlers may run.

    These are calls, starts of functions and jumps back; the interpreter runs no handler anywhere else, for example
    not between the end of a ``with`` block's body and the release of its lock.
    """

    def __init__(self, countdown: int) -> None:
        self.countdown = countdown
        self._before: dict[FrameType, str] = {}
        self._names: dict[CodeType, dict[int, str]] = {}

    def __enter__(self) -> Interrupt:
        self._old = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)
        self._before.clear()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != producer.__file__ or frame.f_code.co_name not in PLACES:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and self.countdown >= 0:
            before = self._before.get(frame, "")
            names = self._names.setdefault(
                frame.f_code, {each.offset: each.opname for each in dis.get_instructions(frame.f_code)}
            )
            self._before[frame] = names[frame.f_lasti]
            if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                self.countdown -= 1
                if self.countdown < 0:
                    raise Interrupted
        return self._step


class TestExceptions:
    """A signal handler may raise at any moment; what comes after must not suffer."""

    @pytest.fixture
    def full(self, make: Any) -> Any:
        """A connector whose only segment is full with request 0."""
        connector = make(max_bytes=SEGMENT, put_timeout_s=0.01)
        put(connector, 0, whole())
        return connector

    def works(self, connector: Any) -> None:
        """Room that becomes free goes to the next put, whose time would be over before it looked twice."""
        connector.cleanup(0)
        put(connector, 0, whole())
        assert not connector._producer.queue

    def test_at_each_moment_of_a_put_that_waits(self, full: Any) -> None:
        gc.disable()  # what a collection calls is not what is counted here
        try:
            interrupted = 0
            for moment in range(2000):
                try:
                    with Interrupt(moment) as interrupt:
                        ok = full.put("a", "b", "waits", whole())[0]
                except Interrupted:
                    interrupted += 1
                else:
                    assert not ok
                    assert interrupt.countdown >= 0, "the exception was swallowed"
                self.works(full)
                if interrupt.countdown >= 0:
                    break
        finally:
            gc.enable()
        assert interrupted > 20

    @pytest.mark.parametrize("place", ["announce", "wait", "reserve", "reap"])
    def test_in_the_middle_of_a_native_call(self, full: Any, place: str) -> None:
        sender = full._producer
        real = sender.outbox
        calls = []

        def fails(*args: Any) -> Any:
            answer = getattr(real, place)(*args)
            calls.append(place)
            if len(calls) == (3 if place == "reserve" else 1):
                raise Interrupted
            return answer

        sender.outbox = Around(real, **{place: fails})
        with pytest.raises(Interrupted):
            full.put("a", "b", "waits", whole())
        sender.outbox = real
        self.works(full)

    @pytest.mark.parametrize("place", ["_find_room", "_first", "_grow", "_leave"])
    def test_in_the_middle_of_a_step(self, full: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*args: Any) -> Any:
            raise Interrupted

        with monkeypatch.context() as patch:
            patch.setattr(producer.Producer, place, fails)
            try:
                full.put("a", "b", "waits", whole())
            except Interrupted:
                pass
            else:
                pytest.fail("the put did not get there")
        self.works(full)

    @pytest.mark.parametrize("made", [False, True])
    def test_while_a_segment_is_added(self, make: Any, made: bool, shm_names: Any, monkeypatch: Any) -> None:
        connector = make(put_timeout_s=0)
        put(connector, 0, whole())
        real = segments.make

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if made:
                real(*args, **kwargs)
            raise Interrupted

        with monkeypatch.context() as patch:
            patch.setattr(segments, "make", interrupted)
            with pytest.raises(Interrupted):
                connector.put("a", "b", 1, whole())
        for n in range(1, 4):
            put(connector, n, whole())
        connector.close()
        assert shm_names() == []

    def test_while_a_segment_is_given_back(self, make: Any, shm_names: Any, monkeypatch: Any) -> None:
        connector = make(put_timeout_s=0, idle_segment_s=0)
        for n in range(2):
            put(connector, n, whole())
        for n in range(2):
            connector.cleanup(n)

        def interrupted(name: str) -> None:
            raise Interrupted

        with monkeypatch.context() as patch:
            patch.setattr(segments, "unlink", interrupted)
            with pytest.raises(Interrupted):
                connector.health()
        for n in range(4):
            put(connector, n, whole())
        assert connector.health()["capacity_bytes"] <= 4 * SEGMENT
        connector.close()
        assert shm_names() == []

    def test_close_does_not_wait_for_those_who_left(self, full: Any, run_thread: Any) -> None:
        real = full._producer.outbox
        full._producer.outbox = Around(real, wait=lambda *_: (_ for _ in ()).throw(Interrupted()))
        for _ in range(3):
            with pytest.raises(Interrupted):
                full.put("a", "b", "waits", whole())
        full._producer.outbox = real
        run_thread(full.close).result(5)

    def test_ctrl_c_while_close_waits_for_takers(self, make: Any, shm_names: Any) -> None:
        connector = make(linger_s=30)
        put(connector, 0, whole())
        sender = connector._producer
        real = sender.outbox

        def ctrl_c(*_: Any) -> Any:
            raise KeyboardInterrupt

        sender.outbox = Around(real, wait=ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            connector.close()
        assert shm_names() == []
        connector.close()
        assert connector.health()["status"] == "closed"
        assert connector.health()["live_blocks"] == 0

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SegmentError])
    @pytest.mark.parametrize("place", ["Outbox", "_enter"])
    def test_an_exception_while_the_producer_is_made_leaves_nothing(
        self, make: Any, place: str, error: type[BaseException], shm_names: Any, monkeypatch: Any, caplog: Any
    ) -> None:
        connector = make()

        def fails(*_: Any, **__: Any) -> Any:
            raise error("no place")

        with monkeypatch.context() as patch:
            patch.setattr(producer if place == "Outbox" else producer.Producer, place, fails)
            if error is SegmentError:
                assert connector.put("a", "b", 0, whole()) == (False, 0, None)
            else:
                with pytest.raises(error):
                    connector.put("a", "b", 0, whole())
        assert [name for name in shm_names() if not name.endswith(".dir")] == []
        put(connector, 0, whole())
        caplog.clear()  # the log keeps the error, and with it the half-made producer


class Meddler:
    """Encoding it runs `action`."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action


class Refused:
    """No connector can carry this."""


@pytest.fixture
def meddling() -> None:
    def encode(meddler: Meddler) -> list[Any]:
        meddler.action()
        return []

    codec.register_type(Meddler, encode, lambda state: Meddler(list), name="test-producer-meddler")


class TestLoans:
    """Each loan is handed over by at most one put."""

    LONG = 16 * KIB

    @pytest.fixture
    def connector(self, make: Any) -> Any:
        return make(max_bytes=16 * SEGMENT, put_timeout_s=0)

    def loan(self, connector: Any) -> Any:
        loan = connector.allocate(self.LONG, np.uint8)
        loan[:] = 1
        return loan

    def handed_over(self, connector: Any, loan: Any) -> bool:
        """Put it, and tell whether the taker looks at the very bytes."""
        metadata = put(connector, "check", [loan])
        got = connector.get("a", "b", "check", metadata)[0]
        loan[5] += 1  # the promise forbids this; here it shows what was copied
        return bool(got[0][5] == loan[5])

    def test_of_two_puts_at_once_one_copies(self, connector: Any, meddling: None) -> None:
        loan, inner = self.loan(connector), []
        outer = put(connector, "outer", [loan, Meddler(lambda: inner.append(put(connector, "inner", [loan])))])
        mine = connector.get("a", "b", "outer", outer)[0][0]
        other = connector.get("a", "b", "inner", inner[0])[0][0]
        loan[5] = 77
        assert (mine[5], other[5]) == (77, 1), "the one that found it first hands it over"
        other[:] = 99
        assert set(mine.tolist()) == {1, 77}

    def test_several_pieces_of_one_loan_go_together(self, connector: Any) -> None:
        loan = self.loan(connector)
        half = self.LONG // 2
        metadata = put(connector, "r", {"low": loan[:half], "high": [loan[half:]]})
        loan[5], loan[half + 5] = 77, 88
        got = connector.get("a", "b", "r", metadata)[0]
        assert (got["low"][5], got["high"][0][5]) == (77, 88)

    def test_after_a_payload_that_cannot_be_carried(self, connector: Any) -> None:
        loan = self.loan(connector)
        with pytest.raises(CodecError):
            connector.put("a", "b", 0, [loan, Refused()])
        assert self.handed_over(connector, loan)

    def test_after_a_put_that_was_refused(self, connector: Any) -> None:
        loan = self.loan(connector)
        assert not connector.put("a", "b", 0, [loan, whole(0, 17 * SEGMENT)])[0]
        assert self.handed_over(connector, loan)

    def test_after_a_put_that_an_exception_ended(self, connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        loan = self.loan(connector)

        def ctrl_c(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(producer.Producer, "room", ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                connector.put("a", "b", 0, [loan])
        assert self.handed_over(connector, loan)

    def test_a_second_put_copies(self, connector: Any) -> None:
        loan = self.loan(connector)
        assert self.handed_over(connector, loan)
        assert not self.handed_over(connector, loan)


def test_a_payload_whose_segment_lost_its_name_ends_a_get_at_its_timeout(
    make: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a block, but no way to its bytes: waiting is all that is left, not looking again without end."""
    sender, consumer = make(key_lookup=True), make(key_lookup=True)
    sender.put("a", "b", "r", whole())
    for name in leftovers.data_names(namespace):
        os.unlink(leftovers.MOUNT / name)
    looks = []
    find = consumer._consumer.find

    def counted(*args: Any) -> Any:
        looks.append(find(*args))
        return looks[-1]

    monkeypatch.setattr(consumer._consumer, "find", counted)
    assert consumer.get("a", "b", "r", timeout=0.2) is None
    assert looks[0] is not None
    assert len(looks) < 20
    looks.clear()
    assert consumer.health()["leases"] == 0


def test_closing_again_leaves_the_memory_of_loans_that_readers_look_at(make: Any) -> None:
    """After the first close they no longer count as in use."""
    sender, receiver = make(), make()
    loan = sender.allocate(100_000, np.uint8)
    loan[:] = 7
    view = receiver.get("a", "b", "r", sender.put("a", "b", "r", loan)[2])[0]
    del loan
    producer = sender._producer
    sender.close()
    producer.close(0)
    producer.trim_idle()
    assert (view == 7).all(), "or rather: no SIGBUS"


def test_what_close_cancels_may_try_again_and_is_refused(make: Any) -> None:
    """The callbacks of a cancelled future run inside `close`: none may find the connector open, or hang there."""
    sender, again = make(max_bytes=SEGMENT, put_timeout_s=30), []
    put(sender, "held", whole())
    waits, cancelled = (sender.put("a", "b", name, whole(), wait=False) for name in "xy")
    until(waits.running)  # before that, it is cancelled as well

    def try_again(_: Any) -> None:
        with pytest.raises(ConnectorClosed):
            sender.put("a", "b", "z", 1, wait=False)
        again.append(True)

    cancelled.add_done_callback(try_again)
    closing = threading.Thread(target=sender.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert (cancelled.cancelled(), again) == (True, [True])
    with pytest.raises(ConnectorClosed):
        waits.result(10)


def test_allocate_on_a_connector_that_closes_says_so(make: Any) -> None:
    sender = make(max_bytes=SEGMENT, put_timeout_s=30)
    put(sender, "held", whole())
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            sender.allocate(WHOLE, np.uint8)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not sender._producer.queue:
        assert asking.is_alive()
    sender.close()
    asking.join(10)
    assert [type(error) for error in failed] == [ConnectorClosed]
    assert sender.health()["refused"] == 0
