"""MooncakeConnector: stages on several nodes, through Mooncake's distributed store."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import logging
import math
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from omni_fastshm import codec
from omni_fastshm.base import Metadata, OmniConnectorBase, StageId
from omni_fastshm.errors import (
    ConfigError,
    ConnectorClosed,
    ForkedConnector,
    MetadataError,
    SegmentError,
)
from omni_fastshm.loans import check_numpy_dtype, check_shape, is_torch_dtype, plain
from omni_fastshm.settings import (
    Setting,
    check_consumers,
    check_device,
    check_edge,
    check_timeout,
    describe,
    parse_settings,
    request_name,
    resolve_namespace,
)

from ._mooncake_codes import EXISTS, FULL, MASTER_LOST, NOT_THERE, OK, RETRIED, RPC_FAIL, TRANSFER, describe_code
from ._mooncake_keys import POINTER_BYTES, Item, Names, read_pointer, write_pointer
from ._mooncake_ledger import Ledger
from ._mooncake_net import is_own_address, own_address
from ._mooncake_session import Endpoint, open_session

__all__ = ["SETTINGS", "MooncakeConnector"]

logger = logging.getLogger("omni_fastshm")

_MIN_SEGMENT = 16 << 20

SETTINGS: dict[str, Setting] = {
    "master": Setting("str", None, env=True, help="host:port of the Mooncake master; must be given"),
    "host": Setting(
        "str",
        None,
        env=True,
        help="address of this node that the others reach; default the one that leads to the master",
    ),
    "metadata_server": Setting(
        "str", "P2PHANDSHAKE", env=True, help="P2PHANDSHAKE, or http://host:8080/metadata; the same for all nodes"
    ),
    "segment": Setting(
        "size",
        512 << 20,
        env=True,
        help="memory that this node gives to the store; 0 (puts go to others) or from 16MB on",
    ),
    "localbuf": Setting("size", 256 << 20, env=True, help="memory for received payloads while views on them live"),
    "proto": Setting("choice", "tcp", choices=("tcp", "rdma"), env=True, help="how the bytes cross the network"),
    "rdma": Setting("str", "", env=True, help="RDMA devices, as mlx5_0,mlx5_1; empty lets Mooncake choose"),
    "get_timeout_s": Setting(
        "seconds", 30.0, minimum=1, help="how long one transfer may take; whole seconds; the process's first one counts"
    ),
    "setup_timeout_s": Setting("seconds", 10.0, help="how long to wait for the master when the connector is built"),
    "put_timeout_s": Setting("seconds", 5.0, help="how long a put waits for room before it answers (False, 0, None)"),
    "hard_pin": Setting("bool", True, help="untaken payloads are never evicted: a full store makes put wait"),
    "max_bytes": Setting(
        "bytes",
        None,
        minimum=4096,
        help="most bytes of this connector's untaken payloads; default `segment`, with hard_pin",
    ),
    "shm_threshold_bytes": Setting(
        "bytes", 65536, help="payloads from this serialized size on go to the store, smaller ones into the metadata"
    ),
    "namespace": Setting(
        "str", None, env=True, help="which connectors see each other; default $OMNI_FASTSHM_NAMESPACE, else 'default'"
    ),
    "key_lookup": Setting("bool", False, help="payloads can be got by (edge, request id) alone; all go to the store"),
    "linger_s": Setting("seconds", 0.0, help="how long close waits for takers of what is untaken"),
    "copy_below": Setting("bytes", 4096, help="leaves up to this size are copied out on get instead of being views"),
    "allow_pickle": Setting("bool", False, help="carry unknown objects by pickle; only among processes you trust"),
    "wire": Setting(
        "choice",
        "exact",
        choices=("exact", "host"),
        help="types as sent, or as the host's serializer gives them",
    ),
    "types": Setting("names", (), help="'module:Class' names that may be imported to rebuild payloads"),
}

_DIRECT_FROM = 4097  # smaller leaves are copied together with the header: a part of its own costs 50 us on the network
_MOST_PARTS = 1000  # the client refuses 2048 of them
_TOKEN = bytes(64)
_PREFIX = struct.Struct("<8xQ")  # of a frame: its own size
_LATE_S = 0.9  # less than the shortest timeout of the store; failures of other kinds come within ms
_PUTS_END_S = 6.0
_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.01
_open: weakref.WeakSet[MooncakeConnector] = weakref.WeakSet()

Answer = tuple[bool, int, Metadata | None]


class MooncakeConnector(OmniConnectorBase):
    """Moves payloads between nodes through Mooncake's store, over TCP or RDMA.

    A payload lies in the memory of the node that put it until it is taken; `get` copies it once, over the network,
    into this process. Connectors of a process with the same settings of the store share one client of it.

    Args:
        config: settings by name (`SETTINGS`); kept as `config`, the very object.

    Raises:
        ConfigError: a setting is wrong, Mooncake is not installed or cannot be loaded, or no master answers.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._stopped = True  # until everything stands: close() and __del__ find a half-built object harmless
        self._forked = False
        self.config = {} if config is None else config
        settings = parse_settings("MooncakeConnector", SETTINGS, config)
        endpoint = _endpoint(settings)
        self._key_lookup: bool = settings["key_lookup"]
        self.namespace = resolve_namespace(settings["namespace"], key_lookup=self._key_lookup)
        self.threshold: int = settings["shm_threshold_bytes"]
        self._names = Names(self.namespace)
        self._linger_s: float = settings["linger_s"]
        self._put_timeout_s: float = settings["put_timeout_s"]
        self._wire: str = settings["wire"]
        self._pickle: bool = settings["allow_pickle"]
        limit = settings["max_bytes"]
        if limit is None and settings["hard_pin"]:
            limit = endpoint.segment or None
        self._ledger = Ledger(limit)
        self._decode = {
            "types": tuple(settings["types"]),
            "allow_pickle": self._pickle,
            "wire": self._wire,
            "copy_below": settings["copy_below"],
        }
        self._lock = threading.RLock()  # a signal handler may close while the thread it interrupts holds it
        self._pointing = threading.RLock()
        self._executor: ThreadPoolExecutor | None = None
        self._final: dict[str, Any] | None = None
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._lease_numbers = itertools.count()
        self._putting: set[tuple[int, str]] = set()  # by thread; close drops what they leave
        self._doubtful: list[str] = []  # keys of puts that ended without an answer
        self._count = _Counters()
        self._session = open_session(
            endpoint, setup_timeout_s=settings["setup_timeout_s"], get_timeout_s=settings["get_timeout_s"]
        )
        self._placement = self._session.placement(settings["hard_pin"])
        self._stopped = False
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
        self._check_open("put")
        edge = _edge(from_stage, to_stage)
        request = request_id if type(request_id) is str and request_id.isascii() else request_name(request_id)
        takers = consumers if type(consumers) is int and 0 < consumers < 256 else check_consumers(consumers)
        if wait:
            return self._put(edge, request, data, takers)
        with self._lock:
            self._check_open("put")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="omni-fastshm-put")
            return self._executor.submit(self._put, edge, request, data, takers)

    def _put(self, edge: tuple[str, str], request: str, data: Any, takers: int) -> Answer:
        count = self._count
        try:
            plan = codec.plan(data, wire=self._wire, allow_pickle=self._pickle)
        except Exception:
            count.errors += 1
            raise
        size: int = plan.size
        if size < self.threshold and not self._key_lookup:
            metadata: Metadata = {"inline_bytes": plan.to_bytes(), "size": size}
            count.inline += 1
        else:
            item = Item(edge, request, self._names.new_nonce(), size, takers)
            mark = (threading.get_ident(), item.nonce)
            try:
                self._putting.add(mark)
                sent, code = self._send(item, plan)
            except _StoreError as error:
                sent, code = item, error.code
            finally:
                self._putting.discard(mark)
            if code != OK:
                self._say_refused(sent, code)
                return False, 0, None
            metadata = {"mooncake": self._place_of(sent), "size": size}
            count.stored += 1
        count.puts += 1
        count.bytes += size
        return True, size, metadata

    def _place_of(self, item: Item) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "from_stage": item.edge[0],
            "to_stage": item.edge[1],
            "request_id": item.request,
            "nonce": item.nonce,
            "size": item.size,
            "consumers": item.takers,
        }

    def _send(self, item: Item, plan: codec.Plan) -> tuple[Item, int]:
        """Put one object into the store; the item as it lies there, and a code."""
        if not self._session.master_answers():
            return item, RPC_FAIL
        started = time.monotonic()
        deadline = started + self._put_timeout_s
        if not self._make_room(item, started, deadline):
            return item, FULL
        code = FULL
        try:
            item, code = self._place(item, _parts(plan), deadline)
        finally:
            if code == OK:
                self._ledger.add(item)
            else:
                self._ledger.give_back(item.stored)
        if code == OK and self._key_lookup:
            try:
                code = self._point_to(item, deadline)
            except _StoreError as error:
                code = error.code
            if code != OK:
                self._cancel(item)
        if self._stopped:
            self._take_back(item)  # closed meanwhile: nobody would drop it
            self._check_open("put")
        if code == OK and self._ledger.should_sweep():
            with contextlib.suppress(_StoreError):  # the payload is there, whatever became of earlier ones
                self._sweep()
        return item, code

    def _make_room(self, item: Item, started: float, deadline: float) -> bool:
        """Take room from this connector's limit; the first that waits is the first that gets some."""
        ledger = self._ledger
        if ledger.reserve_at_once(item.stored):
            return True
        if ledger.limit is not None and item.stored > ledger.limit:
            return False
        ticket, pauses = ledger.queue(), _Pauses(deadline)
        try:
            while True:
                self._check_open("put")
                if ledger.is_first(ticket):
                    if ledger.reserve(item.stored):
                        return True
                    self._sweep()
                    if ledger.reserve(item.stored):
                        return True
                if not self._pause(pauses):
                    return False
        finally:
            ledger.leave(ticket)
            self._count.blocked_s += time.monotonic() - started

    def _place(self, item: Item, parts: _Parts, deadline: float) -> tuple[Item, int]:
        code = self._place_once(item, parts)
        if code not in RETRIED:
            return item, code
        started, pauses, twins = time.monotonic(), _Pauses(deadline), 0
        while code in RETRIED:
            twins += code == EXISTS
            if twins > 2 or not self._pause(pauses):
                break
            self._check_open("put")
            if code != FULL:
                item = item._replace(nonce=self._names.new_nonce())
            code = self._place_once(item, parts)
        self._count.blocked_s += time.monotonic() - started
        return item, code

    def _place_once(self, item: Item, parts: _Parts) -> int:
        """Tokens first: who finds the payload must find them, too."""
        tokens, key = self._names.tokens(item), self._names.payload(item)
        code, answered = OK, False
        try:
            if tokens:
                code = self._session.put_all(tokens, _TOKEN, self._placement)
            if code == OK:
                code = self._session.put(key, parts.addresses, parts.sizes, self._placement)
            answered = code not in MASTER_LOST
        finally:
            if not answered:
                self._doubtful += [*tokens, key]
            elif code != OK:
                self._session.remove_all([*tokens, key])
        return code

    def _pause(self, pauses: _Pauses) -> bool:
        """Wait a little for something to change; False when the time is over."""
        seconds = pauses.next()
        if seconds <= 0:
            return False
        with self._ledger.changed:
            if not self._stopped:
                self._ledger.changed.wait(seconds)
        return True

    def _say_refused(self, item: Item, code: int) -> None:
        self._count.refused += 1
        self._count.errors += code != FULL
        ledger, endpoint = self._ledger, self._session.endpoint
        if code != FULL:
            why = describe_code(code)
        elif ledger.limit is not None and item.stored > ledger.limit:
            why = "it is larger than max_bytes, which is `segment` where it is not set: raise them"
        else:
            why = (
                f"waited {self._put_timeout_s:g} s: takers are slow, or other nodes fill the store; raise "
                "`segment` or put_timeout_s, or send less at a time"
            )
        logger.warning(
            "put refused: request %r on %s->%s wants %d bytes, %d free (max_bytes %s, used %d, segment %d, master %s); "
            "%s",
            item.request,
            *item.edge,
            item.stored,
            ledger.free,
            ledger.limit,
            ledger.used,
            endpoint.segment,
            endpoint.master,
            why,
        )

    # -- pointers: how a payload is found without metadata

    def _point_to(self, item: Item, deadline: float) -> int:
        """Make `item` the newest of its edge and request; what that replaces is cancelled."""
        key = self._names.pointer(item.edge, item.request)
        record, pauses = write_pointer(item), _Pauses(deadline)
        with self._pointing:
            there, old = self._look(item.edge, item.request)
            for _ in range(8):
                if there:  # readable or not: the record of a producer that died is known for a while
                    self._session.remove(key)
                code = self._session.put_all([key], record, self._placement)
                if code == FULL and self._pause(pauses):
                    continue
                if code != OK:
                    return code
                # A put on a key that exists is answered with success and changes nothing: so look.
                there, now = self._look(item.edge, item.request)
                if now is not None and now.nonce == item.nonce:
                    break
            else:
                self._cancel(item)  # another producer was faster, again and again: its payload is the newest
        if old is not None and old.nonce != item.nonce:
            self._cancel(old)
        return OK

    def _look(self, edge: tuple[str, str], request: str) -> tuple[bool, Item | None]:
        """Whether there is a record, and which payload it says is the newest; None where it cannot be read."""
        memory = ctypes.create_string_buffer(POINTER_BYTES)
        code = self._session.get_into(self._names.pointer(edge, request), ctypes.addressof(memory), POINTER_BYTES)
        if code == POINTER_BYTES:
            return True, read_pointer(memory.raw, edge, request)
        if code not in NOT_THERE and code != TRANSFER:
            raise _StoreError(code)
        return code == TRANSFER, None

    def _drop_pointers(self, items: Sequence[Item]) -> None:
        """Of payloads that are gone, where nothing newer has taken the place."""
        for item in items:
            with self._pointing:
                _, now = self._look(item.edge, item.request)
                if now is not None and now.nonce == item.nonce:
                    self._session.remove(self._names.pointer(item.edge, item.request))

    # -- what became of what was put

    def _cancel(self, item: Item) -> None:
        """Tokens first: whoever reads the payload while it goes finds none, and throws away what it read."""
        tokens, payload = self._names.tokens(item), [self._names.payload(item)]
        for keys in filter(None, (tokens, payload)):
            codes = self._session.remove_all(keys)
            self._doubtful += [key for key, code in zip(keys, codes, strict=False) if code in MASTER_LOST]
        self._ledger.drop([item.nonce])

    def _take_back(self, item: Item) -> None:
        """The same, and nothing leads to it any more."""
        self._cancel(item)
        if self._key_lookup:
            with contextlib.suppress(_StoreError):
                self._drop_pointers([item])

    def _sweep(self) -> None:
        """Find out which payloads were taken, and tidy up after them."""
        ledger, session, names = self._ledger, self._session, self._names
        items = ledger.items()
        if items and session.master_answers():
            codes = session.exist([names.payload(item) for item in items])
            gone = [item for item, code in zip(items, codes, strict=False) if code == 0]
            tokens = [token for item in gone for token in names.tokens(item)]
            if tokens:  # of one that was evicted
                session.remove_all(tokens)
            if self._key_lookup:
                self._drop_pointers(gone)
            ledger.drop(item.nonce for item in gone)
        ledger.swept()
        doubtful, self._doubtful = self._doubtful, []
        if doubtful and session.master_answers():
            codes = session.remove_all(doubtful)
            self._doubtful += [key for key, code in zip(doubtful, codes, strict=False) if code in MASTER_LOST]
        else:
            self._doubtful += doubtful

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
        self._check_open("get")
        edge = _edge(from_stage, to_stage)
        request = request_id if type(request_id) is str and request_id.isascii() else request_name(request_id)
        if copy is not None and type(copy) is not bool:
            raise ConfigError(f"copy: {describe(copy)} is neither None, True nor False", op="get")
        check_device(device)
        wait_s = check_timeout(timeout)
        how = _How(copy, device)
        try:
            if metadata is None:
                found = self._get_by_key(edge, request, wait_s, how)
            else:
                found = self._get_by_metadata(edge, request, metadata, how)
        except _StoreError as error:
            self._say_failed(edge, request, error.code)
            found = None
        except Exception:
            self._count.errors += 1
            raise
        if found is None:
            self._count.misses += 1
        else:
            self._count.gets += 1
            self._count.bytes += found[1]
        return found

    def _get_by_metadata(
        self, edge: tuple[str, str], request: str, metadata: Metadata, how: _How
    ) -> tuple[Any, int] | None:
        if not isinstance(metadata, dict):
            raise MetadataError(f"metadata must be the dict that put returned, not {type(metadata).__name__}", op="get")
        if "inline_bytes" in metadata:
            return self._inline(metadata, request, how)
        return self._take(_item_of(metadata, edge, request, self.namespace), how)

    def _inline(self, metadata: Metadata, request: str, how: _How) -> tuple[Any, int]:
        frame = metadata["inline_bytes"]
        if isinstance(frame, memoryview):
            frame = frame.tobytes()
        if not isinstance(frame, (bytes, bytearray)):
            raise MetadataError(f"metadata['inline_bytes'] must be bytes, not {type(frame).__name__}", op="get")
        size = _whole(metadata, "size")
        if size != len(frame):
            raise MetadataError(f"metadata says {size} bytes, but carries {len(frame)}", op="get", key=request)
        return codec.decode(frame, device=how.device, **self._decode), size

    def _get_by_key(
        self, edge: tuple[str, str], request: str, wait_s: float | None, how: _How
    ) -> tuple[Any, int] | None:
        if not self._key_lookup:
            raise MetadataError(
                f"get of request {request!r} on {edge[0]}->{edge[1]} needs the metadata that put returned; "
                "getting by key alone works where both sides are built with key_lookup: true",
                op="get",
                key=request,
            )
        pauses = _Waits(wait_s)
        while True:
            self._check_master()
            _, item = self._look(edge, request)
            found = None if item is None else self._take(item, how)
            if found is not None or not self._pause(pauses):
                return found
            self._check_open("get")

    def _take(self, item: Item, how: _How) -> tuple[Any, int] | None:
        """Decode first, use up the take after: a payload that this process cannot rebuild can be got again."""
        buffer = self._fetch(item)
        if buffer is None:
            return None
        view = memoryview(buffer)
        self._count_lease(buffer)
        announced = len(view) == item.stored and _PREFIX.unpack_from(view)[0] == item.size
        try:
            if not announced:
                raise MetadataError(
                    f"request {item.request!r}: {item.size} bytes were announced, but something else is in the store",
                    op="get",
                    key=item.request,
                )
            data = codec.decode(
                view, source=_Copy(view), copy=how.copy, writable=item.takers == 1, device=how.device, **self._decode
            )
        except Exception as error:
            # Bytes that nobody can read must not wait for a taker for ever. What was removed while it was read may be
            # a mixture: that is no error of the payload, somebody else has taken it.
            unreadable = announced and isinstance(error, MetadataError)
            if not (self._claim(item) if unreadable else self._is_there(item)):
                return None
            raise
        return (data, item.size) if self._claim(item) else None

    def _is_there(self, item: Item) -> bool:
        return self._size_of(item) is not None

    def _size_of(self, item: Item) -> int | None:
        size = self._session.size_of(self._names.payload(item))
        if size in NOT_THERE:
            return None
        if size < 0:
            raise _StoreError(size)
        return size

    def _count_lease(self, buffer: Any) -> None:
        leases, number = self._leases, next(self._lease_numbers)
        leases[number] = weakref.ref(buffer, lambda _: leases.pop(number, None))

    def _fetch(self, item: Item) -> Any:
        """The payload's bytes in memory of this process; None where it is not there."""
        self._check_master()
        session, key = self._session, self._names.payload(item)
        started = time.monotonic()
        handle = session.get_buffer(key)
        if handle is not None:
            return handle
        # That was everything from "not there" to "local buffer full". What fails late would fail as late again.
        if time.monotonic() - started > _LATE_S:
            raise _StoreError(session.who_was_late())
        size = self._size_of(item)
        if size is None:
            return None
        if size != item.stored:
            raise MetadataError(
                f"request {item.request!r}: {item.size} bytes were announced, the store has {size}",
                op="get",
                key=item.request,
            )
        memory, address = _own_memory(size)
        code = session.get_into(key, address, size)
        if code in NOT_THERE:
            return None
        if code != size:
            raise _StoreError(code)
        self._count.own_memory += 1
        return memory

    def _claim(self, item: Item) -> bool:
        """Use up one take. Removing an object succeeds for one caller only: that is what makes "once" hold.

        What was read while somebody removed the payload may be a mixture; then there is nothing left to claim.
        """
        names, session = self._names, self._session
        tokens = names.tokens(item)
        if tokens:
            there = session.exist(tokens)
            unknown = [code for code in there if code < 0]
            if unknown:
                raise _StoreError(unknown[0])
            tokens = [token for token, code in zip(tokens, there, strict=False) if code == 1]
        for key in (*tokens, names.payload(item)):
            code = session.remove(key)
            if code == OK:
                if key == names.payload(item) and self._ledger.drop([item.nonce]) and self._key_lookup:
                    with contextlib.suppress(_StoreError):
                        self._drop_pointers([item])  # put by this very connector: no sweep would find it any more
                return True
            if code not in NOT_THERE:
                raise _StoreError(code)
        return False

    def _check_master(self) -> None:
        if not self._session.master_answers():
            raise _StoreError(RPC_FAIL)

    def _say_failed(self, edge: tuple[str, str], request: str, code: int) -> None:
        self._count.errors += 1
        if code in MASTER_LOST:
            self._count.master_lost += 1
        elif code == TRANSFER:
            self._count.producer_gone += 1
        logger.warning(
            "get failed: request %r on %s->%s (master %s): %s",
            request,
            *edge,
            self._session.endpoint.master,
            describe_code(code),
        )

    # -- the rest

    def cleanup(self, request_id: StageId) -> None:
        request = request_name(request_id)
        if self._stopped:
            return
        try:
            if self._session.master_answers():
                self._cleanup(request)
        except ConnectorClosed:
            return
        if self._session.lost:
            logger.warning("cleanup of request %r reached nobody: %s", request, describe_code(RPC_FAIL))

    def _cleanup(self, request: str) -> None:
        """By pattern, for the payloads may be of any producer and on any edge; the order is that of `_cancel`."""
        for pattern in self._names.request_patterns(request):
            if self._session.remove_matching(pattern) in MASTER_LOST:
                return
        mine = self._ledger.items(request)
        if mine:
            codes = self._session.exist([self._names.payload(item) for item in mine])
            self._ledger.drop(item.nonce for item, code in zip(mine, codes, strict=False) if code == 0)

    def health(self) -> dict[str, Any]:
        if self._final is not None:
            return {**self._final, "leases": len(self._leases)}
        return self._figures(self._status())

    def _status(self) -> str:
        if self._stopped:
            return "closed"
        try:
            if self._session.master_answers() and self._session.exist([self._names.probe]) == [0]:
                self._sweep()
        except ConnectorClosed:
            return "closed"
        except _StoreError:
            return "master lost"
        return "master lost" if self._session.lost else "ok"

    def _figures(self, status: str) -> dict[str, Any]:
        count, ledger, endpoint = self._count, self._ledger, self._session.endpoint
        return {
            "status": status,
            "connector": type(self).__name__,
            "namespace": self.namespace,
            "puts": count.puts,
            "gets": count.gets,
            "bytes_transferred": count.bytes,
            "inline_writes": count.inline,
            "shm_writes": 0,
            "store_writes": count.stored,
            "refused": count.refused,
            "errors": count.errors,
            "misses": count.misses,
            "dropped": count.dropped,
            "producer_gone": count.producer_gone,
            "master_lost": count.master_lost,
            "own_memory_reads": count.own_memory,
            "blocked_s": count.blocked_s,
            "live_blocks": len(ledger),
            "leases": len(self._leases),
            "used_bytes": ledger.used,
            "capacity_bytes": endpoint.segment if ledger.limit is None else ledger.limit,
            "pinned_bytes": 0,
            "master": endpoint.master,
            "host": endpoint.host,
        }

    def allocate(self, shape: Sequence[int] | int, dtype: Any) -> Any:
        """Plain memory of this process; `put` copies it like any other, once, into the store.

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
        self._check_open("allocate")
        sizes = check_shape(shape)
        kind = dtype if is_torch_dtype(dtype) else check_numpy_dtype(dtype)
        try:
            return plain(sizes, kind)
        except (MemoryError, RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise SegmentError(f"no memory for {describe(sizes)} of {dtype}: {error}", op="allocate") from None

    def close(self) -> None:
        """Drop what nobody takes within `linger_s`, and let go of the store's client. Idempotent, never raises.

        The last connector of a process closes the client itself: that takes 1 to 2 s, in which no other thread of
        Python runs. Received views live on: they lie in memory of this process.
        """
        if getattr(self, "_stopped", True):
            return
        with self._lock:
            if self._stopped:
                return
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
            self._stopped = True
        try:
            self._close()
        except Exception:
            logger.exception("closing a MooncakeConnector of namespace %s", self.namespace)

    def _close(self) -> None:
        ledger = self._ledger
        try:
            with ledger.changed:
                ledger.changed.notify_all()  # waiting calls of this process look around, and find it closed
            self._let_puts_end()
            self._linger()
            self._count.dropped = self._drop_all()
            if self._count.dropped:
                logger.info("closed with %d payloads that nobody had taken: dropped", self._count.dropped)
        except _StoreError as error:
            logger.warning("close could not drop what nobody has taken: %s", error)
        finally:
            ledger.drop([item.nonce for item in ledger.items()])
            self._final = self._figures("closed")
            _open.discard(self)
            self._session.release()

    def _let_puts_end(self) -> None:
        """Puts of other threads that are in the store: what they put would stay there, for nobody would drop it."""
        me, deadline = threading.get_ident(), time.monotonic() + _PUTS_END_S
        while any(ident != me for ident, _ in tuple(self._putting)) and time.monotonic() < deadline:
            with self._ledger.changed:
                self._ledger.changed.wait(_PAUSE_S)

    def _linger(self) -> None:
        deadline = time.monotonic() + self._linger_s
        while self._linger_s and len(self._ledger):
            self._sweep()
            left = deadline - time.monotonic()
            if left <= 0 or not len(self._ledger) or self._session.lost:
                return
            with self._ledger.changed:
                self._ledger.changed.wait(min(left, _LONGEST_PAUSE_S))

    def _drop_all(self) -> int:
        """Everything that this connector has in the store; how many payloads that were not taken."""
        session, names = self._session, self._names
        if not len(self._ledger) and not self._doubtful:
            return 0
        self._check_master()
        self._sweep()
        items = self._ledger.items()
        if session.lost:
            raise _StoreError(RPC_FAIL)
        if not items:
            return 0
        tokens = [token for item in items for token in names.tokens(item)]
        if tokens:
            session.remove_all(tokens)
        codes = session.remove_all([names.payload(item) for item in items])
        if self._key_lookup:
            self._drop_pointers(items)
        return codes.count(OK)

    def __del__(self) -> None:
        # Waiting for takers here would let go of locks that the interrupted code relies on.
        self._linger_s = 0.0
        super().__del__()

    def _check_open(self, op: str) -> None:
        if not self._stopped:
            return
        if self._forked:
            raise ForkedConnector("this connector was made before a fork: build one of its own in the child", op=op)
        raise ConnectorClosed(f"{op} on a connector that is closed", op=op)


class _Counters:
    def __init__(self) -> None:
        self.puts = self.gets = self.bytes = self.inline = self.stored = self.refused = self.errors = 0
        self.misses = self.dropped = self.producer_gone = self.master_lost = self.own_memory = 0
        self.blocked_s = 0.0


class _StoreError(Exception):
    """The store answered a get with a code that is neither success nor "not there"."""

    def __init__(self, code: int) -> None:
        super().__init__(describe_code(code))
        self.code = code


class _How(NamedTuple):
    """How a payload shall arrive."""

    copy: bool | None
    device: Any


class _Parts(NamedTuple):
    """A frame as the store gathers it; `keep` holds the memory that the addresses are in."""

    addresses: list[int]
    sizes: list[int]
    keep: tuple[Any, ...]


def _parts(plan: codec.Plan) -> _Parts:
    addresses, sizes, memory = plan.gather(_DIRECT_FROM)
    if len(addresses) > _MOST_PARTS:
        addresses, sizes, memory = plan.gather(plan.frame_size + 1)
    return _Parts(addresses, sizes, (plan, memory))


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


class _Pauses:
    """How long to sleep between two looks: first short, then longer, never beyond the deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause = _PAUSE_S

    def next(self) -> float:
        left = self._deadline - time.monotonic()
        pause, self._pause = self._pause, min(self._pause * 2, _LONGEST_PAUSE_S)
        return min(left, pause)


class _Waits(_Pauses):
    """The same for a get: a twentieth of what was waited so far, from 0.2 to 20 ms."""

    def __init__(self, wait_s: float | None) -> None:
        self._start = time.monotonic()
        super().__init__(math.inf if wait_s is None else self._start + wait_s)

    def next(self) -> float:
        now = time.monotonic()
        return min(self._deadline - now, max(0.0002, min((now - self._start) / 20, 0.02)))


_known_edge = functools.lru_cache(maxsize=1024, typed=True)(check_edge)  # typed: True is not the stage 1


def _edge(from_stage: StageId, to_stage: StageId) -> tuple[str, str]:
    try:
        return _known_edge(from_stage, to_stage)
    except TypeError:  # unhashable: let the check say what is wrong with it
        return check_edge(from_stage, to_stage)


def _endpoint(settings: Mapping[str, Any]) -> Endpoint:
    master, segment = settings["master"], settings["segment"]
    if not master:
        raise ConfigError(
            "MooncakeConnector: master: must be given, as host:port (`omni-fastshm mooncake up` prints it)"
        )
    if 0 < segment < _MIN_SEGMENT:
        raise ConfigError(
            f"MooncakeConnector: segment: {segment} is too small: the least is {_MIN_SEGMENT}, or 0 for none"
        )
    if settings["localbuf"] == 0:
        raise ConfigError("MooncakeConnector: localbuf: 0 leaves no memory to receive in")
    host = settings["host"] or own_address(master)
    if not is_own_address(host):
        logger.warning("host %r is no address of this machine: other nodes may not reach what is put here", host)
    if settings["proto"] == "rdma" and not os.path.isdir("/sys/class/infiniband"):
        logger.warning("proto is rdma, but this machine has no RDMA device: Mooncake may go over TCP without a word")
    return Endpoint(
        host, settings["metadata_server"], master, segment, settings["localbuf"], settings["proto"], settings["rdma"]
    )


def _item_of(metadata: Metadata, edge: tuple[str, str], request: str, namespace: str) -> Item:
    """What metadata leads to, after a check against this call; nothing in it becomes a key but the nonce."""
    place = metadata.get("mooncake")
    if not isinstance(place, dict):
        raise MetadataError(
            f"metadata has neither 'inline_bytes' nor 'mooncake': {describe(metadata)}", op="get", key=request
        )
    said = place.get("from_stage"), place.get("to_stage"), place.get("request_id")
    if not all(isinstance(each, str) for each in said) or said != (*edge, request):
        raise MetadataError(
            f"metadata belongs to request {describe(said[2])} on {describe(said[0])} -> {describe(said[1])}, "
            f"not to {describe(request)} on {describe(edge[0])} -> {describe(edge[1])}",
            op="get",
            key=request,
        )
    where = place.get("namespace")
    if not isinstance(where, str) or where != namespace:
        raise MetadataError(
            f"the payload is in the namespace {describe(where)}, this connector in {namespace!r}",
            op="get",
            key=request,
        )
    size, takers, nonce = _whole(metadata, "size"), _whole(place, "consumers"), place.get("nonce")
    if _whole(place, "size") != size:
        raise MetadataError(f"metadata gives two sizes: {size} and {place['size']}", op="get", key=request)
    if not 1 <= takers <= 255 or not isinstance(nonce, str) or not Names.is_nonce(nonce):
        raise MetadataError(f"metadata is damaged: {describe(place)}", op="get", key=request)
    return Item(edge, request, nonce, size, takers)


def _whole(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise MetadataError(f"metadata[{name!r}] must be a size or a number, not {describe(value)}", op="get")
    return value


def _close_all() -> None:
    for connector in list(_open):
        connector.close()


def _disown() -> None:
    """After a fork, in the child: what was inherited must neither work nor tidy up."""
    for connector in list(_open):
        connector._forked = connector._stopped = True
        connector._final = connector._figures("forked")
        _open.discard(connector)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown)
