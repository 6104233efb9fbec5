"""put of device tensors: the right bytes, published when the last copy is complete and not before."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import threading
import warnings
import weakref
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_device import FakeDevices
from support.waiting import until

from omni_fastshm import codec
from omni_fastshm._core import segment_at
from omni_fastshm.errors import CodecError, ConnectorClosed, DeviceError
from omni_fastshm.staging import parked

BIG = torch.arange(60_000, dtype=torch.float32)


def equal(one: Any, other: Any) -> bool:
    return bool(one.dtype is other.dtype and one.shape == other.shape and one.tolist() == other.tolist())


def tree() -> dict[str, Any]:
    """CPU tensors of all kinds; the same on devices must arrive the same."""
    return {
        "plain": BIG,
        "transposed": BIG.reshape(300, 200).t(),
        "part": BIG[7:50_000:3],
        "offset": BIG[5:],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bf16": BIG.to(torch.bfloat16),
        "half": BIG[:9].half(),
        "bool": BIG > 7,
        "i8": torch.arange(-100, 100, dtype=torch.int8),
        "fp8": BIG[:300].to(torch.float8_e4m3fn),
        "complex": torch.complex(BIG, -BIG),
        "conj": torch.complex(BIG, -BIG).conj(),
        "neg": torch.complex(BIG, -BIG).conj().imag,
        "conj of a part": torch.complex(BIG, BIG + 1)[::7].conj(),
        "expanded": torch.arange(5.0).expand(3, 5),
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wait", [True, False])
def test_the_bytes_of_every_kind_of_tensor_arrive(make: Any, fake: FakeDevices, seed: int, wait: bool) -> None:
    fake.random.seed(seed)
    producer, consumer = make(), make()
    values = tree()
    sent = {name: fake.tensor(value, seed % 2) for name, value in values.items()}
    answer = producer.put("a", "b", "r", [sent, {"on the host": BIG}], wait=wait)
    ok, size, metadata = answer if wait else answer.result(20)
    assert ok
    assert size == codec.plan([values, {"on the host": BIG}]).size
    got = consumer.get("a", "b", "r", metadata)[0]
    for name, value in values.items():
        assert equal(got[0][name], value), name
    assert equal(got[1]["on the host"], BIG)


def test_complex32(make: Any, fake: FakeDevices) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it experimental
        value = torch.complex(BIG, -BIG).to(torch.complex32)
        sent = [fake.tensor(each) for each in (value, value[::3], value.conj())]
        got = make().get("a", "b", "r", make().put("a", "b", "r", sent)[2])[0]
        for one, other in zip(got, (value, value[::3], value.conj().resolve_conj()), strict=True):
            assert torch.equal(torch.view_as_real(one), torch.view_as_real(other))


def test_small_ones_travel_inline(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    sent = {"t": fake.tensor(BIG[:100]), "u": fake.tensor(BIG[:7], 1)}
    for wait in (True, False):
        answer = producer.put("a", "b", "r", sent, wait=wait)
        _, _, metadata = answer if wait else answer.result(20)
        assert "inline_bytes" in metadata
        assert equal(consumer.get("a", "b", "r", metadata)[0]["t"], BIG[:100])
    assert not fake.registrations, "no shared memory was touched"


def test_small_ones_in_shared_memory(make: Any, fake: FakeDevices, namespace: str) -> None:
    keyed = make(key_lookup=True, namespace=namespace)
    keyed.put("a", "b", "r", fake.tensor(BIG[:3]))
    assert equal(keyed.get("a", "b", "r")[0], BIG[:3])


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("wait", [True, False])
def test_what_was_enqueued_before_is_seen(make: Any, fake: FakeDevices, own_stream: bool, wait: bool) -> None:
    producer, consumer = make(), make()
    producer.put("a", "b", "first", BIG)  # a connector that has its ring starts copies at once
    tensors = [fake.tensor(torch.zeros_like(BIG), device) for device in (0, 1)]
    with fake.held():
        for device, tensor in enumerate(tensors):
            with fake.using(fake.stream(device, "mine") if own_stream else fake.current_stream(device)):
                fake.write(tensor, BIG + device)
        if own_stream:
            with fake.using(fake.stream(0, "mine")), fake.using(fake.stream(1, "mine")):
                future = producer.put("a", "b", "r", tensors, wait=False)
        else:
            future = producer.put("a", "b", "r", tensors, wait=False)
    if not wait:
        fake.run_all()
    got = consumer.get("a", "b", "r", future.result(20)[2])[0]
    assert equal(got[0], BIG)
    assert equal(got[1], BIG + 1)


def test_nothing_is_there_before_the_last_copy_is_complete(
    make: Any, fake: FakeDevices, namespace: str, run_thread: Any
) -> None:
    keyed = make(key_lookup=True, namespace=namespace)
    sent = {"t": fake.tensor(BIG), "host": BIG + 1, "u": fake.tensor(BIG + 2, 1)}
    with fake.held():
        put = run_thread(keyed.put, "a", "b", "r", sent)
        flying = fake.wait_for_copies(2)
        assert keyed.get("a", "b", "r") is None
        assert keyed.health()["shm_writes"] == 0
        assert len(flying) == 2
        segment = segment_at(flying[0][0])
        assert segment is not None
    assert put.result(20)[0]
    got = keyed.get("a", "b", "r")[0]
    assert equal(got["t"], BIG)
    assert equal(got["host"], BIG + 1)
    assert equal(got["u"], BIG + 2)


def test_what_is_on_the_host_is_written_while_devices_copy(make: Any, fake: FakeDevices, run_thread: Any) -> None:
    producer = make()
    pattern = np.random.default_rng(0).bytes(100_000)
    with fake.held():
        put = run_thread(producer.put, "a", "b", "r", [fake.tensor(BIG), bytearray(pattern)])
        address, _ = fake.wait_for_copies(1)[0]
        segment = segment_at(address)
        assert segment is not None
        while pattern not in ctypes.string_at(segment.address, 1 << 20):
            assert not put.done(), "it was published without the host's part"
    assert put.result(20)[0]


def test_put_without_waiting_comes_back_while_devices_are_busy(make: Any, fake: FakeDevices, namespace: str) -> None:
    keyed = make(key_lookup=True, namespace=namespace)
    keyed.put("a", "b", "first", BIG)
    with fake.held():
        futures = [keyed.put("a", "b", n, fake.tensor(BIG + n, n % 2), wait=False) for n in range(5)]
        assert fake.copies == 5, "the copies were to be enqueued in the caller's thread"
        assert not any(future.done() for future in futures)
        assert all(keyed.get("a", "b", n) is None for n in range(5))
    assert all(future.result(20)[0] for future in futures)
    assert all(equal(keyed.get("a", "b", n)[0], BIG + n) for n in range(5))


@pytest.mark.parametrize("seed", range(8))
def test_the_first_one_of_a_connector_as_well(make: Any, fake: FakeDevices, seed: int) -> None:
    fake.random.seed(seed)
    producer, consumer = make(), make()
    tensor = fake.tensor(torch.zeros_like(BIG))
    with fake.held():
        fake.write(tensor, BIG)
        future = producer.put("a", "b", "r", tensor, wait=False)
    assert equal(consumer.get("a", "b", "r", future.result(20)[2])[0], BIG)


def test_without_page_locking_the_helper_thread_is_kept_by_the_copies(make: Any, fake: FakeDevices) -> None:
    """Copies into other memory hold up who enqueues them."""
    producer, consumer = make(pin=False), make()
    producer.put("a", "b", "first", BIG)
    tensor = fake.tensor(torch.zeros_like(BIG), 1)
    with fake.held(), fake.using(fake.stream(1, "mine")):
        fake.write(tensor, BIG)
        # Both are left to the helper thread, and while that waits for the first it does not come to the second.
        futures = [producer.put("a", "b", n, tensor, wait=False) for n in range(2)]
        assert fake.copies <= 1
    for n, future in enumerate(futures):
        assert equal(consumer.get("a", "b", n, future.result(20)[2])[0], BIG)


def _keeps_what_it_cannot_export() -> bool:
    """As torch 2.4 does: it never lets go of a tensor on a device that DLPack has no number for, as the double's."""
    tensor = torch.empty(1, device="meta")
    alive = weakref.ref(tensor)
    with contextlib.suppress(Exception):
        torch.utils.dlpack.to_dlpack(tensor)
    del tensor
    return alive() is not None


@pytest.mark.skipif(_keeps_what_it_cannot_export(), reason="this torch keeps each tensor that it cannot export")
def test_the_sender_may_drop_its_tensors(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(), make()
    producer.put("a", "b", "first", BIG)
    with fake.held():
        tensor = fake.tensor(BIG.reshape(200, 300).t(), 1)
        future = producer.put("a", "b", "r", tensor, wait=False)
        del tensor
    got = consumer.get("a", "b", "r", future.result(20)[2])[0]
    assert equal(got, BIG.reshape(200, 300).t())
    del got
    fake.run_all()

    def nothing_kept() -> bool:  # the helper thread may be on its last instructions; the future is still here
        gc.collect()
        return not fake._memory

    until(nothing_kept)
    assert future.done()


def test_a_cancelled_one_gives_its_room_back_when_the_device_is_done(make: Any, fake: FakeDevices) -> None:
    producer = make()
    producer.get("a", "b", "first", producer.put("a", "b", "first", BIG)[2])
    with fake.held():
        first = producer.put("a", "b", 1, fake.tensor(BIG), wait=False)
        second = producer.put("a", "b", 2, fake.tensor(BIG), wait=False)
        assert second.cancel()
        del second
        gc.collect()
        assert producer.health()["used_bytes"] >= 2 * BIG.nbytes, "a device still writes there"
    first.result(20)
    producer.cleanup(1)
    fake.run_all()
    until(lambda: producer.health()["used_bytes"] == 0)


@pytest.mark.parametrize("fault", ["fail_copies", "fail_enqueue"])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("warm", [True, False])
def test_a_device_that_fails(make: Any, fake: FakeDevices, namespace: str, fault: str, wait: bool, warm: bool) -> None:
    keyed = make(key_lookup=True, namespace=namespace)
    if warm:
        keyed.put("a", "b", "first", BIG)
        assert keyed.get("a", "b", "first") is not None
    tensor = fake.tensor(BIG)
    setattr(fake, fault, True)
    with pytest.raises(DeviceError, match=r"the device is gone|no more copies"):
        keyed.put("a", "b", "r", tensor) if wait else keyed.put("a", "b", "r", tensor, wait=False).result(20)
    setattr(fake, fault, False)
    fake.run_all()
    until(lambda: keyed.health()["used_bytes"] == 0)
    assert keyed.health()["errors"] == 1
    assert keyed.get("a", "b", "r") is None
    keyed.put("a", "b", "r", tensor)
    assert equal(keyed.get("a", "b", "r")[0], BIG)


@pytest.mark.parametrize("copies", [1, 2])
def test_ctrl_c_between_the_copies(make: Any, fake: FakeDevices, copies: int) -> None:
    """What was enqueued by then still writes: nobody else gets that room meanwhile."""
    producer, consumer = make(), make()
    with fake.held():
        fake.interrupt_at = {"copy": copies}
        try:
            producer.put("a", "b", 1, [fake.tensor(BIG), fake.tensor(BIG, 1)])
            pytest.fail("no Ctrl-C came")
        except KeyboardInterrupt:
            pass
        gc.collect()
        assert producer.health()["used_bytes"] >= 2 * BIG.nbytes, "a device still writes there"
        metadata = producer.put("a", "b", 2, BIG + 1)[2]
    fake.run_all()
    until(lambda: not len(parked))
    assert equal(consumer.get("a", "b", 2, metadata)[0], BIG + 1)
    until(lambda: producer.health()["used_bytes"] == 0)


@pytest.mark.parametrize("warm", [True, False])
def test_a_device_that_does_not_wait_for_the_caller(make: Any, fake: FakeDevices, warm: bool) -> None:
    producer = make()
    if warm:
        producer.get("a", "b", "first", producer.put("a", "b", "first", BIG)[2])
    tensor = fake.tensor(BIG)
    fake.fail_waits = True
    with pytest.raises(DeviceError, match="no more events"):
        producer.put("a", "b", "r", tensor, wait=False).result(20)
    fake.fail_waits = False
    assert producer.health()["errors"] == 1
    until(lambda: producer._later.next_is_next)  # a future has its answer before the helper thread goes on
    until(lambda: producer.health()["used_bytes"] == 0)
    got = producer.get("a", "b", "r", producer.put("a", "b", "r", tensor, wait=False).result(20)[2])[0]
    assert equal(got, BIG)


@pytest.mark.parametrize("warm", [True, False])
def test_no_thread_to_send_from(make: Any, fake: FakeDevices, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    producer, consumer = make(), make()
    loan = producer.allocate((60_000,), torch.float32) if warm else BIG.clone()
    loan.copy_(BIG + 1)
    payload = {"loan": loan, "t": fake.tensor(BIG)}
    lent = producer.health()["used_bytes"]

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        try:
            producer.put("a", "b", "r", payload, wait=False)
            pytest.fail("there was a thread")
        except RuntimeError:
            pass
    fake.run_all()
    gc.collect()
    parked.poll()
    assert not len(parked), "the room is kept although nobody sends it"
    assert producer.health()["used_bytes"] == lent
    assert producer._later.next_is_next
    metadata = producer.put("a", "b", "r", payload, wait=False).result(20)[2]
    got = consumer.get("a", "b", "r", metadata)[0]
    assert equal(got["loan"], BIG + 1)
    assert equal(got["t"], BIG)
    if warm:
        assert producer.health()["used_bytes"] < lent + 2 * BIG.nbytes, "the loan was copied"
    assert producer.health()["shm_writes"] == 1, "the refused one was sent after all"


def test_nobody_submits_between_the_room_and_its_turn(make: Any, fake: FakeDevices, run_thread: Any) -> None:
    """Who waits for room must not come before somebody who has some and waits for his turn."""
    producer = make()
    producer.get("a", "b", "first", producer.put("a", "b", "first", BIG)[2])
    copy, others = fake.copy, []

    def copy_and_let_others_in(*args: Any) -> None:
        copy(*args)
        if not others:
            others.append(run_thread(producer.put, "a", "b", 2, BIG, wait=False))
            assert not concurrent.futures.wait(others, 0.3).done, "it was submitted in between"

    fake.copy = copy_and_let_others_in  # type: ignore[method-assign]
    first = producer.put("a", "b", 1, fake.tensor(BIG), wait=False)
    assert first.result(20)[0]
    assert others[0].result(20).result(20)[0]
    producer.cleanup(1)
    producer.cleanup(2)


def test_errors_of_the_payload_come_from_the_future(make: Any, fake: FakeDevices) -> None:
    producer = make()
    future = producer.put("a", "b", "r", {"t": fake.tensor(BIG), "x": [object()]}, wait=False)
    with pytest.raises(CodecError, match=r"x\[0\]"):
        future.result(20)
    assert producer.health()["errors"] == 1


def test_close_while_devices_copy(make: Any, fake: FakeDevices, shm_names: Any) -> None:
    for warm in (True, False):
        producer = make()
        if warm:
            producer.put("a", "b", "first", BIG)
        with fake.held():
            futures = [producer.put("a", "b", n, fake.tensor(BIG), wait=False) for n in range(4)]
            producer.close()
            assert shm_names() == []
            with pytest.raises(ConnectorClosed):
                producer.put("a", "b", "late", fake.tensor(BIG), wait=False)
        for future in futures:
            try:
                assert isinstance(future.exception(20), ConnectorClosed)
            except CancelledError:
                pass


def test_in_the_order_of_the_calls(make: Any, fake: FakeDevices, namespace: str) -> None:
    keyed = make(key_lookup=True, namespace=namespace)
    sent = [fake.tensor(BIG + n) if n % 3 else BIG + n for n in range(30)]
    futures = [keyed.put("a", "b", "r", each, wait=False) for each in sent]
    assert all(future.result(20)[0] for future in futures)
    assert equal(keyed.get("a", "b", "r")[0], BIG + 29)


def test_without_room(make: Any, fake: FakeDevices) -> None:
    settings = {"max_bytes": 1 << 20, "segment_bytes": 1 << 20}
    producer, consumer = make(put_timeout_s=0.05, **settings), make()
    large = fake.tensor(torch.zeros(150_000))
    kept = producer.put("a", "b", 1, large)[2]
    refused = [producer.put("a", "b", 2, large, wait=False), producer.put("a", "b", 3, BIG, wait=False)]
    assert refused[0].result(20) == (False, 0, None)
    assert refused[1].result(20)[0], "the smaller one has room"
    assert producer.health()["refused"] == 1
    assert consumer.get("a", "b", 1, kept) is not None
    producer.cleanup(3)


def test_who_came_first_is_not_overtaken(make: Any, fake: FakeDevices) -> None:
    """A later one that took the last room would wait for its turn behind one that needs it."""
    producer, consumer = make(max_bytes=1 << 20, segment_bytes=1 << 20, put_timeout_s=20), make()
    large = torch.zeros(150_000)
    producer.put("a", "b", 0, BIG)
    producer.cleanup(0)
    with fake.held():
        first = producer.put("a", "b", 1, fake.tensor(BIG), wait=False)
        second = producer.put("a", "b", 2, large, wait=False)  # has to wait for the helper thread, and then for room
        third = producer.put("a", "b", 3, fake.tensor(BIG), wait=False)
        assert fake.copies == 1, "the third has taken room"
    assert consumer.get("a", "b", 1, first.result(20)[2], copy=True) is not None
    assert second.result(20)[0]
    assert third.result(20)[0]
    producer.cleanup(2)
    producer.cleanup(3)


def test_fallback_inline(make: Any, fake: FakeDevices) -> None:
    producer, consumer = make(max_bytes=1 << 20, segment_bytes=1 << 20, put_timeout_s=0, fallback="inline"), make()
    kept = producer.put("a", "b", 1, torch.zeros(150_000))[2]
    large = torch.arange(150_000.0)
    tensor = fake.tensor(torch.zeros_like(large))
    for wait in (True, False):
        with fake.held():
            fake.write(tensor, large + wait)
            if not wait:
                answer = producer.put("a", "b", 2, tensor, wait=False)
        metadata = (answer.result(20) if not wait else producer.put("a", "b", 2, tensor))[2]
        assert "inline_bytes" in metadata
        assert equal(consumer.get("a", "b", 2, metadata)[0], large + wait)
    assert consumer.get("a", "b", 1, kept) is not None


@pytest.mark.parametrize("wait", [True, False])
def test_beside_a_loan(make: Any, fake: FakeDevices, wait: bool) -> None:
    producer, consumer = make(), make()
    loan = producer.allocate((60_000,), torch.float32)
    loan.copy_(BIG + 1)
    payload = {"loan": loan, "t": fake.tensor(BIG)}
    answer = producer.put("a", "b", "r", payload, wait=wait)
    got = consumer.get("a", "b", "r", (answer if wait else answer.result(20))[2])[0]
    assert equal(got["loan"], BIG + 1)
    assert equal(got["t"], BIG)
    del loan, payload, got, answer
    until(lambda: producer.health()["used_bytes"] == 0)  # the helper thread may still hold what it was given


def test_without_bytes_there_is_nothing_to_send(make: Any, fake: FakeDevices) -> None:
    with pytest.raises(CodecError, match="on the meta device"):
        make().put("a", "b", "r", [fake.tensor(BIG), torch.empty(3, device="meta")])


def test_through_a_frame_without_a_connector(fake: FakeDevices) -> None:
    """What knows nothing of staging gets whole frames: Mooncake's connector, files."""
    payload = {"t": fake.tensor(BIG), "u": BIG + 1}
    plan = codec.plan(payload)
    assert plan.deferred
    got = codec.decode(plan.to_bytes())
    assert equal(got["t"], BIG)
    whole = codec.plan(payload)
    addresses, sizes, memory = whole.gather(4096)
    gathered = b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, sizes, strict=True))
    assert memory is not None
    assert not whole.deferred
    assert gathered[: plan.frame_size] == plan.to_bytes()
    taken = codec.plan(payload)
    assert [(nbytes, flat.device.type) for _, nbytes, flat in taken.take_deferred()] == [(BIG.nbytes, "meta")]
    with pytest.raises(CodecError, match="left to the caller"):
        taken.to_bytes()
    assert taken.take_deferred() == []
    with pytest.raises(CodecError, match="left to the caller"):
        taken.to_bytes()
