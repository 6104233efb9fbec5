"""The same on hardware: what tests/staging holds against a played driver, here against CUDA."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.child import run_script

from omni_fastshm import segments
from omni_fastshm._staging_pins import Pins
from omni_fastshm._staging_runtime import flat_bytes
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.staging import devices, parked, pins

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BIG = torch.arange(1_000_000, dtype=torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _cuda_is_there() -> None:
    """Its context opens descriptors and starts threads, once."""
    torch.ones(8, device="cuda").sum().item()
    with SharedMemoryConnector({"namespace": f"warm{os.getpid()}"}) as connector:
        connector.get("a", "b", "r", connector.put("a", "b", "r", torch.ones(100_000, device="cuda"))[2], device="cuda")
    torch.cuda.synchronize()


@pytest.fixture
def make(connect: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    yield lambda **settings: connect(SharedMemoryConnector, **settings)
    torch.cuda.synchronize()
    parked.poll()
    assert not len(parked)


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def tensors(device: str) -> dict[str, Any]:
    values = {
        "plain": BIG,
        "transposed": BIG.reshape(1000, 1000).t(),
        "part": BIG[7:900_000:3],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bf16": BIG.to(torch.bfloat16),
        "bool": BIG > 7,
        "fp8": BIG[:300].to(torch.float8_e4m3fn),
        "complex": torch.complex(BIG, -BIG),
    }
    moved = {name: value.to(device) for name, value in values.items()}
    return {**moved, "conj": moved["complex"].conj(), "neg": moved["complex"].conj().imag}


@pytest.mark.parametrize("wait", [True, False])
def test_the_bytes_of_every_kind_of_tensor_arrive(make: Any, wait: bool) -> None:
    producer, consumer = make(), make()
    device = f"cuda:{torch.cuda.device_count() - 1}"
    sent = {"dev": tensors(device), "host": tensors("cpu")}
    for target in (None, device, {"dev": device, "host.plain": "cuda:0"}):
        answer = producer.put("a", "b", "r", sent, wait=wait)
        got = consumer.get("a", "b", "r", (answer if wait else answer.result(20))[2], device=target)[0]
        for name, value in sent["host"].items():
            for side in ("dev", "host"):
                one = got[side][name].cpu()
                assert one.dtype is value.dtype, name
                assert one.shape == value.shape, name
                assert torch.equal(flat_bytes(one), flat_bytes(value)), name


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_was_enqueued_before_is_seen_and_the_caller_is_not_kept(make: Any, own_stream: bool) -> None:
    producer, consumer = make(), make()
    tensor = torch.zeros(10_000_000, device="cuda")
    for _ in range(3):  # the ring, its page-locking and the streams are there then
        consumer.get("a", "b", "w", producer.put("a", "b", "w", tensor)[2])
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(200)
        tensor.fill_(7)
        start = time.monotonic()
        future = producer.put("a", "b", "r", tensor, wait=False)
        took = time.monotonic() - start
        done = future.done()
    assert not done
    assert took < 0.1, "put waited for the stream"
    assert (consumer.get("a", "b", "r", future.result(30)[2])[0] == 7).all()


def test_the_result_can_be_used_at_once_on_the_current_stream(make: Any) -> None:
    producer, consumer = make(), make()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        metadata = producer.put("a", "b", "r", torch.arange(20_000_000))[2]
        with torch.cuda.stream(stream):
            got = consumer.get("a", "b", "r", metadata, device="cuda")[0]
            total = got.sum()
        stream.synchronize()
        assert total.item() == 20_000_000 * 19_999_999 // 2


def test_senders_drop_their_tensors_while_copies_run(make: Any) -> None:
    """What the caching allocator hands out again must not be what is still being copied."""
    producer, consumer = make(max_bytes=512 * MIB), make()
    futures = []
    for n in range(60):
        tensor = torch.full((1_000_000,), n, dtype=torch.int32, device="cuda")
        futures.append(producer.put("a", "b", n, tensor, wait=False))
        del tensor
        torch.full((1_000_000,), -1, dtype=torch.int32, device="cuda")
    for n, future in enumerate(futures):
        got = consumer.get("a", "b", n, future.result(30)[2], device="cuda")[0]
        other = torch.full_like(got, -1)
        assert (got == n).all()
        assert (other == -1).all()


def test_views_of_a_page_locked_segment_are_pinned_to_torch(make: Any) -> None:
    producer, consumer = make(), make(pin=True)
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", {"t": BIG})[2])[0]
    assert got["t"].is_pinned()
    assert consumer.health()["pinned_bytes"] > 0


def test_the_lease_goes_when_the_upload_is_complete(make: Any) -> None:
    producer, consumer = make(), make()
    metadata = producer.put("a", "b", "r", BIG)[2]
    got = consumer.get("a", "b", "r", metadata, device="cuda")[0]
    deadline = time.monotonic() + 10
    while consumer._consumer.leases:  # nothing is called that would look
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert torch.equal(got.cpu(), BIG)


def test_page_locking_ends_with_the_segments(make: Any) -> None:
    before = pins.total
    for _ in range(3):  # a range that is still registered could not be registered again
        producer = make(segment_bytes=4 * MIB)
        producer.put("a", "b", "r", torch.ones(300_000, device="cuda"))
        assert pins.total > before
        producer.close()
        del producer
        gc.collect()
        assert pins.total == before


@pytest.mark.parametrize("size", [1, 4097])
def test_small_regions(namespace: str, size: int) -> None:
    runtime = devices.runtime("cuda")
    assert runtime is not None
    name = f"omnifs.{os.getuid()}.{namespace}.small"
    segment = segments.make(name, size)
    segments.unlink(name)
    own = Pins()
    found = own.ensure(segment.address, size, runtime, MIB)
    assert found is not None
    assert own.total == size
    del found, segment
    assert own.total == 0


def test_an_error_of_the_driver_does_not_come_up_later(namespace: str) -> None:
    runtime = devices.runtime("cuda")
    assert runtime is not None
    name = f"omnifs.{os.getuid()}.{namespace}.twice"
    segment = segments.make(name, MIB)
    segments.unlink(name)
    assert runtime.register(segment.address, segment.size) == 0
    code = runtime.register(segment.address, segment.size)
    assert code
    assert str(code) in runtime.describe_error(code)
    runtime.clear_error()
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # a launch looks for pending errors
    assert runtime.unregister(segment.address) == 0


def test_a_copy_across_the_borders_of_chunks(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_chunk_bytes", MIB)
    producer, consumer = make(segment_bytes=4 * MIB, pin_bytes=2 * MIB + pins.total), make(segment_bytes=4 * MIB)
    sent = torch.arange(700_000, dtype=torch.int32)
    got = consumer.get("a", "b", "r", producer.put("a", "b", "r", sent.to("cuda"))[2], device="cuda")[0]
    assert torch.equal(got.cpu(), sent)


def test_a_forked_child_touches_no_device() -> None:
    run_script("staging_fork_cuda.py")
