"""The connector for stages of one process: the object itself is handed over, by reference."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from omni_fastshm._meter import Meter
from omni_fastshm._meter import start as _now
from omni_fastshm.arrivals import Change
from omni_fastshm.base import Metadata, OmniConnectorBase, StageId
from omni_fastshm.errors import (
    CodecError,
    ConnectorClosed,
    ForkedConnector,
    MetadataError,
    locate,
)
from omni_fastshm.loans import own_memory
from omni_fastshm.observers import log_fields, meter_figures, tell_closed
from omni_fastshm.placement import check_placement
from omni_fastshm.settings import (
    Setting,
    check_consumers,
    check_copy,
    check_edge,
    check_timeout,
    describe,
    parse_settings,
    request_name,
    resolve_namespace,
)

from ._ends import Dropped, tell_dropped
from ._leaves import buffer_bytes, moved, own_copy, shared_copy
from ._refusals import FULL, TOO_LARGE, Refusals
from ._shared_settings import LINGER, PUT_TIMEOUT
from ._spaces import Account, Entry, Key, Space, this_process

__all__ = ["SETTINGS", "InProcessConnector"]

SETTINGS: Mapping[str, Setting] = {
    "max_bytes": Setting("bytes", None, help="most bytes of untaken payloads; null for no limit"),
    "put_timeout_s": PUT_TIMEOUT,
    "namespace": Setting("str", None, help="connectors of one process see each other within it"),
    "key_lookup": Setting("bool", False, help="payloads can be got by edge and request id alone"),
    "linger_s": LINGER,
}

_log = logging.getLogger(__name__)
_open: weakref.WeakSet[InProcessConnector] = weakref.WeakSet()

Answer = tuple[bool, int, Metadata | None]
_TEXTS = ("process", "host", "namespace", "from_stage", "to_stage", "request_id")


@dataclass
class _Counters:
    refused: int = 0
    dropped: int = 0
    blocked_s: float = 0.0


@dataclass
class _Ticket:
    """A `put` on its way in; the first one in the queue is the next to get room."""

    entry: Entry
    deadline: float
    began: int
    started: float = field(default_factory=time.monotonic)


class InProcessConnector(OmniConnectorBase):
    """Hands payloads by reference from one stage to another in the same process.

    Nothing is copied: the receiver gets the sender's object, so the sender must not change it after `put`.
    All connectors of a process that have the same namespace see each other's payloads. With several consumers
    each taker gets its own containers and tensors, and read-only views of arrays.

    Args:
        config: settings, see ``docs/configuration.md``; kept as `config`.

    Raises:
        ConfigError: a setting is wrong.
    """

    # Of a process that cannot be: what was never built all the way has nothing to close.
    _pid = -1

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._closed = False
        self._pid = os.getpid()
        self.config = {} if config is None else config
        settings = parse_settings(type(self).__name__, SETTINGS, config)
        self._max_bytes: int | None = settings["max_bytes"]
        self._put_timeout_s: float = settings["put_timeout_s"]
        self._linger_s: float = settings["linger_s"]
        self._key_lookup: bool = settings["key_lookup"]
        self._namespace = resolve_namespace(settings["namespace"], key_lookup=self._key_lookup)
        self._account = Account()
        self._counters = _Counters()
        self._no_room = Refusals()
        self._meter = Meter(type(self).__name__, self._namespace)
        self._queue: deque[_Ticket] = deque()
        self._helper: ThreadPoolExecutor | None = None
        self._space: Space = this_process().space(self._namespace)
        _open.add(self)

    # -- put

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
        """Hand over one object; see `OmniConnectorBase.put`.

        The object is not copied: after `put` it belongs to the receiver, and must not be changed any more.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            request_id: names the payload on this edge.
            data: any object at all.
            consumers: how many times it can be taken, 1 to 255.
            wait: False returns a `concurrent.futures.Future` of the triple at once; a helper thread waits for
                room where there is none.

        Returns:
            ``(ok, size, metadata)``; `size` is the sum of the bytes in the tensors, arrays and bytes objects
            of `data`. When there is no room for `put_timeout_s`, ``(False, 0, None)``.

        Raises:
            ConfigError: a stage or an argument is out of range.
            ConnectorClosed: after `close`.
        """
        key: Key = (*check_edge(from_stage, to_stage), request_name(request_id))
        takers = check_consumers(consumers)
        self._check_open("put", key[2])
        began = _now()
        try:
            entry = Entry(key, data, buffer_bytes(data), takers, self._account, self._key_lookup)
        except Exception as error:
            locate(error, "put", key[2])
            self._meter.failed("put", began, key[:2], key[2])
            raise
        if self._max_bytes is not None and entry.size > self._max_bytes:
            return _answered(self._told(key, began, self._refuse(entry, TOO_LARGE, "it can never fit")), wait)
        ticket = _Ticket(entry, time.monotonic() + self._put_timeout_s, began)
        with self._space.changed:
            self._check_open("put", key[2])
            self._queue.append(ticket)
            answer = self._enter(ticket) if self._may_enter(ticket) else None
            if answer is None and not wait:
                return self._wait_later(ticket)
        if answer is None:
            return self._wait_and_tell(ticket)
        return _answered(self._told(key, began, answer), wait)

    def _wait_later(self, ticket: _Ticket) -> Future[Answer]:
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="omni-fastshm-put")
        try:
            future = self._helper.submit(self._wait_and_tell, ticket)
        except BaseException:  # no more threads
            self._withdraw(ticket)
            raise
        future.add_done_callback(lambda _: self._withdraw(ticket))  # one that is cancelled never gets to its turn
        return future

    def _withdraw(self, ticket: _Ticket) -> None:
        """A ticket that stayed at the head of the queue would keep out all others for ever."""
        with self._space.changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._space.changed.notify_all()

    def _wait_and_tell(self, ticket: _Ticket) -> Answer:
        key = ticket.entry.key
        try:
            answer = self._wait_for_room(ticket)
        except Exception as error:
            locate(error, "put", key[2])
            self._meter.failed("put", ticket.began, key[:2], key[2])
            raise
        return self._told(key, ticket.began, answer)

    def _told(self, key: Key, began: int, answer: Answer) -> Answer:
        # Not under the lock: an observer may take its time.
        self._meter.sent(began, key[:2], key[2], answer)
        return answer

    def _may_enter(self, ticket: _Ticket) -> bool:
        if self._queue[0] is not ticket:
            return False
        if self._max_bytes is None:
            return True
        # What the same key holds already is about to be replaced, so its room counts as free.
        replaced = self._space.replaced_by(ticket.entry)
        freed = replaced.size if replaced is not None and replaced.account is self._account else 0
        return self._account.used - freed + ticket.entry.size <= self._max_bytes

    def _enter(self, ticket: _Ticket) -> Answer:
        entry = ticket.entry
        self._queue.remove(ticket)
        self._space.add(entry)
        self._space.tell(entry.key)
        return True, entry.size, self._metadata(entry)

    def _wait_for_room(self, ticket: _Ticket) -> Answer:
        with self._space.changed:
            try:
                while not self._closed and not self._may_enter(ticket):
                    left = ticket.deadline - time.monotonic()
                    if left <= 0:
                        return self._refuse(ticket.entry, FULL, f"no room came free for {self._put_timeout_s} s")
                    self._space.changed.wait(left)
                self._check_open("put", ticket.entry.key[2])
                return self._enter(ticket)
            finally:
                self._counters.blocked_s += time.monotonic() - ticket.started
                if ticket in self._queue:
                    self._queue.remove(ticket)
                    self._space.changed.notify_all()

    def _refuse(self, entry: Entry, reason: str, why: str) -> Answer:
        with self._space.changed:
            self._counters.refused += 1
        level, more = self._no_room.note(reason, *entry.key[:2])
        limit = self._max_bytes or 0
        _log.log(
            level,
            "put of %s refused, %s: %d bytes wanted, %d of %d (max_bytes) free%s",
            _title(entry.key),
            why,
            entry.size,
            max(0, limit - self._account.used),
            limit,
            more,
            extra=log_fields(entry.key[:2], entry.key[2], entry.size),
        )
        return False, 0, None

    def _metadata(self, entry: Entry) -> Metadata:
        inner = {
            "process": this_process().id,
            "host": this_process().host,
            "namespace": self._namespace,
            "number": entry.number,
            "from_stage": entry.key[0],
            "to_stage": entry.key[1],
            "request_id": entry.key[2],
            "size": entry.size,
        }
        return {"in_process": inner, "size": entry.size}

    # -- get

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
        """Take one object; see `OmniConnectorBase.get`.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            request_id: the payload's name on this edge.
            metadata: what `put` returned; without it the connector must have been built with ``key_lookup``.
            timeout: seconds to wait for a payload that is not there yet; None waits for ever. With metadata
                there is nothing to wait for: the payload is there, or will never be.
            copy: True gives own memory for everything. False gives the sender's object, also to several
                takers. None gives it to a single taker; several get own containers and tensors, and read-only
                arrays.
            device: where tensors shall arrive, as in `OmniConnectorBase.get`; None leaves them where they are.

        Returns:
            ``(object, size)``, or None.

        Raises:
            MetadataError: `metadata` is malformed, from another process, or of another edge, request or
                namespace.
            CodecError: a copy is needed, and something in the object cannot be copied; it can be got again.
            ConfigError: an argument is out of range.
            ConnectorClosed: after `close`, also when it is closed while this call waits.
        """
        key: Key = (*check_edge(from_stage, to_stage), request_name(request_id))
        wait_s = check_timeout(timeout)
        check_copy(copy)
        check_placement(device)
        self._check_open("get", key[2])
        began = _now()
        try:
            found = self._get(key, metadata, wait_s, copy, device)
        except Exception as error:
            locate(error, "get", key[2])
            self._meter.failed("get", began, key[:2], key[2])
            raise
        self._meter.got(began, key[:2], key[2], found)
        return found

    def _get(
        self, key: Key, metadata: Metadata | None, wait_s: float | None, copy: bool | None, device: Any
    ) -> tuple[Any, int] | None:
        number = self._number_of(key, metadata)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        entry = self._claim(key, number, deadline)
        if entry is None:
            return None
        try:
            if metadata is not None and metadata["size"] != entry.size:
                said = describe(metadata["size"])
                raise _metadata_error(key, f"the metadata says {said} bytes, the payload has {entry.size}")
            result = self._shaped(entry, copy, device)
        except BaseException:
            with self._space.changed:
                self._space.give_back(entry)
            raise
        with self._space.changed:
            self._space.done(entry)
        return result, entry.size

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
        import asyncio

        key: Key = (*check_edge(from_stage, to_stage), request_name(request_id))
        wait_s = check_timeout(timeout)
        self._check_open("get", key[2])  # in a forked child the lock may be held for ever
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            change = Change(asyncio.get_running_loop())
            with self._space.changed:
                self._space.watchers.setdefault(key, []).append(change.tell)
            try:
                found = self.get(from_stage, to_stage, request_id, metadata, copy=copy, device=device)
                left = None if deadline is None else deadline - time.monotonic()
                if found is not None or metadata is not None or (left is not None and left <= 0):
                    return found
                self._meter.forget_misses(key[:2], 1)  # all looks of one call are one miss at most
                await asyncio.wait([change.future], timeout=left)
            finally:
                if self._pid == os.getpid():
                    self._stop_watching(key, change)

    def _stop_watching(self, key: Key, change: Change) -> None:
        change.future.cancel()
        with self._space.changed:
            watchers = self._space.watchers[key]
            watchers.remove(change.tell)
            if not watchers:
                del self._space.watchers[key]

    def _claim(self, key: Key, number: int | None, deadline: float | None) -> Entry | None:
        with self._space.changed:
            while True:
                self._check_open("get", key[2])
                entry = self._space.find(key, number)
                if entry is not None:
                    self._space.claim(entry)
                    return entry
                left = None if deadline is None else deadline - time.monotonic()
                if number is not None or (left is not None and left <= 0):
                    return None
                self._space.changed.wait(left)

    def _shaped(self, entry: Entry, copy: bool | None, device: Any) -> Any:
        """The entry's object as this taker shall see it."""
        data = entry.data
        try:
            if copy:
                data = own_copy(data)
            elif copy is None and entry.consumers > 1:
                data = shared_copy(data)
            return data if device is None else moved(data, device)
        except CodecError as error:
            raise CodecError(
                f"{_title(entry.key)}: {error}; with copy=False and no device get gives the object itself",
                op="get",
                key=entry.key[2],
            ) from error

    def _number_of(self, key: Key, metadata: Any) -> int | None:
        """The number of the payload that `metadata` stands for; None where there is no metadata."""
        if metadata is not None:
            return self._checked(key, metadata)
        if not self._key_lookup:
            raise _metadata_error(
                key,
                "get needs the metadata that put returned, because this connector was built without key_lookup: true",
            )
        return None

    def _checked(self, key: Key, metadata: Any) -> int:
        inner = metadata.get("in_process") if isinstance(metadata, Mapping) else None
        if not isinstance(inner, Mapping):
            raise _metadata_error(key, f"the metadata is not of an in-process payload: {describe(metadata)}")
        process, host, namespace, *names = map(inner.get, _TEXTS)
        number, size = inner.get("number"), inner.get("size")
        if not all(isinstance(text, str) for text in (process, host, namespace, *names)) or type(number) is not int:
            raise _metadata_error(key, f"the metadata is damaged: {describe(inner)}")
        here = this_process()
        if process != here.id:
            raise _metadata_error(
                key,
                f"the payload lies in process {process} on host {host}, but this is process {here.id} on "
                f"host {here.host}; between processes use SharedMemoryConnector",
            )
        if namespace != self._namespace:
            raise _metadata_error(
                key, f"the payload is in the namespace {namespace!r}, this connector in {self._namespace!r}"
            )
        if tuple(names) != key:
            raise _metadata_error(key, f"the metadata is of request {names[2]!r} on edge {names[0]} -> {names[1]}")
        outer = metadata.get("size")
        if type(outer) is not int or type(size) is not int or outer != size:
            raise _metadata_error(key, f"two sizes in the metadata: {describe(outer)}, {describe(size)}")
        return number

    # -- the rest

    def cleanup(self, request_id: StageId) -> None:
        """Drop what is untaken of exactly this request, on all edges and of all connectors of the namespace.

        Args:
            request_id: the request; unknown ones are fine.

        Raises:
            ConfigError: it is neither text nor a whole number.
        """
        name = request_name(request_id)
        if self._pid == os.getpid() and not self._closed:
            self._space.cancel_request(name)

    def health(self) -> dict[str, Any]:
        """Counters and levels of this connector.

        Returns:
            As in ``docs/health.md``. `leases`, `inline_writes`, `shm_writes` and `pinned_bytes` are always 0,
            as nothing is copied; `capacity_bytes` is ``sys.maxsize`` where there is no `max_bytes`.
        """
        here = self._pid == os.getpid()
        counters = self._counters
        return {
            "status": ("closed" if self._closed else "ok") if here else "forked",
            "connector": type(self).__name__,
            "namespace": self._namespace,
            **meter_figures(self._meter),
            "inline_writes": 0,
            "inline_fallbacks": 0,
            "shm_writes": 0,
            "own_segment_writes": 0,
            "refused": counters.refused,
            "no_room": self._no_room.by_reason,
            "blocked_s": counters.blocked_s,
            "live_blocks": self._account.live,
            "leases": 0,
            "oldest_lease_s": 0.0,
            "long_leases": [],
            "dropped": counters.dropped,
            "used_bytes": self._account.used,
            "capacity_bytes": sys.maxsize if self._max_bytes is None else self._max_bytes,
            "high_water_bytes": self._account.peak,
            "pinned_bytes": 0,
        }

    def close(self) -> None:
        """Stop: waiting calls end, payloads that nobody takes within `linger_s` are dropped. Idempotent."""
        # In a forked child another thread may hold the lock for ever: nothing may be touched there.
        if self._pid != os.getpid():
            return
        with self._space.changed:
            already, self._closed = self._closed, True
            for key in [*self._space.watchers]:
                self._space.tell(key)
            self._space.changed.notify_all()
        if already:
            return
        try:
            self._linger()
        finally:
            dropped = self._space.cancel_account(self._account)
        self._counters.dropped += len(dropped)
        what = [Dropped("->".join(key[:2]), 1, size, key[2]) for key, size in dropped]
        tell_dropped("InProcessConnector", self._namespace, len(dropped), what, self._linger_s)
        if self._helper is not None:
            self._helper.shutdown(wait=False)
        _open.discard(self)
        tell_closed(self, self._meter, self.health())

    def _linger(self) -> None:
        deadline = time.monotonic() + self._linger_s
        with self._space.changed:
            while self._account.live:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._space.changed.wait(left)

    def allocate(self, shape: Sequence[int] | int, dtype: Any) -> Any:
        """Plain memory of this process; see `OmniConnectorBase.allocate`.

        Args:
            shape: of the tensor or array wanted.
            dtype: a ``torch.dtype`` gives a tensor, anything NumPy understands gives an array.

        Returns:
            An uninitialised tensor or array.

        Raises:
            ConfigError: shape or dtype cannot be used.
            ConnectorClosed: after `close`.
            SegmentError: there is not so much memory.
        """
        self._check_open("allocate", None)
        return own_memory(shape, dtype)

    def __del__(self) -> None:
        # Waiting for takers here would let go of locks that the interrupted code relies on.
        self._linger_s = 0.0
        super().__del__()

    def _check_open(self, op: str, key: str | None) -> None:
        if self._pid != os.getpid():
            raise ForkedConnector(
                f"{op}: this connector was made in process {self._pid}, before the fork; make a new one here",
                op=op,
                key=key,
            )
        if self._closed:
            raise ConnectorClosed(f"{op}: this connector is closed", op=op, key=key)


def _answered(answer: Answer, wait: bool) -> Any:
    """The answer itself, or a future that has it already."""
    if wait:
        return answer
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


def _title(key: Key) -> str:
    return f"request {key[2]!r} on edge {key[0]} -> {key[1]}"


def _metadata_error(key: Key, text: str) -> MetadataError:
    return MetadataError(f"{_title(key)}: {text}", op="get", key=key[2])
