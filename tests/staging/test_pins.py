"""Page-locking: lazily, each segment once, in chunks under a cap; undone before the memory goes, or after a failure."""

from __future__ import annotations

import gc
import logging
import os
from typing import Any

import pytest
import torch
from support import leftovers
from support.child import run_script
from support.fake_device import ALREADY, REFUSED, FakeDevices

from omni_fastshm import segments
from omni_fastshm._core import Segment, segment_at
from omni_fastshm._staging_pins import Pins
from omni_fastshm.staging import devices, pins

MIB = 1 << 20
BIG = torch.arange(60_000, dtype=torch.float32)


@pytest.fixture
def segment(namespace: str) -> Any:
    name = f"omnifs.{os.getuid()}.{namespace}.pins"
    made = segments.make(name, 4 * MIB)
    yield made
    segments.unlink(name)
    made.close_descriptor()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_device_tensor_no_page_locking(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", BIG)[2])
    assert got is not None
    assert not fake.registrations


def test_on_the_first_device_tensor_and_then_never_again(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    for n in range(10):
        metadata = producer.put("a", "b", n, fake.tensor(BIG, n % 2))[2]
        got = consumer.get("a", "b", n, metadata, device=f"meta:{n % 2}")[0]
        assert torch.equal(fake.read(got), BIG)
    assert fake.registrations == 2, "one mapping of the producer, one of the consumer"
    assert producer.health()["pinned_bytes"] == 2 * (4 << 20) == sum(fake.registered.values())
    producer.close()
    del producer, got
    consumer.close()
    fake.run_all()
    gc.collect()
    assert not fake.registered


def test_views_of_a_page_locked_segment_are_page_locked(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make(pin=True)
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", {"t": BIG})[2])[0]
    address = got["t"].data_ptr()
    assert any(start <= address < start + size for start, size in fake.registered.items())


def test_a_loan_is_page_locked_when_asked_for(make: Any, fake: FakeDevices) -> None:
    loan = make(pin=True).allocate((60_000,), torch.float32)
    start, size = next(iter(fake.registered.items()))
    assert start <= loan.data_ptr() < start + size
    plain = make(pin="auto").allocate((60_000,), torch.float32)
    assert len(fake.registered) == 1
    del loan, plain


def test_pin_false(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(pin=False), make(pin="false")
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", fake.tensor(BIG))[2], device="meta")[0]
    assert torch.equal(fake.read(got), BIG)
    assert not fake.registrations


def test_pin_true_without_a_device(make: Any, fake: FakeDevices, caplog: pytest.LogCaptureFixture) -> None:
    devices.drop("meta")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    producer, consumer = make(pin=True), make(pin=True)
    for n in range(3):
        got = consumer.get("a", "b", n, producer.put("a", "b", n, {"t": BIG})[2])[0]
        assert torch.equal(got["t"], BIG)
    loan = producer.allocate((5,), torch.float32)
    assert len(warnings_of(caplog)) == 1
    assert "finds no CUDA device" in warnings_of(caplog)[0]
    devices.use(fake)
    del loan, got


@pytest.mark.parametrize("good", [0, 1, 3])
def test_registration_fails_halfway(
    make: Any, fake: FakeDevices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """R57: the first chunks are given back, the error does not come up elsewhere, copies go on, one warning."""
    monkeypatch.setattr(pins, "_chunk_bytes", MIB)
    producer, consumer = make(segment_bytes=4 * MIB), make(segment_bytes=4 * MIB)
    for n in range(3):
        fake.refuse = [*[0] * good, REFUSED] if n == 0 else []
        metadata = producer.put("a", "b", n, fake.tensor(BIG))[2]
        if n == 0:
            assert not fake.registered
            assert fake.registrations == fake.unregistrations == good
        assert fake.pending == 0
        fake.refuse = [REFUSED] if n == 0 else []
        got = consumer.get("a", "b", n, metadata, device="meta")[0]
        assert torch.equal(fake.read(got), BIG)
    assert not fake.registered, "it was tried again"
    assert fake.registrations == good
    assert len(warnings_of(caplog)) == 1
    assert f"error {REFUSED}" in warnings_of(caplog)[0]
    assert producer.health()["pinned_bytes"] == 0


def test_nobody_copies_through_what_may_be_unregistered_yet(
    fake: FakeDevices, segment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread goes ahead without the lock as soon as `covers` is true."""
    own, seen = Pins(chunk_bytes=MIB), []

    def looking(call: Any) -> Any:
        def called(*args: Any) -> Any:
            found = own.find(segment.address)
            seen.append(found is not None and (found.covers(segment.address, 1) or found.done > segment.address))
            return call(*args)

        return called

    for name in ("register", "unregister", "describe_error"):
        monkeypatch.setattr(fake, name, looking(getattr(fake, name)))
    fake.refuse = [0, 0, REFUSED]
    found = own.ensure(segment.address, 1, fake, 8 * MIB)
    assert seen == [False] * 6
    assert found is not None
    assert found.covers(segment.address, segment.size)
    assert not fake.registered


def test_somebody_else_has_it_locked(make: Any, fake: FakeDevices, caplog: pytest.LogCaptureFixture) -> None:
    producer = make()
    address = producer.allocate((60_000,), torch.float32).data_ptr()
    segment = segment_at(address)
    assert segment is not None
    assert fake.register(segment.address, segment.size) == 0
    producer.put("a", "b", "r", fake.tensor(BIG))
    assert fake.registrations == 1
    assert fake.unregistrations == 0, "it is theirs"
    assert f"error {ALREADY}" in warnings_of(caplog)[0]
    assert fake.unregister(segment.address) == 0
    del segment
    producer.cleanup("r")


def test_two_threads_meet_at_the_first_tensor(make: Any, fake: FakeDevices, run_thread: Any) -> None:
    producer = make()
    producer.put("a", "b", "first", BIG)
    tensors = [fake.tensor(BIG) for _ in range(8)]
    puts = [run_thread(producer.put, "a", "b", n, tensor) for n, tensor in enumerate(tensors)]
    assert all(each.result(20)[0] for each in puts)
    assert fake.registrations == 1


def test_connectors_of_a_process_share_the_page_locking(make: Any, fake: FakeDevices) -> None:
    producer, consumers = make(), [make() for _ in range(3)]
    for n, consumer in enumerate(consumers):
        assert consumer.get("a", "b", n, producer.put("a", "b", n, BIG)[2], device="meta") is not None
    assert fake.registrations == 1


def test_growth_and_retirement(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(segment_bytes=MIB, max_bytes=16 * MIB, idle_segment_s=0), make()
    held = [producer.put("a", "b", n, fake.tensor(torch.arange(200_000.0) + n))[2] for n in range(5)]
    assert fake.registrations == 5
    for n, metadata in enumerate(held):
        got = consumer.get("a", "b", n, metadata, device="meta")[0]
        assert torch.equal(fake.read(got), torch.arange(200_000.0) + n)
    fake.run_all()
    del got
    producer.put("a", "b", "last", fake.tensor(torch.arange(1_500_000.0)))
    producer.cleanup("last")
    for _ in range(3):
        producer.health()
    consumer.get("a", "b", "x", producer.put("a", "b", "x", BIG)[2])
    gc.collect()
    assert len(leftovers.data_names(producer.namespace)) == 1
    assert len(fake.registered) <= 2, "segments that went are unregistered"
    assert fake.registrations - fake.unregistrations == len(fake.registered)


def test_a_segment_that_is_still_growing(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(segment_bytes=32 * MIB), make()
    for n, size in enumerate((60_000, 2 * MIB, 5 * MIB)):  # elements: the last one needs what comes late
        sent = torch.arange(float(size)) + n
        got = consumer.get("a", "b", n, producer.put("a", "b", n, fake.tensor(sent))[2], device="meta")[0]
        assert torch.equal(fake.read(got), sent)
        fake.run_all()
        address, nbytes = fake.last_copies[0]
        ends = {start: start + size for start, size in fake.registered.items()}
        assert any(start <= address < end for start, end in ends.items())
        assert any(start < address + nbytes <= end for start, end in ends.items())


def test_more_of_it_is_refused(make: Any, fake: FakeDevices, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    """What is registered may be in use: it stays, and only the rest goes without."""
    name = f"omnifs.{os.getuid()}.{namespace}.grows"
    segment = segments.make(name, MIB, room=4 * MIB)
    segments.unlink(name)
    own = Pins()
    found = own.ensure(segment.address, 1, fake, 8 * MIB)
    assert found is not None
    segment.extend(2 * MIB)
    assert own.ensure(segment.address, MIB, fake, 8 * MIB) is found
    assert len(found.chunks) == 1
    fake.refuse = [REFUSED]
    own.ensure(segment.address + MIB, 1, fake, 8 * MIB)
    assert fake.registered == {segment.address: MIB}
    assert fake.pending == 0
    assert list(found.pieces(segment.address, 2 * MIB)) == [(0, MIB), (MIB, MIB)]
    segment.extend(4 * MIB)
    own.ensure(segment.address + 3 * MIB, 1, fake, 8 * MIB)
    assert fake.registrations == 1, "it was asked again"


def test_the_cap(make: Any, fake: FakeDevices, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(pins, "_chunk_bytes", MIB)
    producer = make(segment_bytes=4 * MIB, pin_bytes=2 * MIB + 5)
    consumer = make(pin_bytes=0)
    sent = torch.arange(3 * MIB // 4, dtype=torch.int32)  # across the chunks and beyond the last of them
    for n in range(2):
        got = consumer.get("a", "b", n, producer.put("a", "b", n, fake.tensor(sent + n))[2], device="meta")[0]
        assert torch.equal(fake.read(got), sent + n)
    assert sorted(fake.registered.values()) == [MIB, MIB]
    assert producer.health()["pinned_bytes"] == 2 * MIB
    assert not warnings_of(caplog), "a cap that was asked for is no trouble"


def test_no_copy_crosses_a_border(make: Any, fake: FakeDevices, monkeypatch: Any) -> None:
    monkeypatch.setattr(pins, "_chunk_bytes", 100_000)
    producer, consumer = make(segment_bytes=2 * MIB), make()
    sent = [torch.arange(70_000.0), torch.arange(100_001, dtype=torch.int8), torch.arange(3.0)]
    payload = [fake.tensor(each, n % 2) for n, each in enumerate(sent)]
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", payload)[2], device="meta:1")[0]
    assert all(torch.equal(fake.read(one), other) for one, other in zip(got, sent, strict=True))
    assert fake.copies > 2 * len(sent)


@pytest.mark.parametrize("size", [1, 4096, 4097])
def test_small_regions(fake: FakeDevices, namespace: str, size: int) -> None:
    name = f"omnifs.{os.getuid()}.{namespace}.small"
    segment = segments.make(name, size)
    own = Pins()
    found = own.ensure(segment.address, size, fake, MIB)
    assert found is not None
    assert fake.registered == {segment.address: size}
    assert list(found.pieces(segment.address, size)) == [(0, size)]
    segments.unlink(name)
    del segment
    assert not fake.registered
    assert own.total == 0


def test_a_region_of_no_bytes_is_never_registered(make: Any, fake: FakeDevices, namespace: str) -> None:
    name = f"omnifs.{os.getuid()}.{namespace}.empty"
    segment = Segment(name, os.open(f"{segments.MOUNT}/{name}", os.O_CREAT | os.O_RDWR))
    assert segment.size == 0
    assert Pins().ensure(segment.address, 1, fake, MIB) is None
    assert not fake.registrations
    segments.unlink(name)
    producer, consumer = make(shm_threshold_bytes=0), make()
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", fake.tensor(torch.empty(0, 3)))[2], device="meta")[0]
    assert got.shape == (0, 3)
    assert not fake.registrations


def test_memory_that_is_in_no_segment(fake: FakeDevices) -> None:
    assert Pins().ensure(BIG.data_ptr(), 1, fake, MIB) is None
    assert Pins().find(0) is None


def test_pieces_of_a_range(fake: FakeDevices, segment: Any) -> None:
    own = Pins(chunk_bytes=MIB)
    found = own.ensure(segment.address, 1, fake, 3 * MIB)
    base = segment.address
    assert found is not None
    assert list(found.pieces(base + 10, 100)) == [(0, 100)]
    assert list(found.pieces(base + MIB - 10, 30)) == [(0, 10), (10, 20)]
    assert list(found.pieces(base, 4 * MIB)) == [(0, MIB), (MIB, MIB), (2 * MIB, MIB), (3 * MIB, MIB)]
    assert list(found.pieces(base, MIB)) == [(0, MIB)]
    assert own.find(base + 4 * MIB - 1) is found
    assert own.find(base + 4 * MIB) is None
    own._release(base)


def test_after_fork_nothing_is_touched() -> None:
    run_script("staging_fork.py")


def test_a_process_that_dies_at_any_call_of_the_driver() -> None:
    run_script("staging_deaths.py", timeout=150)
