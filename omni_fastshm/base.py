"""The interface that every connector keeps, whatever carries the bytes."""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import check_timeout, describe

__all__ = ["Metadata", "OmniConnectorBase", "StageId"]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between looks of an `aget` where nothing tells of arrivals

StageId = str | int
_Self = TypeVar("_Self", bound="OmniConnectorBase")
Metadata = dict[str, Any]


def _pair(item: Any) -> tuple[StageId, Any]:
    # Text of two characters would come apart as well, and send what nobody meant.
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ConfigError(
            f"put_many takes pairs (request id, payload), or a dict of them; one item is {describe(item)}"
        )
    return item[0], item[1]


class OmniConnectorBase(ABC):
    """Carries payloads from one stage of a pipeline to the next.

    A connector is one endpoint in one process. All calls may come from any thread. Stages and request ids may
    be ``str`` or ``int``; an int means the same as its ``str()``.
    """

    @abstractmethod
    def put(
        self,
        from_stage: StageId,
        to_stage: StageId,
        request_id: StageId,
        data: Any,
        *,
        consumers: int = 1,
        wait: bool = True,
    ) -> Any:
        """Send one payload.

        After ``ok`` the caller may overwrite `data`; only memory from `allocate` is handed over instead of
        copied, and must not be written to any more.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage; another than `from_stage`.
            request_id: names the payload on this edge.
            data: the payload, any tree of the types that the codec carries.
            consumers: how many times the payload can be taken, 1 to 255.
            wait: False returns a `concurrent.futures.Future` of the triple at once and sends from a helper
                thread; `data` must stay unchanged until that future is done.

        Returns:
            ``(ok, size, metadata)``: `size` is the serialized size in bytes, `metadata` a small plain dict for
            `get`. When there is no room the answer is ``(False, 0, None)``.

        Raises:
            CodecError: something in `data` cannot be carried; nothing is left behind.
            ConfigError: a stage or an argument is out of range.
            ConnectorClosed: after `close`.
        """

    @abstractmethod
    def get(
        self,
        from_stage: StageId,
        to_stage: StageId,
        request_id: StageId,
        metadata: Metadata | None = None,
        *,
        timeout: float | None = 0,
        copy: bool | None = None,
        device: Any = None,
    ) -> tuple[Any, int] | None:
        """Take one payload.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            request_id: the payload's name on this edge.
            metadata: what `put` returned. Without it the connector must have been built with ``key_lookup``.
            timeout: seconds to wait for a payload that is not there yet; 0 does not wait, None waits for ever.
            copy: None gives views for large leaves and copies for small ones, True gives own memory for all,
                False gives views for all.
            device: where tensors shall arrive: what ``torch.device`` takes, or a dict of these by path, as
                ``{"engine_inputs": "cuda:0", "*": "cpu"}``; None leaves them in host memory.

        Returns:
            ``(object, size)`` with the same size that `put` gave, or None: not there (yet), already delivered,
            cancelled, evicted, or the time ran out. Views stay valid and unchanged until the last of them dies,
            whatever happens to the connector, the producer or the segment meanwhile.

        Raises:
            MetadataError: `metadata` is malformed, from another host, or belongs to another edge or request.
            CodecError: the payload holds a class that this process does not know; it can be got again.
            ConnectorClosed: after `close`.
        """

    def put_many(
        self,
        from_stage: StageId,
        to_stage: StageId,
        items: Iterable[tuple[StageId, Any]] | Mapping[StageId, Any],
        *,
        consumers: int = 1,
    ) -> list[tuple[bool, int, Metadata | None]]:
        """Send several payloads on one edge, in this order.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            items: pairs of a request id and its payload, or a dict of them.
            consumers: how many times each can be taken, 1 to 255.

        Returns:
            For each item what `put` returns for it. One that finds no room does not keep the others out.

        Raises:
            CodecError, ConfigError, ConnectorClosed: as `put`, at the first item it happens to; those before it have
                been sent, and what was returned for them is lost, but by key they can be got.
        """
        return self._put_each(
            from_stage,
            to_stage,
            items.items() if isinstance(items, Mapping) else items,
            lambda item: self._put_one(from_stage, to_stage, item, consumers),
            consumers == 1 and type(consumers) is int,
        )

    def get_many(
        self,
        from_stage: StageId,
        to_stage: StageId,
        items: Iterable[StageId | tuple[StageId, Metadata | None]] | Mapping[StageId, Metadata | None],
        *,
        timeout: float | None = 0,
        copy: bool | None = None,
        device: Any = None,
    ) -> list[tuple[Any, int] | None]:
        """Take several payloads of one edge.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            items: request ids, or pairs of a request id and the metadata that `put` returned for it, or a dict of them.
            timeout: seconds to wait for all of them together; 0 does not wait, None waits for ever.
            copy: as for `get`.
            device: as for `get`.

        Returns:
            For each item what `get` returns for it: one that is not there, or not in time, is None.

        Raises:
            MetadataError, CodecError, ConfigError, ConnectorClosed: as `get`, at the first item it happens to. What was
                taken before it is lost: where that matters, get one by one.
        """
        if isinstance(items, str | bytes):  # its letters would be taken for ids, and use up what lies under these
            raise ConfigError(f"get_many takes several request ids, as in [{items!r}]; this is {describe(items)}")
        wait_s = check_timeout(timeout)
        deadline = None if wait_s is None else time.monotonic() + wait_s

        def one(item: Any) -> tuple[Any, int] | None:
            request, metadata = item if isinstance(item, tuple) else (item, None)
            left = max(deadline - time.monotonic(), 0.0) if wait_s and deadline is not None else wait_s
            return self.get(from_stage, to_stage, request, metadata, timeout=left, copy=copy, device=device)

        return self._get_each(
            from_stage,
            to_stage,
            items.items() if isinstance(items, Mapping) else items,
            one,
            copy is None and device is None,
        )

    def _put_one(self, from_stage: StageId, to_stage: StageId, item: Any, consumers: int) -> Any:
        request, data = _pair(item)
        return self.put(from_stage, to_stage, request, data, consumers=consumers)

    def _put_each(
        self, from_stage: StageId, to_stage: StageId, items: Iterable[Any], one: Callable[[Any], Any], everyday: bool
    ) -> list[Any]:
        """`one` of each item; a connector may have a shorter way where nothing unusual was asked for."""
        return [one(item) for item in items]

    def _get_each(
        self, from_stage: StageId, to_stage: StageId, items: Iterable[Any], one: Callable[[Any], Any], everyday: bool
    ) -> list[Any]:
        """The same for `get`."""
        return [one(item) for item in items]

    async def aget(
        self,
        from_stage: StageId,
        to_stage: StageId,
        request_id: StageId,
        metadata: Metadata | None = None,
        *,
        timeout: float | None = None,
        copy: bool | None = None,
        device: Any = None,
    ) -> tuple[Any, int] | None:
        """`get` for asyncio: waits for a payload without holding up the event loop, nor a thread for each that waits.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            request_id: the payload's name on this edge.
            metadata: what `put` returned; with it there is nothing to wait for. Without it the connector must have
                been built with ``key_lookup``.
            timeout: seconds to wait; 0 does not wait, None, the default here, waits for ever.
            copy: as for `get`.
            device: as for `get`.

        Returns:
            As `get`. A task that is cancelled while it waits takes nothing.

        Raises:
            MetadataError, CodecError, ConfigError, ConnectorClosed: as `get`.
        """
        import asyncio  # here: alone it takes longer than the rest of this package, and few need it

        wait_s = check_timeout(timeout)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        pause = _SHORTEST_PAUSE_S
        while True:
            found = await self._look(
                functools.partial(self.get, from_stage, to_stage, request_id, metadata, copy=copy, device=device)
            )
            left = math.inf if deadline is None else deadline - time.monotonic()
            if found is not None or metadata is not None or left <= 0:
                return found
            self._looked_in_vain(from_stage, to_stage)
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _looked_in_vain(self, from_stage: StageId, to_stage: StageId) -> None:  # noqa: B027 - nothing to count here
        """Take back what the last look of an `aget` that goes on counted: all of them are one miss at most."""

    async def _look(self, get: Callable[[], tuple[Any, int] | None]) -> tuple[Any, int] | None:
        """Run a get that does not wait, but takes its time, in the loop's pool of threads."""
        import asyncio

        look = asyncio.get_running_loop().run_in_executor(None, get)
        cancelled: asyncio.CancelledError | None = None
        while not look.done():
            try:
                await asyncio.wait([look])  # which leaves it alone when it is cancelled, and again
            except asyncio.CancelledError as error:
                cancelled = error
        found = look.result()
        if found is None and cancelled is not None:
            raise cancelled
        return found  # it was taken already: too late for being cancelled, or it would be lost

    @abstractmethod
    def cleanup(self, request_id: StageId) -> None:
        """Drop what is still untaken of exactly this request, on all edges and from any process of the namespace.

        Payloads inside their metadata cannot be reached; views that were received before stay valid.

        Args:
            request_id: the request; unknown ones are fine, also after `close`.

        Raises:
            ConfigError: it is neither text nor a whole number.
        """

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Counters and levels, in bytes, payloads, calls and seconds: ``docs/health.md`` has each key.

        Returns:
            A plain dict; after `close` the last levels. Never raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent, never raises; received views live on."""

    @abstractmethod
    def allocate(self, shape: Sequence[int] | int, dtype: Any) -> Any:
        """Memory to produce a payload in place, handed over by `put` without a copy.

        Args:
            shape: of the tensor or array wanted.
            dtype: a ``torch.dtype`` gives a tensor, anything NumPy understands gives an array.

        Returns:
            An uninitialised tensor or array. It may stand anywhere in a payload; one that is dropped without
            being sent is freed; one that is sent a second time is copied that time.

        Raises:
            SegmentError: no room for it.
            ConfigError: there is no such shape or dtype, or it holds Python objects.
            ConnectorClosed: after `close`.
        """

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Runs on half-built objects and while the interpreter is being torn down: nothing may escape from here.
        try:
            self.close()
        except BaseException:
            pass

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it owns memory and locks of this process. "
            "Send its settings and build a connector in the other process."
        )

    @classmethod
    def from_settings(cls, extra: Mapping[str, Any] | None = None) -> OmniConnectorBase:
        """Build the connector from the `extra` section of a pipeline file."""
        return cls(dict(extra or {}))  # type: ignore[call-arg]
