"""What the library asks of a kind of device. The one implementation for hardware is `_staging_cuda.CudaRuntime`; tests
have a scripted one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["DeviceRuntime", "flat_bytes"]


class DeviceRuntime(ABC):
    """Page-locking, copies, streams and events of one type of device.

    Streams and events are opaque: they are made here, and given back here. A *flat* tensor is contiguous, of uint8, and
    has one dimension. Nothing but `synchronize` and `fetch` waits for the device.

    Attributes:
        device_type: as in ``torch.device(…).type``.
    """

    device_type: str

    @abstractmethod
    def usable(self) -> bool:
        """Can this process use the devices? Never raises; false in a child that was forked after their use began."""

    @abstractmethod
    def in_use(self) -> bool:
        """Could a tensor on such a device exist in this process? Cheap, and starts nothing."""

    # -- page-locking

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Page-lock memory for all devices; 0, or the error's number, which stays pending until `clear_error`."""

    @abstractmethod
    def unregister(self, address: int) -> int:
        """Undo the `register` of the range that starts there; 0, or the error's number."""

    @abstractmethod
    def clear_error(self) -> None:
        """Forget the pending error, so that no other code trips over it."""

    @abstractmethod
    def describe_error(self, code: int) -> str:
        """That error in words."""

    # -- tensors

    @abstractmethod
    def owns(self, tensor: Any) -> bool:
        """Does this tensor lie on a device of this runtime?"""

    @abstractmethod
    def flat(self, tensor: Any) -> Any:
        """The bytes of a tensor in order (conj and neg resolved) as a flat tensor on its device.

        Where possible it is the same memory; what has to be computed is enqueued on the current stream of that device.
        """

    @abstractmethod
    def fetch(self, flat: Any) -> Any:
        """These bytes on the host, after everything that is enqueued on the current stream; waits."""

    @abstractmethod
    def empty(self, nbytes: int, device: Any, stream: Any) -> Any:
        """A new flat tensor whose memory belongs to `stream`: uses there need no further ordering."""

    @abstractmethod
    def key(self, device: Any) -> Any:
        """A hashable name of one device, for a ``torch.device`` or a tensor; "cuda" means the current one."""

    # -- streams and events; `device` is a key

    @abstractmethod
    def current_stream(self, device: Any) -> Any:
        """What the calling thread's work goes to now."""

    @abstractmethod
    def side_stream(self, device: Any, direction: str) -> Any:
        """The library's own stream for copies "out" of, or "in" to, that device."""

    @abstractmethod
    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """While it is entered, `stream` is the calling thread's current one on its device."""

    @abstractmethod
    def record(self, stream: Any, device: Any) -> Any:
        """An event that is complete when everything is that was enqueued on `stream` so far."""

    @abstractmethod
    def wait_event(self, stream: Any, event: Any) -> None:
        """What is enqueued on `stream` from now on comes after `event`."""

    @abstractmethod
    def query(self, event: Any) -> bool:
        """Is it complete? Raises what went wrong on the device."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Sleep until it is complete, with the GIL released. Raises what went wrong on the device."""

    @abstractmethod
    def copy(self, target: Any, source: Any, stream: Any) -> None:
        """Enqueue a copy between two flat tensors, one of them on the host; the host's may be page-locked or not."""

    @abstractmethod
    def record_stream(self, tensor: Any, stream: Any) -> None:
        """If `tensor` dies, its memory is not used again before what is enqueued on `stream` by now is complete."""


def flat_bytes(tensor: Any) -> Any:
    """The bytes of a dense tensor as a flat tensor on the same device; the same memory where it is contiguous."""
    import torch

    bare = tensor.detach()
    if bare.dtype is torch.complex32:
        conjugated = bare.is_conj()
        bare = torch.view_as_real(bare.conj() if conjugated else bare)  # torch warns when it makes complex32 of its own
        if conjugated:
            bare = bare.clone(memory_format=torch.contiguous_format)
            bare[..., 1].neg_()
    if bare.is_conj():
        bare = bare.resolve_conj()
    if bare.is_neg():
        bare = bare.resolve_neg()
    if not bare.is_contiguous():
        try:
            bare = bare.contiguous()
        except NotImplementedError:
            # torch has no copy for its youngest dtypes; an integer of the same size has the same bytes
            bare = bare.view((torch.uint8, torch.int16)[bare.element_size() - 1]).contiguous()
    return bare.reshape(-1).view(torch.uint8)
