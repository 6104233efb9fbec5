"""The requests of a pipeline that are under way, as its own process sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ._edges import Message
from .errors import ConfigError, StageFailed

__all__ = ["Ledger", "Request"]


@dataclass
class Request:
    """One request under way.

    Args:
        seq: its place in the order of submission.
        request_id: the caller's name for it.
        future: what the caller holds.
        waiting: the sinks that have not finished it.
        results: what the sinks have delivered.
        settled: the future has its result or error, or is about to get it.
    """

    seq: int
    request_id: str
    future: Future[Any]
    waiting: set[str]
    results: dict[str, Any] = field(default_factory=dict)
    settled: bool = False


class Ledger:
    """Opens requests, at most `limit` at a time, and closes them as the sinks deliver.

    Args:
        sinks: the stages whose output is the result.
        limit: how many requests may be under way.
    """

    def __init__(self, sinks: Sequence[str], limit: int) -> None:
        self.submitted = 0
        self.completed = 0
        self.failed = 0
        self._sinks = tuple(sinks)
        self._limit = limit
        self._open: dict[int, Request] = {}
        self._ids: set[str] = set()
        self._places = 0
        self._refusal: Callable[[], Exception] | None = None
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        """How many requests are under way."""
        return len(self._open)

    def take_place(self) -> None:
        """Wait until one more request may be under way; `open` or `give_place_back` has to follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._refusal is not None or self._places < self._limit)
            if self._refusal is not None:
                raise self._refusal()
            self._places += 1

    def give_place_back(self) -> None:
        """Undo `take_place`."""
        with self._changed:
            self._places -= 1
            self._changed.notify_all()

    def open(self, request_id: str | None) -> Request:
        """Begin a request on a place that was taken.

        Raises:
            ConfigError: a request with this id is under way.
        """
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            seq = self.submitted
            name = str(seq) if request_id is None else request_id
            if name in self._ids:
                raise ConfigError(
                    f"request_id: {name!r} is under way already; give every request an id of its own",
                    key=name,
                )
            self.submitted += 1
            request = Request(seq, name, Future(), set(self._sinks))
            request.future.set_running_or_notify_cancel()
            self._open[seq] = request
            self._ids.add(name)
            return request

    def accept(self, sink: str, message: Message) -> None:
        """Take what a sink delivered; resolves the request's future when it was the last thing missing."""
        with self._changed:
            request = self._open.get(message.seq)
            if request is None or sink not in request.waiting:
                return
            over = self._enter(request, sink, message)
            if over:
                request.waiting.discard(sink)
            done = not request.waiting
            if done:
                self._close(request)
        # Outside the lock: a done-callback of the user's may ask for figures.
        self._resolve(request, message, done=done)

    def fail(self, request: Request, error: BaseException) -> None:
        """Fail a request early; its place is free when the sinks have heard of it, too."""
        if self._settle(request, failed=True):
            request.future.set_exception(error)

    def refuse(self, refusal: Callable[[], Exception]) -> None:
        """From now on every new request gets this error."""
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal
            self._changed.notify_all()

    def fail_all(self, error: Callable[[Request], Exception]) -> None:
        """Fail every request under way, after `refuse`."""
        with self._changed:
            open_requests = list(self._open.values())
            for request in open_requests:
                self._close(request)
        for request in open_requests:
            self.fail(request, error(request))

    @staticmethod
    def _enter(request: Request, sink: str, message: Message) -> bool:
        if message.kind == "data" and message.last:
            request.results[sink] = message.value
            return True
        if message.kind == "fail":
            return True
        pieces = request.results.setdefault(sink, [])
        if message.kind == "data":
            pieces.append(message.value)
        return message.kind == "end"

    def _settle(self, request: Request, *, failed: bool) -> bool:
        """Whether the future is the calling thread's to resolve: submitting and watching may both want to."""
        with self._changed:
            if request.settled:
                return False
            request.settled = True
            self.failed += failed
            self.completed += not failed
            return True

    def _close(self, request: Request) -> None:
        del self._open[request.seq]
        self._ids.discard(request.request_id)
        self._places -= 1
        self._changed.notify_all()

    def _resolve(self, request: Request, message: Message, *, done: bool) -> None:
        if message.failure is not None:
            failure = message.failure
            request.results.clear()
            self.fail(request, StageFailed(failure.text, stage=failure.stage, key=request.request_id))
        elif done and self._settle(request, failed=False):
            if len(self._sinks) == 1:
                request.future.set_result(request.results[self._sinks[0]])
            else:
                request.future.set_result({sink: request.results[sink] for sink in self._sinks})
