"""MooncakeConnector: stages on several nodes, through Mooncake's distributed store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from omni_fastshm import codec
from omni_fastshm._meter import Meter
from omni_fastshm._meter import start as _now
from omni_fastshm.base import Metadata, OmniConnectorBase, StageId
from omni_fastshm.errors import ConnectorClosed, locate
from omni_fastshm.loans import own_memory
from omni_fastshm.observers import log_fields, meter_figures, tell_closed
from omni_fastshm.placement import check_placement
from omni_fastshm.settings import (
    check_consumers,
    check_copy,
    check_timeout,
    known_edge,
    parse_settings,
    request_name,
    resolve_namespace,
)

from . import _refusals
from ._ends import Dropped, Open, tell_dropped
from ._mooncake_codes import FULL, MASTER_LOST, OK, RPC_FAIL, TRANSFER, StoreError, describe_code
from ._mooncake_gate import LONGEST_PAUSE_S, Gate
from ._mooncake_keys import Item, Names
from ._mooncake_ledger import Ledger
from ._mooncake_metadata import metadata_of
from ._mooncake_receive import How, Receiver
from ._mooncake_send import Sender
from ._mooncake_session import open_session
from ._mooncake_settings import SETTINGS, endpoint_of
from ._mooncake_shelf import Shelf

__all__ = ["SETTINGS", "MooncakeConnector"]

logger = logging.getLogger("omni_fastshm")

_SAY_AGAIN_S = 10.0


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
        self.config = {} if config is None else config
        settings = parse_settings("MooncakeConnector", SETTINGS, config)
        endpoint = endpoint_of(settings)
        key_lookup: bool = settings["key_lookup"]
        self.namespace = resolve_namespace(settings["namespace"], key_lookup=key_lookup)
        self.threshold: int = settings["shm_threshold_bytes"]
        # What travels in the metadata cannot be found by key.
        self._inline_below = 0 if key_lookup else self.threshold
        self._linger_s: float = settings["linger_s"]
        self._wire: str = settings["wire"]
        self._pickle: bool = settings["allow_pickle"]
        self._names = Names(self.namespace)
        self._lock = threading.RLock()  # a signal handler may close while the thread it interrupts holds it
        self._executor: ThreadPoolExecutor | None = None
        self._final: dict[str, Any] | None = None
        self._count = _Counters()
        self._no_room = _refusals.Refusals()
        self._say_again: dict[int, float] = {}
        self._meter = Meter(type(self).__name__, self.namespace)
        self._session = open_session(
            endpoint, setup_timeout_s=settings["setup_timeout_s"], get_timeout_s=settings["get_timeout_s"]
        )
        self._ledger = Ledger(self._session.room, settings["max_bytes"], bounded=settings["hard_pin"])
        self._gate = Gate(self._ledger.changed)  # closed until everything stands: close() finds a half-built object
        placement = self._session.placement(settings["hard_pin"])
        self._shelf = Shelf(self._session, self._names, self._ledger, placement, key_lookup=key_lookup)
        self._sender = Sender(self._shelf, self._gate, timeout_s=settings["put_timeout_s"])
        decoder = codec.decoder(
            types=tuple(settings["types"]),
            allow_pickle=self._pickle,
            wire=self._wire,
            copy_below=settings["copy_below"],
        )
        self._receiver = Receiver(
            self._shelf, self._gate, namespace=self.namespace, decoder=decoder, tell=self._say_failed_look
        )
        self._gate.stopped = False
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
        if self._gate.stopped:
            self._gate.check("put")
        edge = known_edge(from_stage, to_stage)
        request = request_id if type(request_id) is str and request_id.isascii() else request_name(request_id)
        takers = consumers if type(consumers) is int and 0 < consumers < 256 else check_consumers(consumers)
        if not wait:
            with self._lock:  # a close meanwhile ends the helper
                return self._helper().submit(self.put, *edge, request, data, consumers=takers)
        began = _now()
        try:
            plan = codec.plan(data, wire=self._wire, allow_pickle=self._pickle)
            size: int = plan.size
            answer: tuple[bool, int, Metadata | None] = False, 0, None
            if size < self._inline_below:
                answer = True, size, {"inline_bytes": plan.to_bytes(), "size": size}
            else:
                item, code = self._sender.send(edge, request, takers, plan)
                if code == OK:
                    answer = True, size, metadata_of(item, self.namespace)
                else:
                    self._say_refused(item, code)
        except Exception as error:
            locate(error, "put", request)
            self._meter.failed("put", began, edge, request)
            raise
        self._meter.sent(began, edge, request, answer)
        return answer

    def _helper(self) -> ThreadPoolExecutor:
        self._gate.check("put")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="omni-fastshm-put")
        return self._executor

    def _say_refused(self, item: Item, code: int) -> None:
        self._count.refused += 1
        self._count.errors += code != FULL
        ledger, endpoint = self._ledger, self._session.endpoint
        if code != FULL:
            reason, why = _refusals.MASTER_LOST if code in MASTER_LOST else _refusals.STORE, describe_code(code)
        elif ledger.most is not None and item.stored > ledger.most:
            reason = _refusals.TOO_LARGE
            why = "it is larger than max_bytes, which is `segment` where it is not set: raise them"
        else:
            reason = _refusals.FULL
            why = (
                f"waited {self._sender.timeout_s:g} s: takers are slow, or other nodes fill the store; raise "
                "`segment` or put_timeout_s, or send less at a time"
            )
        level, more = self._no_room.note(reason, *item.edge)
        logger.log(
            level,
            "put refused: request %r on %s->%s wants %d bytes, %d free (max_bytes %s, used %d, segment %d, master %s); "
            "%s%s",
            item.request,
            *item.edge,
            item.stored,
            ledger.free,
            ledger.most,
            ledger.used,
            endpoint.segment,
            endpoint.master,
            why,
            more,
            extra=log_fields(item.edge, item.request, item.size),
        )

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
        if self._gate.stopped:
            self._gate.check("get")
        edge = known_edge(from_stage, to_stage)
        request = request_id if type(request_id) is str and request_id.isascii() else request_name(request_id)
        check_copy(copy)
        if device is not None:
            check_placement(device)
        wait_s = check_timeout(timeout)
        how = How(copy, device)
        began = _now()
        try:
            if metadata is None:
                found = self._receiver.by_key(edge, request, wait_s, how)
            else:
                found = self._receiver.by_metadata(edge, request, metadata, how)
        except StoreError as error:
            self._say_failed(edge, request, error.code, polled=metadata is None)
            found = None
        except Exception as error:
            locate(error, "get", request)
            self._meter.failed("get", began, edge, request)
            raise
        self._meter.got(began, edge, request, found)
        return found

    def _say_failed_look(self, edge: tuple[str, str], request: str, code: int) -> None:
        self._say_failed(edge, request, code, polled=True)

    def _say_failed(self, edge: tuple[str, str], request: str, code: int, *, polled: bool) -> None:
        self._count.errors += 1
        if code in MASTER_LOST:
            self._count.master_lost += 1
        elif code == TRANSFER:
            self._count.producer_gone += 1
        level = logging.WARNING
        if polled and (code in MASTER_LOST or code == TRANSFER):  # hosts do so thousands of times a second
            now = time.monotonic()
            if now < self._say_again.get(code, 0):
                level = logging.DEBUG
            else:
                self._say_again[code] = now + _SAY_AGAIN_S
        logger.log(
            level,
            "get failed: request %r on %s->%s (master %s): %s",
            request,
            *edge,
            self._session.endpoint.master,
            describe_code(code),
            extra=log_fields(edge, request, 0),
        )

    def _looked_in_vain(self, from_stage: StageId, to_stage: StageId) -> None:
        self._meter.forget_misses(known_edge(from_stage, to_stage), 1)

    # -- the rest

    def cleanup(self, request_id: StageId) -> None:
        request = request_name(request_id)
        if self._gate.stopped:
            return
        try:
            if self._session.master_answers():
                self._shelf.remove_request(request)
        except ConnectorClosed:
            return
        if self._session.lost:
            logger.warning("cleanup of request %r reached nobody: %s", request, describe_code(RPC_FAIL))

    def health(self) -> dict[str, Any]:
        if self._final is not None:
            return {**self._final, **self._lease_figures()}
        return self._figures(self._status())

    def _status(self) -> str:
        if self._gate.stopped:
            return "closed"
        try:
            if self._session.master_answers() and self._session.exist([self._names.probe]) == [0]:
                self._shelf.sweep()
        except ConnectorClosed:
            return "closed"
        except StoreError:
            return "master lost"
        return "master lost" if self._session.lost else "ok"

    def _figures(self, status: str) -> dict[str, Any]:
        count, ledger, endpoint = self._count, self._ledger, self._session.endpoint
        figures = meter_figures(self._meter)
        return {
            "status": status,
            "connector": type(self).__name__,
            "namespace": self.namespace,
            **figures,
            "inline_writes": self._meter.inline,
            "inline_fallbacks": 0,
            "shm_writes": 0,
            "own_segment_writes": 0,
            "store_writes": self._meter.puts - self._meter.inline,
            "refused": count.refused,
            "no_room": self._no_room.by_reason,
            "errors": figures["errors"] + count.errors,
            "dropped": count.dropped,
            "producer_gone": count.producer_gone,
            "master_lost": count.master_lost,
            "own_memory_reads": self._receiver.own_memory,
            "blocked_s": self._sender.blocked_s,
            "live_blocks": len(ledger),
            "used_bytes": ledger.used,
            "high_water_bytes": ledger.peak,
            "capacity_bytes": endpoint.segment if ledger.most is None else ledger.most,
            "pinned_bytes": 0,
            "master": endpoint.master,
            "host": endpoint.host,
            **self._lease_figures(),
        }

    def _lease_figures(self) -> dict[str, Any]:
        return {"leases": self._receiver.leases, "oldest_lease_s": self._receiver.oldest_lease_s, "long_leases": []}

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
        self._gate.check("allocate")
        return own_memory(shape, dtype)

    def close(self) -> None:
        """Drop what nobody takes within `linger_s`, and let go of the store's client. Idempotent, never raises.

        The last connector of a process closes the client itself: that takes 1 to 2 s, in which no other thread of
        Python runs. Received views live on: they lie in memory of this process.
        """
        gate: Any = getattr(self, "_gate", None)
        if gate is None or gate.stopped:
            return
        with self._lock:
            if gate.stopped:
                return
            gate.stopped = True  # first: what is told of a cancelled put may put again, and must be refused
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
        try:
            self._close()
        except Exception:
            logger.exception("closing a MooncakeConnector of namespace %s", self.namespace)

    def _close(self) -> None:
        ledger = self._ledger
        try:
            with ledger.changed:
                ledger.changed.notify_all()  # waiting calls of this process look around, and find it closed
            self._sender.let_end()
            self._linger()
            dropped = self._shelf.drop_all()
            self._count.dropped = len(dropped)
            what = [Dropped("->".join(item.edge), 1, item.size, item.request) for item in dropped]
            tell_dropped("MooncakeConnector", self.namespace, len(dropped), what, self._linger_s)
        except StoreError as error:
            logger.warning("close could not drop what nobody has taken: %s", error)
        finally:
            ledger.retire()
            self._final = self._figures("closed")
            _open.discard(self)
            try:
                tell_closed(self, self._meter, self._final)
            finally:
                self._session.release()

    def _linger(self) -> None:
        deadline = time.monotonic() + self._linger_s
        while self._linger_s and len(self._ledger):
            self._shelf.sweep()
            left = deadline - time.monotonic()
            if left <= 0 or not len(self._ledger) or self._session.lost:
                return
            with self._ledger.changed:
                self._ledger.changed.wait(min(left, LONGEST_PAUSE_S))

    def __del__(self) -> None:
        # Waiting for takers here would let go of locks that the interrupted code relies on.
        self._linger_s = 0.0
        super().__del__()


class _Counters:
    def __init__(self) -> None:
        self.refused = self.errors = self.dropped = self.producer_gone = self.master_lost = 0


def _disown(connector: MooncakeConnector) -> None:
    connector._gate.forked = connector._gate.stopped = True
    connector._final = connector._figures("forked")


_open = Open(_disown)
