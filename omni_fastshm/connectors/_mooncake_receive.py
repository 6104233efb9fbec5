"""The receiving half of a MooncakeConnector: read, decode, and only then use up the take."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from omni_fastshm._codec import Decoder
from omni_fastshm.base import Metadata
from omni_fastshm.errors import MetadataError
from omni_fastshm.metadata import inline_frame

from ._mooncake_codes import NOT_THERE, TRANSFER, StoreError
from ._mooncake_gate import Gate, Waits
from ._mooncake_keys import Item
from ._mooncake_metadata import item_of
from ._mooncake_shelf import Shelf

__all__ = ["How", "Receiver"]

_PREFIX = struct.Struct("<8xQ")  # of a frame: its own size


class How(NamedTuple):
    """How a payload shall arrive: `copy` and `device` of `get`."""

    copy: bool | None
    device: Any


class Receiver:
    """Methods give the payload and its serialized size, or None where it is not there; they raise `StoreError`.

    Args:
        shelf: where payloads are.
        gate: whether the connector is open.
        namespace: of the connector.
        decoder: makes objects of frames.
        tell: called with edge, request and code when a get goes on waiting though the producer is gone; held weakly.
    """

    def __init__(
        self,
        shelf: Shelf,
        gate: Gate,
        *,
        namespace: str,
        decoder: Decoder,
        tell: Callable[[tuple[str, str], str, int], None],
    ) -> None:
        self.own_memory = 0
        """How many reads found the local buffer full."""
        self._shelf = shelf
        self._session = shelf.session
        self._gate = gate
        self._namespace = namespace
        self._decoder = decoder
        self._tell = weakref.WeakMethod(tell)
        self._leases: dict[int, tuple[weakref.ref[Any], float]] = {}  # with the time they were taken, oldest first
        self._lease_numbers = itertools.count()

    @property
    def leases(self) -> int:
        """Received payloads that views live of."""
        return len(self._leases)

    @property
    def oldest_lease_s(self) -> float:
        """How long the oldest of them has been there, in seconds; 0 without leases."""
        since = next((since for _, since in list(self._leases.values())), None)
        return 0.0 if since is None else time.monotonic() - since

    def by_metadata(self, edge: tuple[str, str], request: str, metadata: Metadata, how: How) -> tuple[Any, int] | None:
        """What metadata carries or leads to; `MetadataError` where it does neither."""
        if not isinstance(metadata, dict):
            raise MetadataError(f"metadata must be the dict that put returned, not {type(metadata).__name__}", op="get")
        if "inline_bytes" in metadata:
            frame = inline_frame(metadata, request)
            return self._decoder.read(frame, None, None, True, how.device), len(frame)
        return self._take(item_of(metadata, edge, request, self._namespace), how)

    def by_key(self, edge: tuple[str, str], request: str, wait_s: float | None, how: How) -> tuple[Any, int] | None:
        """The newest payload of edge and request; waits for one."""
        if not self._shelf.key_lookup:
            raise MetadataError(
                f"get of request {request!r} on {edge[0]}->{edge[1]} needs the metadata that put returned; "
                "getting by key alone works where both sides are built with key_lookup: true",
                op="get",
                key=request,
            )
        pauses, told = Waits(wait_s), False
        while True:
            self._shelf.check_master()
            code, item = self._shelf.find(edge, request)
            if code == TRANSFER and not told and (tell := self._tell()) is not None:
                told = True  # and wait on: a producer that starts again may put it again
                tell(edge, request, code)
            found = None if item is None else self._take(item, how)
            if found is not None or not self._gate.pause(pauses):
                return found
            self._gate.check("get")

    def _take(self, item: Item, how: How) -> tuple[Any, int] | None:
        """Decode first, use up the take after: a payload that this process cannot rebuild can be got again."""
        buffer = self._fetch(item)
        if buffer is None:
            return None
        view = memoryview(buffer)
        self._count_lease(buffer)
        announced = len(view) == item.stored and _PREFIX.unpack_from(view)[0] == item.size
        try:
            if not announced:
                raise _not_announced(item, "something else is in the store")
            data = self._decoder.read(view, _Copy(view), how.copy, item.takers == 1, how.device)
        except Exception as error:
            # Bytes that nobody can read must not wait for a taker for ever. What was removed while it was read may be
            # a mixture: that is no error of the payload, somebody else has taken it.
            unreadable = announced and isinstance(error, MetadataError)
            if not (self._shelf.claim(item) if unreadable else self._shelf.size_of(item) is not None):
                return None
            raise
        return (data, item.size) if self._shelf.claim(item) else None

    def _count_lease(self, buffer: Any) -> None:
        leases, number = self._leases, next(self._lease_numbers)
        leases[number] = weakref.ref(buffer, lambda _: leases.pop(number, None)), time.monotonic()

    def _fetch(self, item: Item) -> Any:
        """The payload's bytes in memory of this process; None where it is not there."""
        session, key = self._session, self._shelf.names.payload(item)
        if session.lost:
            self._shelf.check_master()
        started = time.monotonic()
        handle = session.get_buffer(key)
        if handle is not None:
            return handle
        # That was everything from "not there" to "local buffer full". What fails late would fail as late again. Early
        # is anything below the store's timeouts, not just the ms that it takes: this process may have stood still, as
        # it does while another connector's client closes.
        if time.monotonic() - started > session.late_s:
            raise StoreError(session.who_was_late())
        size = self._shelf.size_of(item)
        if size is None:
            return None
        if size != item.stored:
            raise _not_announced(item, f"the store has {size}")
        memory, address = _own_memory(size)
        code = session.get_into(key, address, size)
        if code in NOT_THERE:
            return None
        if code != size:
            raise StoreError(code)
        self.own_memory += 1
        return memory


class _Copy:
    """A received payload, as the codec asks for its leaves: each holds the whole of it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def view(self, offset: int, nbytes: int, readonly: bool, /) -> memoryview:
        part = self._view[offset : offset + nbytes]
        return part.toreadonly() if readonly else part

    def external(self, segment: int, offset: int, nbytes: int, readonly: bool, /) -> Any:
        raise MetadataError("the payload refers to shared memory of another connector", op="get")


def _own_memory(size: int) -> tuple[Any, int]:
    """Fresh memory, and its address, which is that of a page."""
    memory = mmap.mmap(-1, size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _not_announced(item: Item, found: str) -> MetadataError:
    return MetadataError(
        f"request {item.request!r}: {item.size} bytes were announced, but {found}", op="get", key=item.request
    )
