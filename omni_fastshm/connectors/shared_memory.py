"""SharedMemoryConnector: one copy into a ring in POSIX shared memory, views out."""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from omni_fastshm import _place, codec, janitor, segments
from omni_fastshm._core import (
    BELLS,
    Directory,
    Extent,
    Inbox,
    Lease,
    Outbox,
    Reservation,
    cancel_older,
    receive_newest,
    supersede,
)
from omni_fastshm._meter import Meter
from omni_fastshm._meter import start as _now
from omni_fastshm.arrivals import SLICE_NS, Arrivals
from omni_fastshm.base import Metadata, OmniConnectorBase, StageId
from omni_fastshm.connectors._later import Later
from omni_fastshm.connectors._watch import Watch
from omni_fastshm.consumer import Consumer
from omni_fastshm.copiers import Copiers
from omni_fastshm.directory import leave_directory, open_directory
from omni_fastshm.errors import (
    ConfigError,
    ConnectorClosed,
    FastShmError,
    ForkedConnector,
    MetadataError,
    SegmentError,
    locate,
)
from omni_fastshm.keys import edge_hash, request_hash, stage_hash
from omni_fastshm.lease_trace import make_trace
from omni_fastshm.loans import make_loan
from omni_fastshm.metadata import check_place, inline_frame
from omni_fastshm.observers import log_fields, meter_figures, tell_closed
from omni_fastshm.placement import check_placement
from omni_fastshm.producer import Producer
from omni_fastshm.settings import (
    Setting,
    check_consumers,
    check_copy,
    check_timeout,
    known_edge,
    parse_settings,
    request_name,
    resolve_namespace,
    stage_name,
)
from omni_fastshm.staging import Begun, Staging, devices, parked, pinned_bytes

from ._ends import Dropped, Open, tell_dropped
from ._refusals import FULL, MOUNT_FULL, NO_INODES, SAY_AGAIN_S, SYSTEM, TOO_LARGE, Refusals
from ._shared_settings import CODEC, LINGER, PUT_TIMEOUT

logger = logging.getLogger("omni_fastshm")

SETTINGS: dict[str, Setting] = {
    "shm_threshold_bytes": Setting(
        "bytes",
        65536,
        help="payloads from this serialized size on go to shared memory, smaller ones into the metadata",
    ),
    "segment_bytes": Setting(
        "bytes",
        64 << 20,
        minimum=4096,
        help="usual size of a data segment; its memory is taken piece by piece after the first payload",
    ),
    "max_bytes": Setting(
        "bytes",
        None,
        minimum=4096,
        help="limit for all data segments; default, at most 4 GiB, half of what is free or only held by dead producers",
    ),
    "put_timeout_s": PUT_TIMEOUT,
    "fallback": Setting(
        "choice",
        "refuse",
        choices=("refuse", "inline"),
        help="what becomes of a payload that finds no room: refused, or sent inside its metadata",
    ),
    "copy_threads": Setting(
        "int",
        1,
        minimum=1,
        maximum=16,
        help="threads that copy a payload of 16 MiB and more; worth it where other cores are idle",
    ),
    "busy_wait_us": Setting("microseconds", 20.0, maximum=1e6, help="how long a waiting get spins before it sleeps"),
    "namespace": Setting(
        "str",
        None,
        help="which connectors find each other by key and tidy up together; default $OMNI_FASTSHM_NAMESPACE, else "
        "'default'",
    ),
    "key_lookup": Setting(
        "bool", False, help="payloads can be got by (edge, request id) alone; all of them go to shared memory"
    ),
    "orphan_ttl_s": Setting("seconds", 60.0, help="how long untaken payloads of a killed producer stay"),
    "linger_s": LINGER,
    "idle_segment_s": Setting("seconds", 2.0, help="how long an extra data segment may be unused before it goes"),
    **CODEC,
    "pin": Setting(
        "auto",
        "auto",
        help="page-lock segments for devices: auto when the first device tensor crosses one, true also for mere views",
    ),
    "pin_bytes": Setting("bytes", 4 << 30, help="page-lock no more than this in the whole process"),
}

_T = TypeVar("_T")
_THREADS_FROM = 16 << 20  # below that, waking the threads takes what they win (docs/decisions/0009)
_EVER = 2**63  # bytes
_TIMES = (int, float)
_NEW_NAMES = 3  # somebody who removes names one by one catches new ones as well; it ends at some time
_SAY_AGAIN_S = 60.0  # so often at most a connector logs that payloads travel inline for one and the same reason
_LOOKS = 100  # a get looks again while the bell rings, but not for ever: other payloads of its stage ring it as well


class SharedMemoryConnector(OmniConnectorBase):
    """Moves payloads between processes of one host through rings in shared memory.

    Args:
        config: settings by name (`SETTINGS`); kept as `config`, the very object.

    Raises:
        ConfigError: a setting is unknown or out of range; all problems in one message.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._stopped = True  # until everything stands: close() and __del__ find a half-built object harmless
        self._forked = False
        self.config = {} if config is None else config
        settings = parse_settings("SharedMemoryConnector", SETTINGS, config)
        self._settings = settings
        self._key_lookup: bool = settings["key_lookup"]
        self.namespace = resolve_namespace(settings["namespace"], key_lookup=self._key_lookup)
        self._fallback = settings["fallback"] == "inline"
        if self._fallback and self._key_lookup:
            raise ConfigError(
                "fallback: 'inline' cannot be combined with key_lookup: a payload inside the metadata cannot be found "
                "by edge and request id; use fallback: refuse, or carry the metadata without key_lookup"
            )
        self.threshold: int = settings["shm_threshold_bytes"]
        self._wire: str = settings["wire"]
        self._pickle: bool = settings["allow_pickle"]
        self._types: tuple[str, ...] = tuple(settings["types"])
        self._staging = Staging(settings["pin"], settings["pin_bytes"])
        self._spin_ns = int(settings["busy_wait_us"] * 1000)
        self._lock = threading.RLock()  # a signal handler may close while the thread it interrupts holds it
        # All that have names of ours; in use are the first that is not given up, and the first directory. What a put
        # makes goes in at the end, and comes out, in one step: a signal handler may make or close the same meanwhile,
        # and nobody would remove the names of what is in neither list.
        self._made: list[Producer] = []
        self._joined: list[Directory] = []
        self._directory: Directory | None = None
        self._arrivals: dict[int, Arrivals] = {}  # by receiving stage, for tasks that wait
        self._consumer = Consumer()
        self._later = Later()
        self._final: dict[str, Any] | None = None
        self._dropped = 0
        self._blocked_s = 0.0  # of producers that were given up
        self._fallbacks = 0
        self._no_room = Refusals(_SAY_AGAIN_S if self._fallback else SAY_AGAIN_S)
        self._refused = 0
        self._high_water = 0  # of producers that were given up
        self._meter = Meter(type(self).__name__, self.namespace, settings["segment_bytes"])
        self._trace = make_trace()
        self._decoder = codec.decoder(
            types=self._types, allow_pickle=self._pickle, wire=self._wire, copy_below=settings["copy_below"]
        )
        self._copiers = Copiers(settings["copy_threads"]) if settings["copy_threads"] > 1 else None
        self._path = _place.Path(
            codec=codec.CODEC,
            host_wire=self._wire == "host",
            allow_pickle=self._pickle,
            decoder=self._decoder,
            meter=self._meter,
            threshold=self.threshold,
            keyed=self._key_lookup,
            inboxes=self._consumer.known,
            host=segments.host_identity(),
            edge=_edge,
            name=request_name,
            views=self._trace is None and not self._staging.pin_views,
            alone=_EVER if self._copiers is None else _THREADS_FROM,
        )
        janitor.sweep(self.namespace)
        if self._key_lookup:
            self._directory = open_directory(self.namespace)
            self._joined += filter(None, [self._directory])
        self._stopped = False
        self._path.open = True
        _open.add(self)

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
        if wait is True and type(consumers) is int and consumers == 1:
            answer = self._path.put(self, from_stage, to_stage, request_id, data)
            if answer is not NotImplemented:
                return answer
        if self._stopped:
            self._refuse("put")
        edge = known_edge(from_stage, to_stage)
        request = request_id if type(request_id) is str and request_id.isascii() else request_name(request_id)
        takers = consumers if type(consumers) is int and 0 < consumers < 256 else check_consumers(consumers)
        if not wait:
            return self._submit(edge, request, data, takers)
        producer = self._producer
        if producer is None or not producer.outbox.lent:
            return self._put(edge, request, data, takers, None)
        return self._put_claiming(edge, request, data, takers)

    def _put_each(
        self, from_stage: StageId, to_stage: StageId, items: Iterable[Any], one: Callable[[Any], Any], everyday: bool
    ) -> list[Any]:
        if not everyday:
            return super()._put_each(from_stage, to_stage, items, one, everyday)
        return self._path.put_each(self, from_stage, to_stage, items, one)

    def _get_each(
        self, from_stage: StageId, to_stage: StageId, items: Iterable[Any], one: Callable[[Any], Any], everyday: bool
    ) -> list[Any]:
        if not everyday:
            return super()._get_each(from_stage, to_stage, items, one, everyday)
        return self._path.get_each(self, from_stage, to_stage, items, one)

    def _submit(
        self, edge: tuple[str, str], request: str, data: Any, takers: int
    ) -> Future[tuple[bool, int, Metadata | None]]:
        with self._later.order:
            begun = self._begin(data) if devices.in_use() else None
            try:
                with self._lock:
                    if self._stopped:
                        self._refuse("put")
                    send = functools.partial(self._put_claiming, edge, request, data, takers)
                    return self._later.submit(send, begun)
            except BaseException:
                if begun is not None:
                    begun.close()
                raise

    def _begin(self, data: Any) -> Begun | None:
        """What of a put that may hold device tensors is done in the caller's thread: to note where its streams are now,
        and, when there is room at once, to start the copies from devices. None when the payload cannot be carried: the
        put will say so."""
        producer = self._producer
        claims = None if producer is None else _Claims(producer.outbox)
        try:
            plan = codec.plan(data, wire=self._wire, allow_pickle=self._pickle, loans=claims)
            begun = Begun(plan, claims)
        except BaseException as error:
            if claims is not None:
                claims.settle()
            if isinstance(error, Exception):
                return None
            raise
        shared = plan.size >= self.threshold or self._key_lookup or plan.external
        if plan.deferred and shared and producer is not None and self._later.next_is_next:
            try:
                room = producer.room(plan.frame_size, 0)
            except SegmentError:  # the put finds out for itself
                room = None
            if room is not None:
                begun.start(producer, room, self._staging)
        return begun

    def _put_claiming(
        self, edge: tuple[str, str], request: str, data: Any, takers: int, begun: Begun | None = None
    ) -> tuple[bool, int, Metadata | None]:
        """Put what may hold loans."""
        if begun is not None:
            with begun:
                return self._put(edge, request, data, takers, begun.claims, begun)
        producer = self._producer  # once: another thread may close meanwhile
        claims = None if producer is None else _Claims(producer.outbox)
        try:
            return self._put(edge, request, data, takers, claims)
        finally:
            if claims is not None:
                claims.settle()

    def _put(
        self,
        edge: tuple[str, str],
        request: str,
        data: Any,
        takers: int,
        claims: _Claims | None,
        begun: Begun | None = None,
    ) -> tuple[bool, int, Metadata | None]:
        began = _now()
        answer: tuple[bool, int, Metadata | None]
        try:
            if begun is not None:
                plan = begun.ordered()
            else:
                plan = codec.plan(data, wire=self._wire, allow_pickle=self._pickle, loans=claims)
            size: int = plan.size
            if size < self.threshold and not self._key_lookup and not plan.external:
                answer = True, size, {"inline_bytes": plan.to_bytes(), "size": size}
            else:
                answer = self._send(edge, request, data, plan, takers, claims, begun)
        except Exception as error:
            locate(error, "put", request)
            self._meter.failed("put", began, edge, request)
            raise
        self._meter.sent(began, edge, request, answer)
        return answer

    def _send(
        self,
        edge: tuple[str, str],
        request: str,
        data: Any,
        plan: codec.Plan,
        takers: int,
        claims: _Claims | None = None,
        begun: Begun | None = None,
    ) -> tuple[bool, int, Metadata | None]:
        """Put what is not to travel inline."""
        metadata = self._put_shared(edge, request, plan, takers, claims, begun)
        if metadata is not None:
            return True, plan.size, metadata
        return self._put_inline(data, plan) if self._fallback else (False, 0, None)

    def _put_inline(self, data: Any, plan: codec.Plan) -> tuple[bool, int, Metadata]:
        """Send what found no room inside its metadata."""
        if plan.external:  # loans stay where they are in this plan: another one copies them
            plan = codec.plan(data, wire=self._wire, allow_pickle=self._pickle)
        metadata = {"inline_bytes": plan.to_bytes(), "size": plan.size}
        return True, plan.size, metadata

    def _put_shared(
        self,
        edge: tuple[str, str],
        request: str,
        plan: codec.Plan,
        takers: int,
        claims: _Claims | None,
        begun: Begun | None = None,
    ) -> Metadata | None:
        try:
            producer = (begun and begun.producer) or self._producer or self._make_producer()
            try:
                room = (begun and begun.room) or producer.room(plan.frame_size, self._settings["put_timeout_s"])
            except SegmentError:
                if not producer.outbox.lost:
                    raise
                producer, room = self._room_elsewhere(producer, plan)
            if room is None and producer.closed and not self._stopped:  # another thread has just given it up
                producer, room = self._room_elsewhere(producer, plan)
        except SegmentError as error:
            self._count_refusal(edge, request, plan.size, SYSTEM, str(error))
            return None
        if room is None:
            if self._stopped:
                self._refuse("put")
            self._count_refusal(edge, request, plan.size, *self._why_no_room(producer, plan.frame_size))
            return None
        if plan.deferred or (begun is not None and begun.room is not None):
            if failed := self._staging.fill(plan, room, begun):
                try:
                    raise failed
                finally:
                    del failed, room  # whoever keeps the exception keeps this frame
        elif self._copiers is None or plan.frame_size < _THREADS_FROM:
            plan.pack_into(room.address)
        else:
            self._copiers.pack(plan, room)
        edge_id = edge_hash(*edge)
        high, low = request_hash(request)
        stamp = producer.directory.stamp() if self._key_lookup else 0
        block, sequence = producer.outbox.publish(
            room,
            edge_id,
            high,
            low,
            plan.size,
            takers,
            stamp,
            () if claims is None else claims.hand_over(),
        )
        if self._key_lookup:
            producer.directory.ring(stage_hash(edge[1]))
        self._settle(producer, edge, request, block, sequence, stamp)
        return _place.make(producer.name, plan.size, block, sequence, edge, request, segments.host_identity())

    def _settle(
        self, producer: Producer, edge: tuple[str, str], request: str, block: int, sequence: int, stamp: int
    ) -> None:
        """What follows once a payload is published and the bell rang: it replaces what was put under its key before."""
        if self._key_lookup:
            # The new one is there, and the bell has rung, before any goes: a get whose walk through the table missed
            # the new one, and found the old one gone, sees that it rang and looks again.
            producers = self._consumer.producers(producer.directory, self.namespace)
            if supersede(producers, edge_hash(*edge), request, stamp):
                producer.directory.ring(stage_hash(edge[1]))  # the other may not have rung yet
                producer.outbox.cancel(block, sequence)  # a later put of this key was published before this one
        if self._stopped and producer.outbox.cancel(block, sequence):
            producer.outbox.discard_extents()
            self._refuse("put")  # closed meanwhile: nobody could reach it

    def _room_elsewhere(self, producer: Producer, plan: codec.Plan) -> tuple[Producer, Reservation | None]:
        """Room under new names, after somebody removed those of `producer`."""
        for _ in range(_NEW_NAMES):
            self._give_up(producer)
            if plan.external:
                break  # loans of the payload lie where no new consumer can find them
            producer = self._make_producer()
            try:
                return producer, producer.room(plan.frame_size, self._settings["put_timeout_s"])
            except SegmentError:
                if not producer.outbox.lost:
                    raise
        raise SegmentError(
            f"its names are removed from {segments.MOUNT} by somebody else", errno=errno.ENOENT, op="put"
        )

    def _count_refusal(self, edge: tuple[str, str], request: str, size: int, reason: str, message: str) -> None:
        """Count and log a payload that found no room; it is a warning where the edge, or with a fallback the connector,
        has not had one for this reason for a while."""
        fields = log_fields(edge, request, size)
        if not self._fallback:
            self._refused += 1
            level, more = self._no_room.note(reason, *edge)
            logger.log(level, "put refused: request %r on %s->%s: %s%s", request, *edge, message, more, extra=fields)
            return
        self._fallbacks += 1
        logger.log(
            self._no_room.note(reason)[0],
            "put sends inline: request %r on %s->%s: %s. %d payloads so far; a warning at most once in %g s",
            request,
            *edge,
            message,
            self._fallbacks,
            _SAY_AGAIN_S,
            extra=fields,
        )

    def _why_no_room(self, producer: Producer, wanted: int) -> tuple[str, str]:
        """The reason in a word, and what to log."""
        ring = producer.outbox.ring
        if segments.names_left() == 0:
            reason = NO_INODES
            advice = f"{segments.MOUNT} has no inodes left: remove files there, or mount it with more (nr_inodes)"
        elif not producer.can_fit(wanted):
            reason, advice = TOO_LARGE, "it is larger than max_bytes, or than the whole mount: raise that"
        elif producer.max_bytes - producer.capacity >= wanted:
            reason = MOUNT_FULL
            advice = f"{segments.MOUNT} is full: enlarge it, or see omni-fastshm ls for what fills it"
        else:
            reason = FULL
            advice = (
                f"waited {self._settings['put_timeout_s']:g} s: takers are slow, or hold views for long; "
                "raise max_bytes or put_timeout_s, or send less at a time"
            )
            if producer.max_bytes - ring.used >= wanted:
                advice = f"what is free lies in pieces, the longest of {ring.longest} bytes; {advice}"
        free = max(producer.max_bytes - ring.used, 0)
        return reason, (
            f"wants {wanted} bytes, {free} free (max_bytes {producer.max_bytes}, used {ring.used}, "
            f"{segments.mount_free()} free on {segments.MOUNT}); {advice}"
        )

    def allocate(self, shape: Sequence[int] | int, dtype: Any) -> Any:
        if self._stopped:
            self._refuse("allocate")
        return make_loan(shape, dtype, self._lend)

    def _lend(self, size: int) -> Extent:
        for attempt in range(_NEW_NAMES, -1, -1):
            producer = self._producer or self._make_producer()
            try:
                extent = producer.lend(size, self._settings["put_timeout_s"])
            except SegmentError:
                if attempt == 0 or not producer.outbox.lost:
                    raise
                self._give_up(producer)  # somebody removed its names: a loan there could be got by nobody new
                continue
            if extent is not None:
                if self._staging.pin_views:
                    self._staging.pin_view(extent.address, extent.size)
                return extent
            if not producer.closed or self._stopped:  # otherwise another thread has just given it up
                break
        if self._stopped:
            self._refuse("allocate")
        self._refused += 1
        reason, message = self._why_no_room(producer, size)
        self._no_room.count(reason)
        raise SegmentError(f"no room for a loan: {message}", errno=errno.ENOSPC, op="allocate")

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
        everyday = metadata is not None and copy is None and device is None
        if everyday and (timeout is None or (type(timeout) in _TIMES and timeout >= 0)):  # with metadata nothing waits
            quick = self._path.get(self, from_stage, to_stage, request_id, metadata)
            if quick is not NotImplemented:
                found: tuple[Any, int] | None = quick
                return found
        if self._stopped:
            self._refuse("get")
        edge = known_edge(from_stage, to_stage)
        request = request_id if type(request_id) is str and request_id.isascii() else request_name(request_id)
        check_copy(copy)
        if device is not None:
            check_placement(device)
        if timeout != 0 or isinstance(timeout, bool):
            timeout = check_timeout(timeout)
        began = _now()
        try:
            if metadata is None:
                found = self._get_by_key(edge, request, timeout, copy, device)
            else:
                found = self._get_by_metadata(edge, request, metadata, copy, device)
        except Exception as error:
            locate(error, "get", request)
            self._meter.failed("get", began, edge, request)
            raise
        self._meter.got(began, edge, request, found)
        return found

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
        edge = known_edge(from_stage, to_stage)
        stage, key = stage_hash(edge[1]), (edge_hash(*edge), request_hash(request_name(request_id)))
        wait_s = 0 if metadata is not None else check_timeout(timeout)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            arrivals = self._arrivals_for(stage)
            seen = 0 if arrivals is None else arrivals.listen()  # before the look: what comes after it rings
            found = self.get(from_stage, to_stage, request_id, metadata, copy=copy, device=device)
            left = None if deadline is None else deadline - time.monotonic()
            if found is not None or arrivals is None or (left is not None and left <= 0):
                return found
            self._meter.forget_misses(edge, 1)  # all looks of one call are one miss at most
            await arrivals.wait(functools.partial(self._there, arrivals.directory, *key), seen, left)

    def _there(self, directory: Directory, edge_id: int, hashed: tuple[int, int]) -> bool:
        try:
            return self._stopped or self._consumer.find(directory, self.namespace, edge_id, hashed) is not None
        except Exception:  # the look itself will raise it where somebody is told
            return True

    def _arrivals_for(self, stage: int) -> Arrivals | None:
        """Who tells about payloads for that stage; None where the look itself will say why there is nobody."""
        if self._stopped or not self._key_lookup:
            return None
        with self._lock:  # of two loops that begin to wait at once, both are to know the same one
            directory = self._sound_directory()
            arrivals = self._arrivals.get(stage)
            if directory is not None and (arrivals is None or arrivals.directory is not directory):
                arrivals = self._arrivals[stage] = Arrivals(directory, stage)
            return arrivals

    def _get_by_metadata(
        self, edge: tuple[str, str], request: str, metadata: Metadata, copy: bool | None, device: Any
    ) -> tuple[Any, int] | None:
        if not isinstance(metadata, dict):
            raise MetadataError(f"metadata must be the dict that put returned, not {type(metadata).__name__}", op="get")
        if "inline_bytes" in metadata:
            frame = inline_frame(metadata, request)
            if device is None:
                return self._decoder.read(frame), len(frame)
            return self._staging.read(self._decoder, frame, None, None, True, device), len(frame)
        place = _place.read(metadata, edge, request, segments.host_identity())
        inbox = None if place is None else self._consumer.known.get(place[0])
        if place is None or inbox is None:
            place = check_place(metadata, edge, request)
            inbox = self._consumer.inbox(place[0])
            if inbox is None:
                return None
        return self._take(inbox, place[1], place[2], edge, request, place[3], copy, device)

    def _get_by_key(
        self, edge: tuple[str, str], request: str, timeout: float | None, copy: bool | None, device: Any
    ) -> tuple[Any, int] | None:
        directory = self._directory
        if self._stopped:
            self._refuse("get")
        if self._key_lookup and directory is not None and directory.lost():
            directory = self._sound_directory()
        if not self._key_lookup or directory is None:
            raise MetadataError(
                f"get of request {request!r} on {edge[0]}->{edge[1]} needs the metadata that put returned; "
                "getting by key alone works where both sides are built with key_lookup: true",
                op="get",
                key=request,
            )
        stage = stage_hash(edge[1])
        edge_id, hashed = edge_hash(*edge), request_hash(request)
        everyday = copy is None and device is None and self._path.views
        deadline, looks = None, 0
        while True:
            seen = directory.listen(stage)  # before the look: what arrives after it rings the bell
            looks += 1
            quick: Any = NotImplemented
            if everyday:
                producers = self._consumer.producers(directory, self.namespace)
                quick = receive_newest(producers, edge_id, request, self._decoder.read)
            found: tuple[Any, int] | None = None if quick is NotImplemented else quick
            if found is not None:
                return found
            place = self._consumer.find(directory, self.namespace, edge_id, hashed) if quick is NotImplemented else None
            if place is not None:
                inbox, block, sequence, stamp, older = place
                if older:  # the put that replaces them is not done, or died: nobody gets them after this one
                    directory.ring(stage)
                    cancel_older(self._consumer.producers(directory, self.namespace), edge_id, *hashed, stamp)
                found = self._take(inbox, block, sequence, edge, request, None, copy, device)
                if found is not None:
                    return found  # otherwise somebody was faster, or it was replaced: then the bell rang again
            if looks < _LOOKS and (directory.listen(stage) ^ seen) & ~1:
                continue  # something was put meanwhile: perhaps it replaced what was there
            if timeout == 0:
                return None
            now = time.monotonic_ns()
            if deadline is None:
                deadline = 2**63 if timeout is None else min(now + int(timeout * 1e9), 2**63)
            if now >= deadline:
                return None
            if directory.lost():  # asked before a sleep, not after it: whoever is woken has no time for it
                fresh = self._sound_directory()
                if fresh is not None and fresh is not directory:
                    directory = fresh
                    continue
            directory.wait(stage, seen, self._spin_ns, SLICE_NS, deadline)
            if self._stopped:
                self._refuse("get")

    def _take(
        self,
        inbox: Inbox,
        block: int,
        sequence: int,
        edge: tuple[str, str],
        request: str,
        size: int | None,  # as the metadata says; None when found by key
        copy: bool | None,
        device: Any,
    ) -> tuple[Any, int] | None:
        if not inbox.settled:
            with inbox.late:
                return self._hold_and_take(inbox, block, sequence, edge, request, size, copy, device)
        return self._hold_and_take(inbox, block, sequence, edge, request, size, copy, device)

    def _hold_and_take(
        self,
        inbox: Inbox,
        block: int,
        sequence: int,
        edge: tuple[str, str],
        request: str,
        size: int | None,
        copy: bool | None,
        device: Any,
    ) -> tuple[Any, int] | None:
        """Decode first, use up the take after: a payload that this process cannot rebuild can be got again."""
        try:
            lease = inbox.hold(block, sequence)
            if lease is None:
                return None
            if lease.brief:
                try:
                    _check_lease(lease, edge, request, size)
                    return self._decode_and_take(lease, True, device)
                finally:
                    lease.release()  # also after an error, whose traceback would keep it: others wait for this slot
            _check_lease(lease, edge, request, size)
            found = self._decode_and_take(lease, copy, device)
            if self._trace is not None and found is not None:
                self._trace.note(inbox, block, sequence, edge, request, lease)
            return found
        except SegmentError as error:
            if error.errno != errno.ENOENT:
                raise
            return None  # a segment of it went between the look and the hold

    def _decode_and_take(self, lease: Lease, copy: bool | None, device: Any) -> tuple[Any, int] | None:
        if self._staging.pin_views:
            self._staging.pin_view(lease.view(0, 0).address, lease.size)
        try:
            if device is None:
                data = self._decoder.read(lease, lease, copy, not lease.shared)
            else:
                data = self._staging.read(self._decoder, lease, lease, copy, not lease.shared, device, lease.brief)
        except MetadataError:
            lease.take()  # bytes that nobody can read must not wait for a taker for ever
            raise
        return (data, lease.size) if lease.take() else None

    def watch(self, from_stage: StageId, to_stage: StageId, listener: str | None = None) -> Watch:
        """For a host that polls by key: is something there, and what changes when something arrives.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            listener: as of `Watch`; None counts every put to `to_stage` as an arrival.

        Returns:
            A cheap look at this edge; of use only where the connector was built with ``key_lookup``.

        Raises:
            ConfigError: one of them is no stage's name, or both are the same stage.
        """
        heard = None if listener is None else stage_name(listener, "listener")
        return Watch(self, *known_edge(from_stage, to_stage), heard)

    def cleanup(self, request_id: StageId) -> None:
        self.cancel(request_id)

    def cancel(self, request_id: StageId) -> int:
        """What `cleanup` does.

        Args:
            request_id: exactly this id, on all edges and of all producers of the namespace.

        Returns:
            How many payloads nobody will get any more.
        """
        request = request_name(request_id)
        if self._stopped:
            return 0
        hashed, cancelled = request_hash(request), 0
        try:
            directory = self._sound_directory() or self._open_directory(make=False)
        except FastShmError as error:  # no descriptor left, or not our directory: there is nothing to reach through it
            fields = {"request_id": request}
            logger.warning("cleanup of request %r reached nobody: %s", request, str(error), extra=fields)
            return 0
        if directory is not None:
            for inbox in self._consumer.producers(directory, self.namespace):
                cancelled += inbox.cancel_request(*hashed)
        for lost in self._lost():
            cancelled += lost.outbox.cancel_request(*hashed)
        return cancelled

    def health(self) -> dict[str, Any]:
        parked.poll()
        if self._final is not None:
            return {**self._final, **self._lease_figures()}
        live = used = capacity = 0
        high = max([self._high_water, *(each.outbox.ring.peak for each in self._producers())])
        if not self._stopped:
            self._close_lost()
            for producer in self._producers():
                producer.trim_idle()
                live += producer.outbox.live_blocks
                used += producer.outbox.ring.used
                capacity += producer.capacity
        self._consumer.forget_closed()
        return {
            "status": "closed" if self._stopped else "ok",
            "connector": "SharedMemoryConnector",
            "namespace": self.namespace,
            **meter_figures(self._meter),
            "inline_writes": self._meter.inline,
            "inline_fallbacks": self._fallbacks,
            "shm_writes": self._meter.puts - self._meter.inline,
            "own_segment_writes": self._meter.large,
            "refused": self._refused,
            "no_room": self._no_room.by_reason,
            "dropped": self._dropped,
            "blocked_s": self._blocked_s + sum(producer.blocked_s for producer in self._producers()),
            "live_blocks": live,
            "used_bytes": used,
            "capacity_bytes": capacity,
            "high_water_bytes": high,
            "pinned_bytes": pinned_bytes(),
            **self._lease_figures(),
        }

    def _lease_figures(self) -> dict[str, Any]:
        return {
            "leases": self._consumer.leases,
            "oldest_lease_s": self._consumer.oldest_lease_s,
            "long_leases": [] if self._trace is None else self._trace.long_leases(),
        }

    def close(self) -> None:
        if getattr(self, "_stopped", True):
            return
        with self._lock:
            if self._stopped:
                return
            self._path.open = False
            self._stopped = True  # first: what is told of a cancelled put may put again, and must be refused
            self._later.stop()
            if self._copiers is not None:
                self._copiers.close()
        try:
            self._close()
        except Exception:
            logger.exception("closing a SharedMemoryConnector of namespace %s", self.namespace)

    def _close(self) -> None:
        for arrivals in list(self._arrivals.values()):
            arrivals.stop()
        try:
            deadline = time.monotonic() + self._settings["linger_s"]
            try:
                for producer in self._producers():
                    self._dropped += producer.close(max(deadline - time.monotonic(), 0.0))
            finally:
                for producer in self._producers():
                    if not producer.closed:  # Ctrl-C in the linger of another one ended the loop
                        self._dropped += producer.close(0)
            linger_s = self._settings["linger_s"]
            tell_dropped("SharedMemoryConnector", self.namespace, self._dropped, self._what_is_untaken(), linger_s)
        finally:
            for directory in list(self._joined):
                for stage in range(BELLS):
                    directory.ring(stage)  # waiting gets of this process look around, and find it closed
                self._leave(directory)
            self._consumer.close()
            self._final = self.health()
            self._made.clear()
            self._use_first()
            _open.discard(self)
            tell_closed(self, self._meter, self._final)

    def _what_is_untaken(self) -> list[Dropped]:
        """After the close of its producers. Request ids are not known: shared memory has only their hashes."""
        if not self._dropped:
            return []
        names = {edge_hash(start, end): f"{start}->{end}" for start, end, *_ in self._meter.edges()}
        found = [pair for producer in self._producers() for pair in producer.untaken.items()]
        return [Dropped(names.get(edge, f"{edge:016x}"), number, size) for edge, (number, size) in found]

    @property
    def _producer(self) -> Producer | None:
        producer: Producer | None = self._path.producer
        return producer

    def _use_first(self) -> None:
        """Note what is in use now, and look again: a signal handler may have changed it before it was noted."""
        while self._directory is not (directory := next(iter(self._joined), None)):
            self._directory = directory
        while self._path.producer is not (
            producer := next((each for each in self._producers() if not each.given_up), None)
        ):
            self._path.producer = producer

    def _make_producer(self) -> Producer:
        with self._lock:
            if self._stopped:
                self._refuse("put")
            try:
                producer = self._producer or self._add_producer()
            finally:
                if self._closed_meanwhile():  # by a signal handler, while it was made
                    for made in self._producers():
                        self._end(made)
                    # The close may have taken what was half-made for a dead one's, and so kept the directory for it.
                    janitor.sweep(self.namespace)
                    self._refuse("put")
            return producer

    def _add_producer(self) -> Producer:
        made = Producer(
            self.namespace,
            self._open_directory() or self._refuse("put"),
            segment_bytes=self._settings["segment_bytes"],
            max_bytes=self._settings["max_bytes"],
            keyed=self._key_lookup,
            orphan_ttl_s=self._settings["orphan_ttl_s"],
            idle_segment_s=self._settings["idle_segment_s"],
        )
        self._made.append(made)
        self._use_first()
        producer = self._producer or made
        if producer is not made:  # a signal handler was faster, and what it has sent is in that one
            self._end(made)
        return producer

    def _end(self, producer: Producer) -> None:
        """Close one that is not used any more, unless a signal handler does."""
        if _removed(self._made, producer):
            self._use_first()
            self._dropped += producer.close(0)
            self._blocked_s += producer.blocked_s
            self._high_water = max(self._high_water, producer.outbox.ring.peak)

    def _closed_meanwhile(self) -> bool:
        return self._stopped

    def _producers(self) -> list[Producer]:
        return list(self._made)

    def _lost(self) -> list[Producer]:
        """Whose names somebody else removed while payloads were in them."""
        return [each for each in self._producers() if each.given_up]

    def _give_up(self, producer: Producer) -> None:
        """Somebody removed its names. Whoever has it mapped can still take what is in it, so it stays."""
        with self._lock:
            if self._producer is producer:
                logger.warning(
                    "names of %s were removed from %s by somebody else: going on under new names; what was put and not "
                    "taken yet can be got only by processes that know it already",
                    producer.name,
                    segments.MOUNT,
                )
                producer.given_up = True
                self._use_first()
                self._sound_directory()
                self._close_lost()

    def _close_lost(self) -> None:
        for producer in [each for each in self._lost() if each.idle]:
            with self._lock:
                self._end(producer)

    def _sound_directory(self) -> Directory | None:
        """The directory in use; one whose name somebody removed is left for a new one, to find the others again."""
        with self._lock:
            directory = self._directory
            if directory is not None and directory.lost() and not self._stopped:
                fresh = open_directory(self.namespace, make=self._key_lookup)  # when that fails, the old one stays
                self._join(fresh, directory)
                producer = self._producer
                if producer is not None:
                    self._give_up(producer)  # it is entered in the old one, where nobody new looks
            return self._directory

    def _open_directory(self, *, make: bool = True) -> Directory | None:
        with self._lock:
            directory = self._directory
            if directory is None and not self._stopped:
                directory = self._join(open_directory(self.namespace, make=make))
            return directory

    def _join(self, directory: Directory | None, former: Directory | None = None) -> Directory | None:
        """Use this one from now on, unless a signal handler has joined one meanwhile, or closed."""
        if directory is not None:
            self._joined.append(directory)
        if former is not None:
            self._leave(former)
        self._use_first()
        if directory is not None and (directory is not self._directory or self._stopped):
            self._leave(directory)
        return self._directory or directory

    def _leave(self, directory: Directory) -> None:
        """Leave one, unless a signal handler does."""
        if _removed(self._joined, directory):
            self._use_first()
            leave_directory(directory)

    def _refuse(self, op: str) -> NoReturn:
        if self._forked:
            raise ForkedConnector("this connector was made before a fork: build one of its own in the child", op=op)
        raise ConnectorClosed(f"{op} on a connector that is closed", op=op)


def _removed(things: list[_T], thing: _T) -> bool:
    """Take it out in one step: of a call and a signal handler in its middle only one gets it, to end it."""
    try:
        things.remove(thing)
    except ValueError:
        return False
    return True


def _edge(from_stage: StageId, to_stage: StageId) -> tuple[tuple[str, str], int, int]:
    """An edge's names, its number, and the bell that its receiver listens to."""
    names = known_edge(from_stage, to_stage)
    return names, edge_hash(*names), stage_hash(names[1])


def _check_lease(lease: Lease, edge: tuple[str, str], request: str, size: int | None) -> None:
    if not lease.belongs(edge_hash(*edge), *request_hash(request)):
        raise MetadataError(
            "the block belongs to another edge or request than its metadata says", op="get", key=request
        )
    if size is not None and size != lease.size:
        raise MetadataError(f"metadata says {size} bytes, the block has {lease.size}", op="get", key=request)


class _Claims:
    """Which loans a payload hands over, found by address while it is planned."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._extents: list[Extent] = []

    def claim(self, address: int, nbytes: int) -> tuple[int, int] | None:
        for extent in self._extents:  # several pieces of one loan
            place: tuple[int, int] | None = extent.claim(address, nbytes)
            if place is not None:
                return place
        found = self._outbox.claim(address, nbytes)
        if found is None:
            return None
        self._extents.append(found[0])
        return found[1], found[2]

    def hand_over(self) -> tuple[Extent, ...]:
        """The loans that go with the payload, now that it is on its way."""
        extents, self._extents = tuple(self._extents), []
        return extents

    def settle(self) -> None:
        """Whatever was claimed and not handed over can be sent by the next put."""
        for extent in self._extents:
            extent.unclaim()


def _disown(connector: SharedMemoryConnector) -> None:
    connector._forked = connector._stopped = True
    connector._path.open = False
    for arrivals in connector._arrivals.values():
        arrivals.disown()
    connector._trace = None  # another thread may have held its lock
    connector._final = {**connector.health(), "status": "forked"}


_open = Open(_disown)
