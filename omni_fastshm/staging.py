"""Pinned host staging: copies between devices and shared memory, without a second copy on the host.

`Download` brings the device tensors of one payload into its room, `Uploads` takes those of a received payload to where
the receiver wants them. Both enqueue their copies on streams of the library's own, ordered by events with the caller's;
see ``docs/devices.md``. A plan without device tensors pays one look at `Plan.deferred` for all this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from omni_fastshm import codec
from omni_fastshm._codec import Decoder, Window, tensor_view
from omni_fastshm._core import Reservation
from omni_fastshm._staging_devices import devices
from omni_fastshm._staging_parked import parked
from omni_fastshm._staging_pins import pins
from omni_fastshm._staging_runtime import DeviceRuntime, flat_bytes
from omni_fastshm.errors import DeviceError
from omni_fastshm.placement import Placing, placing

__all__ = ["DeviceRuntime", "Download", "Ready", "Staging", "Uploads", "devices", "parked", "pinned_bytes", "pins"]


Pin = Callable[[int, int, DeviceRuntime], Iterable[tuple[int, int]]]
"""``(address, nbytes, runtime)``: page-lock what lies there; the pieces ``(offset, nbytes)`` in which to copy it."""


def pinned_bytes() -> int:
    """Bytes of shared memory that this process has page-locked now."""
    return pins.total


def _of(tensor: Any) -> tuple[DeviceRuntime, Any]:
    """The runtime of a tensor that `devices.flatten` gave, and the key of its device."""
    runtime = devices.runtime(tensor.device.type)
    assert runtime is not None
    return runtime, runtime.key(tensor)


class Ready:
    """The moment of a put on the streams of its caller: copies that come after it see what the caller had enqueued.

    Args:
        flats: the tensors that shall be copied.
    """

    def __init__(self, flats: list[Any]) -> None:
        self._events: dict[tuple[DeviceRuntime, Any], Any] = {}
        for flat in flats:
            runtime, key = _of(flat)
            if (runtime, key) not in self._events:
                self._events[runtime, key] = runtime.record(runtime.current_stream(key), key)

    def event(self, runtime: DeviceRuntime, key: Any) -> Any:
        """Complete when the device has come to that moment."""
        return self._events[runtime, key]

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """In another thread: its work for these devices comes after that moment, on streams of our own."""
        with contextlib.ExitStack() as stack:
            for (runtime, key), event in self._events.items():
                side = runtime.side_stream(key, "out")
                runtime.wait_event(side, event)
                stack.enter_context(runtime.using(side))
            yield


def _device_error(what: str, error: Exception, op: str = "put") -> DeviceError:
    made = DeviceError(f"{what}: {type(error).__name__}: {error}", op=op)
    made.__cause__ = error.with_traceback(None)
    return made


class Download:
    """The copies of one payload's device tensors into its room.

    Args:
        room: where the payload will be; kept until every copy into it is complete, whatever happens.
    """

    def __init__(self, room: Reservation) -> None:
        self._room = room
        self._events: list[tuple[DeviceRuntime, Any, Any]] = []  # one per device, with its key
        self._flats: list[Any] = []
        self._problem: DeviceError | None = None

    def start(self, plan: codec.Plan, ready: Ready, pin: Pin) -> None:
        """Enqueue the copies. Errors are kept for `finish`.

        Args:
            plan: with deferred tensors, which are taken out of it.
            ready: as of the call of put.
            pin: see `Pin`.
        """
        begun: dict[tuple[DeviceRuntime, Any], Any] = {}
        try:
            self._enqueue(plan, ready, pin, begun)
        except Exception as error:
            self._problem = _device_error("a copy from a device could not be started", error)
        finally:
            for (runtime, key), side in begun.items():
                self._close(runtime, key, side)

    def _enqueue(self, plan: codec.Plan, ready: Ready, pin: Pin, begun: dict[tuple[DeviceRuntime, Any], Any]) -> None:
        import torch

        base, size = self._room.address, plan.frame_size
        window = tensor_view(Window(base, size, self._room), (size,), torch.uint8)
        for offset, nbytes, flat in plan.take_deferred():
            runtime, key = _of(flat)
            side = begun.get((runtime, key))
            if side is None:
                side = runtime.side_stream(key, "out")
                runtime.wait_event(side, ready.event(runtime, key))
                begun[runtime, key] = side
            self._flats.append(flat)
            runtime.record_stream(flat, side)
            for start, count in pin(base + offset, nbytes, runtime):
                at = offset + start
                runtime.copy(window[at : at + count], flat[start : start + count], side)

    def _close(self, runtime: DeviceRuntime, key: Any, side: Any) -> None:
        try:
            self._events.append((runtime, key, runtime.record(side, key)))
        except BaseException as error:
            parked.keep_for_good((self._room, self._flats))
            if not isinstance(error, Exception):
                raise
            self._problem = _device_error("a copy from a device could not be started", error)

    def finish(self, plan: codec.Plan) -> DeviceError | None:
        """Write the rest of the payload, while the copies run, and sleep until these are complete.

        Returns:
            What failed, if anything; the room is free again then when no device writes to it any more. It is not raised
            here: whoever kept the exception would keep the frames that it came through, and with them the room.
        """
        failed = self._problem
        try:
            if failed is None:
                plan.pack_into(self._room.address)
                failed = self._wait()
        except BaseException:
            self.abandon()
            raise
        if failed is not None:
            self.abandon()
        return failed

    def _wait(self) -> DeviceError | None:
        for runtime, key, event in self._events:
            try:
                runtime.synchronize(event)
            except Exception as error:
                return _device_error(f"a copy from {runtime.device_type}:{key} failed", error)
        return None

    def abandon(self) -> None:
        """The payload will not be sent: its room is free for others when no device writes to it any more."""
        events, self._events = self._events, []
        for runtime, _, event in events:
            parked.park(runtime, event, (self._room, self._flats))


class Uploads:
    """Takes the tensors of one payload to devices while it is decoded; a `Placing` for `codec.decode`.

    Args:
        where: which tensors go where.
        pin: see `Pin`.
    """

    def __init__(self, where: Placing, pin: Pin) -> None:
        self._where = where
        self._pin = pin
        self._known: dict[Any, tuple[DeviceRuntime, Any] | None] = {}
        self._moved: dict[tuple[DeviceRuntime, Any], list[tuple[Any, Any]]] = {}

    def target(self, path: Any) -> Any:
        return self._where.target(path)

    def done(self) -> None:
        self._where.done()

    def move(self, tensor: Any, target: Any) -> Any:
        """The tensor's bytes on that device, from the moment on when `finish` was called."""
        if target not in self._known:
            self._known[target] = self._find(target)
        found = self._known[target]
        if found is None or tensor.numel() == 0:
            return tensor.to(target)
        runtime, key = found
        side = runtime.side_stream(key, "in")
        source = flat_bytes(tensor)
        flat = runtime.empty(source.numel(), key, side)
        # Before the copies: whatever is raised from here on, the bytes stay until what was enqueued is complete.
        self._moved.setdefault(found, []).append((flat, tensor))
        for start, size in self._pin(tensor.data_ptr(), source.numel(), runtime):
            runtime.copy(flat[start : start + size], source[start : start + size], side)
        return flat.view(tensor.dtype).reshape(tensor.shape)

    def _find(self, target: Any) -> tuple[DeviceRuntime, Any] | None:
        import torch

        device = torch.device(target)
        runtime = devices.runtime(device.type)
        return (runtime, runtime.key(device)) if runtime is not None and runtime.usable() else None

    def finish(self, wait: bool) -> None:
        """Let the caller's current streams wait for the copies, and hold what they read until they are complete.

        Args:
            wait: until then, here.

        Raises:
            DeviceError: a device takes no more work, or, when this waits, a copy failed.
        """
        moved, self._moved = self._moved, {}
        problem: Exception | None = None
        try:
            while moved:
                (runtime, key), pairs = moved.popitem()
                try:
                    self._finish_device(runtime, key, pairs, wait)
                except Exception as error:  # the other devices' copies have to be seen to all the same
                    problem = error
        finally:
            for (runtime, key), pairs in moved.items():  # after Ctrl-C
                with contextlib.suppress(Exception):  # `_event` has kept them then
                    parked.park(runtime, self._event(runtime, key, pairs), [tensor for _, tensor in pairs])
        if problem is not None:
            raise _device_error("copies to a device failed", problem, "get")

    def _finish_device(self, runtime: DeviceRuntime, key: Any, pairs: list[tuple[Any, Any]], wait: bool) -> None:
        event = self._event(runtime, key, pairs)
        tensors = [tensor for _, tensor in pairs]
        if not wait:
            parked.park(runtime, event, tensors)
        try:
            current = runtime.current_stream(key)
            runtime.wait_event(current, event)
            for flat, _ in pairs:
                runtime.record_stream(flat, current)
        finally:
            if wait:
                self._wait(runtime, event, tensors)

    def _event(self, runtime: DeviceRuntime, key: Any, pairs: list[tuple[Any, Any]]) -> Any:
        try:
            return runtime.record(runtime.side_stream(key, "in"), key)
        except BaseException:
            parked.keep_for_good(pairs)
            raise

    def _wait(self, runtime: DeviceRuntime, event: Any, tensors: list[Any]) -> None:
        try:
            runtime.synchronize(event)
        except Exception:  # the device does nothing more with them
            raise
        except BaseException:
            parked.park(runtime, event, tensors)
            raise


class Begun:
    """A put that goes on in another thread, with what was done of it in the caller's.

    As a context manager, in that other thread: inside, its work for devices comes after what the caller had enqueued;
    afterwards nothing of it is left here.

    Args:
        plan: of the payload.
        claims: the loans in it; has ``settle()``, for those that were not handed over.

    Attributes:
        producer: whose room it has; None when the other thread has to find room.
        room: None likewise.
    """

    def __init__(self, plan: codec.Plan, claims: Any) -> None:
        self.plan = plan
        self.claims = claims
        self.producer: Any = None
        self.room: Reservation | None = None
        self._ready: Ready | None = Ready(plan.deferred_tensors())
        self._download: Download | None = None
        self._later = contextlib.ExitStack()
        self._problem: DeviceError | None = None

    def start(self, producer: Any, room: Reservation, staging: Staging) -> None:
        """Enqueue the copies from devices now: they run while the caller goes on. `finish` says what fails.

        Copies into memory that is not page-locked would keep the caller: they are left to the other thread.
        """
        assert self._ready is not None
        self.producer, self.room = producer, room
        runtime, _ = _of(self.plan.deferred_tensors()[0])
        try:
            if not staging.locked(room.address, self.plan.frame_size, runtime):
                return
            self._download = Download(room)
            self._download.start(self.plan, self._ready, staging.pin)
        except BaseException:
            self.close()
            raise

    def take(self) -> Download | None:
        """What was started; the caller finishes it."""
        download, self._download = self._download, None
        return download

    def close(self) -> None:
        """Drop it. A room that devices write to is kept until they are done."""
        download, self._download = self._download, None
        if download is not None:
            download.abandon()
        if self.claims is not None:
            self.claims.settle()
        # The user's future may keep this object for long.
        self.plan = self.claims = self.producer = self.room = self._ready = None  # type: ignore[assignment]

    def __enter__(self) -> Begun:
        assert self._ready is not None
        try:
            self._later.enter_context(self._ready.later())
        except Exception as error:  # `ordered` says it, where a put that fails is counted
            self._problem = _device_error("a device does not wait for what was enqueued before", error)
        except BaseException:
            self.close()
            raise
        return self

    def ordered(self) -> codec.Plan:
        """The plan, for whoever has entered this.

        Raises:
            DeviceError: the work of this thread cannot be put after the caller's.
        """
        problem, self._problem = self._problem, None
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # its traceback has this frame
        return self.plan

    def __exit__(self, *_: Any) -> None:
        try:
            self._later.close()
        finally:
            self.close()


class Staging:
    """One connector's way to devices.

    Args:
        pin: "auto" page-locks a segment when the first device tensor crosses it, True also those that only views or
            loans are made of, False none.
        pin_bytes: page-lock no more than this in the whole process.
    """

    def __init__(self, pin: bool | str, pin_bytes: int) -> None:
        self._pin = pin is not False
        self._limit = pin_bytes
        self.pin_views = pin is True

    def pin(self, address: int, nbytes: int, runtime: DeviceRuntime) -> Iterable[tuple[int, int]]:
        """See `Pin`."""
        found = pins.ensure(address, nbytes, runtime, self._limit) if self._pin else pins.find(address)
        return ((0, nbytes),) if found is None else found.pieces(address, nbytes)

    def locked(self, address: int, nbytes: int, runtime: DeviceRuntime) -> bool:
        """Page-lock what lies there; did that work?"""
        self.pin(address, nbytes, runtime)
        found = pins.find(address)
        return found is not None and address + nbytes <= found.done

    def pin_view(self, address: int, nbytes: int) -> None:
        """Page-lock what lies there for the user's own copies; where that cannot be done, one warning says so."""
        found = pins.find(address)
        if found is None or not found.covers(address, nbytes):
            runtime = devices.pinning()
            if runtime is None:
                pins.warn("pin: true, but torch finds no CUDA device here: shared memory is not page-locked")
            else:
                pins.ensure(address, nbytes, runtime, self._limit)

    def fill(self, plan: codec.Plan, room: Reservation, begun: Begun | None) -> DeviceError | None:
        """Write a payload with device tensors into its room; all of it is there when this returns None.

        Args:
            plan: of the payload.
            room: for it.
            begun: what was done of it already; its copies may be on their way into `room`.

        Returns:
            As `Download.finish`.
        """
        parked.poll()
        download = None if begun is None else begun.take()
        if download is not None:
            return download.finish(plan)
        download = Download(room)
        try:
            download.start(plan, Ready(plan.deferred_tensors()), self.pin)
        except BaseException:  # Ctrl-C: devices may be writing to the room by now
            download.abandon()
            raise
        return download.finish(plan)

    def read(
        self,
        decoder: Decoder,
        frame: Any,
        source: Any,
        copy: bool | None,
        writable: bool,
        device: Any,
        wait: bool = False,
    ) -> Any:
        """`Decoder.read` with tensors on devices.

        Args:
            decoder: reads the frame; gets `frame`, `source`, `copy` and `writable`.
            device: as for `get`.
            wait: for the copies to be complete; otherwise the caller's current streams wait for them.
        """
        parked.poll()
        where = placing(device)
        if where is None:
            return decoder.read(frame, source, copy, writable)
        uploads = Uploads(where, self.pin)
        try:
            return decoder.read(frame, source, copy, writable, uploads)
        finally:
            uploads.finish(wait)
