"""Both ends of an edge inside a pipeline: payloads by the connector, notifications by a pipe, in order.

Every edge carries, for every request in the order of submission, one of: one payload; several payloads (a
stream) and an end mark; a failure. So a stage with several predecessors needs no table of open requests,
order holds along every path, and a failed request leaves no half-filled join behind.
"""

from __future__ import annotations

import multiprocessing.connection as mpc
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from . import codec
from ._figures import EdgeFigures, way_of
from .adapter import recv_via_connector, try_send_via_connector
from .base import OmniConnectorBase, StageId
from .errors import CodecError, FastShmError

__all__ = [
    "Edge",
    "Failure",
    "HandOffFailed",
    "Inlet",
    "JoinInlet",
    "Message",
    "NeighbourGone",
    "Outlet",
    "Pipe",
    "Receiver",
    "watch_process",
]

Edge = tuple[str, str]
Pipe = mpc.Connection


@dataclass(frozen=True)
class Failure:
    """Why a request failed: the stage, and a text whose first line says it in short."""

    stage: str
    text: str


@dataclass
class Message:
    """One thing that happened to one request on one edge.

    Args:
        kind: "data", "end" (of a stream), "fail", or "stop" (nothing comes any more).
        seq: the request's place in the order of submission, from 0.
        request_id: the caller's name for it.
        last: for "data": this is the request's only payload on this edge.
        value: for "data": the payload.
        failure: for "fail".
    """

    kind: Literal["data", "end", "fail", "stop"]
    seq: int = -1
    request_id: str = ""
    last: bool = False
    value: Any = None
    failure: Failure | None = None


class HandOffFailed(FastShmError):
    """A payload could not be given to the next stage; the request fails, the pipeline goes on."""


class NeighbourGone(FastShmError):
    """The process at the other end of an edge is gone; the pipeline's process will end this one, too."""


class Outlet:
    """The sending end of one edge; used by one thread at a time."""

    def __init__(self, edge: Edge, connector: OmniConnectorBase, pipe: Pipe) -> None:
        self.edge = edge
        self.figures = EdgeFigures()
        self._connector = connector
        self._pipe = pipe
        self._seq = -1
        self._piece = 0
        self._way = "other"

    def send(self, seq: int, request_id: str, value: Any, *, last: bool) -> None:
        """Put one payload and notify the next stage.

        Args:
            seq: the request's place in the order.
            request_id: the caller's name for it.
            value: the payload.
            last: it is the request's only payload; otherwise `end` closes the stream.

        Raises:
            HandOffFailed: no room, or a payload that cannot be carried.
            NeighbourGone: the next stage's process is gone.
        """
        if seq != self._seq:
            self._seq, self._piece = seq, 0
        # The place in the order and the edge make the key unique in this run, whatever ids the caller uses
        # twice.
        key = f"{request_id}@{seq}.{self._piece}:{self.edge[0]}>{self.edge[1]}"
        self._piece += 1

        def notify(notification: dict[str, Any]) -> None:
            self._way = way_of(notification["connector_metadata"])
            self._tell("data", seq, request_id, last, notification)

        to = f"its payload for stage {self.edge[1]}"
        try:
            sent = try_send_via_connector(self._connector, *self.edge, key, value, None, None, notify, self)
        except NeighbourGone:
            raise
        except Exception as error:
            # Anything: an encoder that the user registered runs in there, too.
            text = _with_id(error, key, request_id)
            raise HandOffFailed(f"{to} cannot be sent: {type(error).__name__}: {text}") from error
        if not sent:
            raise HandOffFailed(f"{to} was refused: {self._why_refused(value)}")

    def _why_refused(self, value: Any) -> str:
        config = getattr(self._connector, "config", None)
        settings = config if isinstance(config, Mapping) else {}
        size, limit = _size_of(value, settings), settings.get("max_bytes")
        # The setting may be text such as "1e9".
        if size is not None and limit is not None and size > float(limit):
            return f"its {size} bytes are more than max_bytes ({limit}) allows at all; raise max_bytes"
        room = "it" if size is None else f"its {size} bytes"
        return (
            f"there was no room for {room} within the connector's waiting time (put_timeout_s); "
            "raise max_bytes, lower max_in_flight, or drop received views earlier"
        )

    def on_forward(
        self, _from: StageId, _to: StageId, _id: StageId, size_bytes: int, tx_ms: float, _used: bool
    ) -> None:
        """Called by the adapter for each payload sent."""
        self.figures.add(size_bytes, tx_ms * 1e3, self._way)

    def end(self, seq: int, request_id: str) -> None:
        """Close a stream."""
        self._tell("end", seq, request_id)

    def fail(self, seq: int, request_id: str, failure: Failure) -> None:
        """Say that nothing (more) comes for this request."""
        self._tell("fail", seq, request_id, failure.stage, failure.text)

    def stop(self) -> None:
        """Say that no request comes any more."""
        self._tell("stop")

    def _tell(self, *words: Any) -> None:
        try:
            self._pipe.send(words)
        except OSError as error:
            raise NeighbourGone(f"stage {self.edge[1]} does not listen any more: {error}") from error


def _with_id(error: Exception, key: str, request_id: str) -> str:
    """The error's text with the caller's name for the request instead of the payload's own key."""
    return str(error).replace(repr(key), repr(request_id))


def _size_of(value: Any, settings: Mapping[str, Any]) -> int | None:
    """Bytes that a payload takes in shared memory; None where that cannot be told."""
    try:
        return codec.plan(value, allow_pickle=bool(settings.get("allow_pickle"))).frame_size
    except CodecError:
        return None


def watch_process(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None where the kernel has none (before 5.3).

    Unlike the end of a pipe it is seen although a fork of that process still holds the pipe open. The caller
    closes it.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


class Receiver(Protocol):
    """What a stage reads its messages from."""

    def receive(self) -> Message:
        """The next message; blocks. Raises NeighbourGone when a predecessor's process is gone."""


class Inlet:
    """The receiving end of one edge; used by one thread.

    Args:
        edge: from and to.
        connector: the edge's connector.
        pipe: where the notifications come from.
        copy: as in `OmniConnectorBase.get`.
    """

    def __init__(self, edge: Edge, connector: OmniConnectorBase, pipe: Pipe, *, copy: bool | None = None) -> None:
        self.edge = edge
        self.pipe = pipe
        self.figures = EdgeFigures()
        self._connector = connector
        self._copy = copy

    def receive(self) -> Message:
        """The next message; blocks. A payload that cannot be fetched becomes a "fail"."""
        try:
            kind, *rest = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise NeighbourGone(f"nothing comes from stage {self.edge[0]} any more") from error
        if kind == "stop":
            return Message("stop")
        seq, request_id, *rest = rest
        if kind == "end":
            return Message("end", seq, request_id)
        if kind == "fail":
            return Message("fail", seq, request_id, failure=Failure(*rest))
        last, notification = rest
        try:
            value = self._fetch(notification)
        except Exception as error:
            # An undecodable payload is not used up: without this its room would stay taken until the end.
            key = notification["request_id"]
            self._connector.cleanup(key)
            text = (
                f"stage {self.edge[1]} could not get the input of request {request_id!r} from stage "
                f"{self.edge[0]}: {type(error).__name__}: {_with_id(error, key, request_id)}"
            )
            return Message("fail", seq, request_id, failure=Failure(self.edge[1], text))
        return Message("data", seq, request_id, last, value)

    def _fetch(self, notification: Mapping[str, Any]) -> Any:
        value, figures = recv_via_connector(notification, {self.edge: self._connector}, self.edge[1], copy=self._copy)
        if figures is not None:
            self.figures.add(figures["rx_transfer_bytes"], figures["rx_decode_time_ms"] * 1e3)
        return value


@dataclass
class _Part:
    """What one predecessor has delivered of one request."""

    values: list[Any] = field(default_factory=list)
    streamed: bool = False
    over: bool = False


class JoinInlet:
    """Several edges as one: a message holds the inputs of all predecessors, as a dict by from-stage.

    The inputs of a predecessor that streams are collected into a list. Whatever edge has something is read at
    once: waiting for one edge while another one's pipe fills up would stop a common predecessor of both.
    """

    def __init__(self, inlets: Sequence[Inlet]) -> None:
        self._by_pipe = {inlet.pipe: inlet for inlet in inlets}
        self._sources = [inlet.edge[0] for inlet in inlets]
        self._open: dict[int, dict[str, _Part]] = {}
        self._failed: dict[int, Failure] = {}
        self._next = 0
        self._ready: deque[Message] = deque()

    def receive(self) -> Message:
        """The next complete request, a failed one, or the stop; blocks."""
        while not self._ready:
            if not self._by_pipe:
                return Message("stop")
            for pipe in mpc.wait(list(self._by_pipe)):
                self._accept(self._by_pipe[pipe])  # type: ignore[index]
        return self._ready.popleft()

    def _accept(self, inlet: Inlet) -> None:
        message = inlet.receive()
        if message.kind == "stop":
            del self._by_pipe[inlet.pipe]
            return
        seq = message.seq
        if seq < self._next:
            return
        parts = self._open.setdefault(seq, {source: _Part() for source in self._sources})
        part = parts[inlet.edge[0]]
        if message.kind == "data":
            part.values.append(message.value)
            part.streamed = part.streamed or not message.last
            part.over = message.last
        elif message.kind == "end":
            part.streamed = part.over = True
        elif message.failure is not None:
            self._failed.setdefault(seq, message.failure)
            part.over = True
        if seq in self._failed:
            for each in parts.values():
                # Views kept for a request that cannot be completed would only hold their producers' room.
                each.values.clear()
        if all(each.over for each in parts.values()):
            self._finish(seq, message.request_id)

    def _finish(self, seq: int, request_id: str) -> None:
        parts = self._open.pop(seq)
        self._next = seq + 1
        failure = self._failed.pop(seq, None)
        if failure is not None:
            self._ready.append(Message("fail", seq, request_id, failure=failure))
            return
        value = {name: part.values if part.streamed else part.values[0] for name, part in parts.items()}
        self._ready.append(Message("data", seq, request_id, True, value))
