"""A kind of device that exists in Python only: tensors of torch's meta device with bytes behind them, streams whose
work is done when somebody asks for it, in random order, and a driver that notices what a real one would crash on.

What is enqueued knows addresses, not objects, as with real hardware: whoever lets go too early gets wrong bytes.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from omni_fastshm._core import segment_at
from omni_fastshm._staging_runtime import DeviceRuntime, flat_bytes

ALREADY, NOT_REGISTERED, REFUSED = 712, 713, 2
POISON = 0xDB


class DeviceFault(RuntimeError):
    """What a device reports, or a pending error that came up in other code."""


class Event:
    def __init__(self) -> None:
        self.complete = False
        self.error: str | None = None


class Stream:
    def __init__(self, device: int, name: str) -> None:
        self.device, self.name = device, name
        self.work: collections.deque[Callable[[], bool]] = collections.deque()

    def __repr__(self) -> str:
        return f"<{self.name} of {self.device}>"


class Memory:
    """The bytes behind the storage of one device tensor."""

    def __init__(self, nbytes: int, device: int, stream: Stream) -> None:
        self.bytes = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self.device = device
        self.stream = stream
        self.used_by: list[Event] = []


class FakeDevices(DeviceRuntime):
    """All devices of the type.

    Args:
        count: how many.
        seed: of what is done when.
    """

    device_type = "meta"

    def __init__(self, count: int = 2, seed: int = 0) -> None:
        self.count = count
        self.random = random.Random(seed)
        self.pid = os.getpid()
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self.unregistrations = 0
        self.refuse: list[int] = []  # answers of the next registrations; then they succeed
        self.pending = 0
        self.violations: list[str] = []
        self.copies = 0
        self.fail_copies = False  # on the device: their event reports it
        self.fail_enqueue = False  # at once
        self.fail_waits = False  # a stream takes no event to wait for
        self.interrupt = False  # Ctrl-C while somebody waits
        self.interrupt_at: dict[str, int] = {}  # Ctrl-C once, at the end of that call ("copy": 2, the second copy)
        self.calls = 0
        self.die_at = 0  # at that call into the driver the process is killed
        self._held = 0
        self._memory: dict[int, Memory] = {}
        self._freed: list[Memory] = []
        self._streams: dict[tuple[int, str], Stream] = {}
        self._current = threading.local()
        self._moved = threading.Condition(threading.RLock())
        self._flying: list[tuple[int, int]] = []
        self.last_copies: list[tuple[int, int]] = []  # on the host; of the last payload

    # -- what tests do

    def tensor(self, value: Any, device: int = 0) -> Any:
        """A device tensor with the bytes, sizes and strides of a CPU tensor."""
        cpu = value.detach()
        storage = torch.empty(0, dtype=torch.uint8).set_(cpu.untyped_storage())
        flat = self._allocate(storage.numel(), device)
        self._memory_of(flat).bytes.copy_(storage)
        made = torch.empty(0, dtype=cpu.dtype, device="meta")
        made.set_(flat.untyped_storage(), cpu.storage_offset(), cpu.size(), cpu.stride())
        made = made.conj() if cpu.is_conj() else made
        return torch._neg_view(made) if cpu.is_neg() else made

    def write(self, tensor: Any, value: Any) -> None:
        """A kernel on the current stream that gives a contiguous tensor other bytes."""
        data, target = flat_bytes(value).clone(), flat_bytes(tensor)
        memory, at = self._memory_of(target), target.storage_offset()
        self._enqueue(self.current_stream(memory.device), lambda: memory.bytes[at : at + len(data)].copy_(data))

    def read(self, tensor: Any) -> Any:
        """What a kernel on the current stream would see there now."""
        return self.fetch(self.flat(tensor)).view(tensor.dtype).reshape(tensor.shape)

    def device_of(self, tensor: Any) -> int:
        return self._memory_of(tensor).device

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no device does anything."""
        with self._moved:
            self._held += 1
        try:
            yield
        finally:
            with self._moved:
                self._held -= 1
                self._moved.notify_all()

    def step(self, count: int) -> None:
        """Do some of what was enqueued."""
        with self._moved:
            for _ in range(count):
                self._step()

    def run_all(self) -> None:
        """Do everything that was enqueued."""
        with self._moved:
            while self._step():
                pass

    def wait_for_copies(self, count: int) -> list[tuple[int, int]]:
        """Sleep until so many copies were enqueued in all; gives ``(address, nbytes)`` of those that are not done."""
        with self._moved:
            assert self._moved.wait_for(lambda: self.copies >= count, 20), f"{self.copies} copies of {count} came"
            return list(self._flying)

    # -- the driver

    def usable(self) -> bool:
        return os.getpid() == self.pid

    def in_use(self) -> bool:
        return self.usable()

    def _touched(self) -> None:
        if os.getpid() != self.pid:
            os.write(2, b"a device was touched in a forked child\n")
            os._exit(77)

    def _call(self) -> None:
        self._touched()
        self.calls += 1
        if self.calls == self.die_at:
            os.kill(self.pid, signal.SIGKILL)
        if self.pending:
            code, self.pending = self.pending, 0
            raise DeviceFault(f"error {code} was left pending")

    def register(self, address: int, nbytes: int) -> int:
        self._touched()
        code = self.refuse.pop(0) if self.refuse else 0
        if nbytes <= 0:
            self.violations.append(f"{nbytes} bytes were registered")
        if not code and any(a < address + nbytes and address < a + n for a, n in self.registered.items()):
            code = ALREADY
        if code:
            self.pending = code
        else:
            self.registered[address] = nbytes
            self.registrations += 1
        return code

    def unregister(self, address: int) -> int:
        self._touched()
        nbytes = self.registered.pop(address, 0)
        if not nbytes:
            self.violations.append(f"{address:#x} was unregistered and is not registered")
            self.pending = NOT_REGISTERED
            return NOT_REGISTERED
        if not _mapped(address):
            self.violations.append(f"{address:#x} was unmapped before it was unregistered")
        if any(a < address + nbytes and address < a + n for a, n in self._flying):
            self.violations.append(f"{address:#x} was unregistered while a copy used it")
        self.unregistrations += 1
        return 0

    def clear_error(self) -> None:
        self._touched()
        self.pending = 0

    def describe_error(self, code: int) -> str:
        return f"error {code} of the fake driver"

    # -- tensors

    def owns(self, tensor: Any) -> bool:
        return tensor.device.type == "meta" and tensor.untyped_storage()._cdata in self._memory

    def flat(self, tensor: Any) -> Any:
        self._call()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor.detach().reshape(-1).view(torch.uint8)
        memory = self._memory_of(tensor)
        out = self._allocate(tensor.numel() * tensor.element_size(), memory.device)
        result = self._memory_of(out)
        kind, offset, size, stride = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        conj, neg = tensor.is_conj(), tensor.is_neg()

        def gather() -> None:
            seen = torch.empty(0, dtype=kind).set_(memory.bytes.untyped_storage(), offset, size, stride)
            seen = seen.conj() if conj else seen
            result.bytes.copy_(flat_bytes(torch._neg_view(seen) if neg else seen))

        self._enqueue(self.current_stream(memory.device), gather)
        return out

    def fetch(self, flat: Any) -> Any:
        memory, at, nbytes = self._memory_of(flat), flat.storage_offset(), flat.numel()
        stream, got = self.current_stream(memory.device), torch.empty(nbytes, dtype=torch.uint8)
        self._enqueue(stream, lambda: got.copy_(memory.bytes[at : at + nbytes]))
        self.synchronize(self.record(stream, memory.device))
        return got

    def empty(self, nbytes: int, device: Any, stream: Any) -> Any:
        self._call()
        return self._allocate(nbytes, device, stream)

    def key(self, device: Any) -> Any:
        if isinstance(device, torch.Tensor):
            return self._memory_of(device).device
        return device.index or 0

    def _allocate(self, nbytes: int, device: int, stream: Stream | None = None) -> Any:
        if not 0 <= device < self.count:
            raise DeviceFault(f"there is no device {device}")
        made = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        storage = made.untyped_storage()
        memory = Memory(nbytes, device, stream or self.current_stream(device))
        self._memory[storage._cdata] = memory
        weakref.finalize(storage, self._free, storage._cdata, memory).atexit = False
        return made

    def _memory_of(self, tensor: Any) -> Memory:
        return self._memory[tensor.untyped_storage()._cdata]

    def _free(self, cdata: int, memory: Memory) -> None:
        with self._moved:
            if self._memory.get(cdata) is memory:
                del self._memory[cdata]
            self._freed.append(memory)
            self._reuse()

    def _reuse(self) -> None:
        """As soon as no stream that was recorded for it has work of that time left, freed memory is given to what comes
        next on the stream that it belongs to."""
        for memory in [each for each in self._freed if all(event.complete for event in each.used_by)]:
            self._freed.remove(memory)
            memory.stream.work.append(lambda memory=memory: bool(memory.bytes.fill_(POISON) is not None))

    # -- streams

    def current_stream(self, device: Any) -> Any:
        return getattr(self._current, f"of_{device}", None) or self._stream(device, "default")

    def side_stream(self, device: Any, direction: str) -> Any:
        return self._stream(device, direction)

    def stream(self, device: int, name: str) -> Any:
        """A stream of the user's."""
        return self._stream(device, name)

    def _stream(self, device: int, name: str) -> Stream:
        return self._streams.setdefault((device, name), Stream(device, name))

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        name = f"of_{stream.device}"
        before = getattr(self._current, name, None)
        setattr(self._current, name, stream)
        try:
            yield
        finally:
            setattr(self._current, name, before)

    def record(self, stream: Any, device: Any) -> Any:
        self._call()
        event = Event()
        if stream.device != device:
            raise DeviceFault(f"an event of device {device} on {stream}")

        def complete() -> None:
            event.complete = True
            self._reuse()

        self._enqueue(stream, complete)
        if self.fail_copies and stream.name in ("in", "out"):
            event.error = "the device is gone"
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        self._call()
        if self.fail_waits:
            raise DeviceFault("no more events")
        with self._moved:
            stream.work.append(lambda: event.complete)
        self._interrupted("wait_event")

    def _interrupted(self, call: str) -> None:
        left = self.interrupt_at.pop(call, 0)
        if left == 1:
            raise KeyboardInterrupt
        if left:
            self.interrupt_at[call] = left - 1

    def query(self, event: Any) -> bool:
        self._call()
        with self._moved:
            for _ in range(self.random.randrange(4)):
                self._step()
            if event.complete and event.error:
                raise DeviceFault(event.error)
            return bool(event.complete)

    def synchronize(self, event: Any) -> None:
        self._call()
        if self.interrupt and not event.complete:
            raise KeyboardInterrupt
        self._interrupted("synchronize")
        with self._moved:
            while not event.complete:
                if self._held:
                    self._moved.wait(20)
                elif not self._step():
                    raise AssertionError("an event that no stream will ever complete")
            if event.error:
                raise DeviceFault(event.error)

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        self._call()
        if self.fail_enqueue:
            raise DeviceFault("no more copies")
        host, flat, outward = (target, source, True) if target.is_cpu else (source, target, False)
        assert host.numel() == flat.numel(), (host.numel(), flat.numel())
        memory, at, nbytes, address = self._memory_of(flat), flat.storage_offset(), flat.numel(), host.data_ptr()
        if memory.device != stream.device:
            raise DeviceFault(f"a copy of device {memory.device} on {stream}")
        self._check_range(address, nbytes)
        owner = host if segment_at(address) is None else None  # plain memory has nobody else who keeps it
        flying = (address, nbytes)
        with self._moved:
            self.copies += 1
            self.last_copies = [*self.last_copies, (address, nbytes)] if self._flying else [(address, nbytes)]
            self._flying.append(flying)
            self._moved.notify_all()

        def move() -> None:
            here = memory.bytes[at : at + nbytes].data_ptr()
            if owner is None and segment_at(address) is None:
                self.violations.append(f"a copy into or out of memory that is not mapped any more: {address:#x}")
            else:
                ctypes.memmove(address if outward else here, here if outward else address, nbytes)
            self._flying.remove(flying)

        self._enqueue(stream, move)
        self._interrupted("copy")

    def _check_range(self, address: int, nbytes: int) -> None:
        for start, size in self.registered.items():
            inside = start <= address and address + nbytes <= start + size
            if not inside and start < address + nbytes and address < start + size:
                raise DeviceFault("a copy crosses the border of a registered range")

    def record_stream(self, tensor: Any, stream: Any) -> None:
        memory = self._memory_of(tensor)
        memory.used_by.append(_Marker(stream))

    def _enqueue(self, stream: Stream, work: Callable[[], Any]) -> None:
        self._call()

        def run() -> bool:
            work()
            return True

        with self._moved:
            stream.work.append(run)

    def _step(self) -> bool:
        """Do the next work of a random stream that can go on; False when none can."""
        if self._held:
            return False
        streams = [stream for stream in self._streams.values() if stream.work]
        self.random.shuffle(streams)
        for stream in streams:
            if stream.work[0]():
                stream.work.popleft()
                self._reuse()
                self._moved.notify_all()
                return True
        return False


class _Marker:
    """As the caching allocator does it: at the time of the free, what `stream` had to do then must be done."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event: Event | None = None

    @property
    def complete(self) -> bool:
        if self._event is None:  # asked for the first time: the memory was freed just now
            event = self._event = Event()
            self._stream.work.append(lambda: setattr(event, "complete", True) or True)
        return self._event.complete


def _mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            if start <= address < end:
                return True
    return False
