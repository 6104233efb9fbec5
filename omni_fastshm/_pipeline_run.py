"""A running pipeline: its processes, pipes and the one thread that watches over them.

The thread waits for results, for words of the stages and for their deaths, all at once and without polling.
It alone decides what becomes of the processes::

    starting → running → draining → closing → ended
         └────────┴──────────┴─── aborting ──────┘      a stage failed to start or died, or close was forced
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection as mpc
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from . import janitor
from ._edges import Failure, HandOffFailed, Inlet, NeighbourGone, Outlet, Pipe
from ._ledger import Ledger, Request
from ._pipeline_plan import RUNS, PipelinePlan
from ._stage_child import StageChild, start_child
from ._stage_process import ConnectorPool
from .errors import CodecError, StageFailed, UsageError

__all__ = ["PipelineRun"]

State = Literal["starting", "running", "draining", "closing", "aborting", "ended"]

_CLOSE_S = 10.0
_ABORT_S = 6.0


class PipelineRun:
    """The processes of one pipeline, from start to end.

    Args:
        plan: what to run.
        max_in_flight: how many requests may be under way.
        copy_results: True gives results memory of their own, False views.
    """

    def __init__(self, plan: PipelinePlan, max_in_flight: int, *, copy_results: bool) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.sinks, max_in_flight)
        self._copy_results = copy_results
        self._state: State = "starting"
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._failure: StageFailed | None = None
        self._children: list[StageChild] = []
        self._pool = ConnectorPool()
        self._outlets: dict[str, Outlet] = {}
        self._inlets: dict[Any, Inlet] = {}
        self._listening: set[Any] = set()
        self._open_sinks: set[str] = set(plan.sinks)
        self._pipes: list[Pipe] = []
        self._deadline: float | None = None
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._watch, name="pipeline", daemon=True)

    @property
    def processes(self) -> dict[str, int]:
        """The process id of each stage."""
        return {name: child.pid for child in self._children for name in child.stages}

    @property
    def ended(self) -> bool:
        """Whether all processes are gone and everything is given back."""
        return self._state == "ended"

    def start(self, timeout_s: float) -> None:
        """Start all processes at once and wait until every stage is ready.

        Raises:
            StageFailed: a stage could not be loaded, died, or was not ready in time.
        """
        janitor.sweep_alike(RUNS)  # each run has a namespace of its own, which no later start would tidy up
        try:
            self._launch()
        except BaseException:
            self._state = "aborting"
            self._deadline = time.monotonic() + _ABORT_S
            for child in self._children:
                child.tell("abort")
            self._thread.start()
            self._thread.join()
            raise
        self._thread.start()
        try:
            self._wait_until_ready(timeout_s)
        except BaseException:
            # Also Ctrl-C while the stages load.
            self._abort()
            self._thread.join()
            raise

    def _wait_until_ready(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._state != "starting" or all(child.ready for child in self._children), timeout_s
            )
            late = [child for child in self._children if not child.ready]
            if late and self._state == "starting":
                names = ", ".join(child.title for child in late)
                text = f"not ready after {timeout_s:g} s: {names}; raise start_timeout_s"
                self._fail(text, late[0].stages[0])
                self._wake()
            # All are ready, or it has failed: the watching thread is about to say which.
            self._changed.wait_for(lambda: self._state != "starting")
            if self._failure is not None:
                raise self._refusal()

    def _launch(self) -> None:
        context = multiprocessing.get_context("spawn")
        plan = self.plan
        ends = {edge: context.Pipe(duplex=False) for edge in plan.edges}
        theirs: list[Pipe] = []
        for edge, (reader, writer) in ends.items():
            if edge[0] == plan.caller:
                self._outlets[edge[1]] = Outlet(edge, self._pool.get(*plan.edges[edge]), writer)
                self._pipes.append(writer)
                theirs.append(reader)
            elif edge[1] == plan.caller:
                connector = self._pool.get(*plan.edges[edge])
                self._inlets[reader] = Inlet(edge, connector, reader, copy=self._copy_results or None)
                self._listening.add(reader)
                self._pipes.append(reader)
                theirs.append(writer)
            else:
                theirs += [reader, writer]
        try:
            for stages in plan.groups:
                self._children.append(start_child(context, plan, stages, ends))
        finally:
            # Only with our copies closed does a pipe end when the stage at its other end dies.
            for pipe in theirs:
                pipe.close()

    def submit(self, inputs: Mapping[str, Any], request_id: str | None) -> Future[Any]:
        """Send one request to the sources; blocks while `max_in_flight` are under way."""
        if threading.current_thread() is self._thread:
            raise UsageError(
                "submit was called from a future's done-callback: that thread delivers the results, so "
                "waiting for a free place there would stop the pipeline; submit from a thread of your own"
            )
        self.ledger.take_place()
        with self._send_lock:
            try:
                request = self.ledger.open(request_id)
            except BaseException:
                self.ledger.give_place_back()
                raise
            try:
                self._send(request, inputs)
            except BaseException:
                # Interrupted between two edges: the stages would wait for the rest for ever.
                self._abort()
                raise
        return request.future

    def _send(self, request: Request, inputs: Mapping[str, Any]) -> None:
        failure: Failure | None = None
        for name, outlet in self._outlets.items():
            try:
                if failure is None:
                    outlet.send(request.seq, request.request_id, inputs[name], last=True)
                    continue
            except NeighbourGone:
                # The watching thread learns of that death by itself and fails all that is under way.
                return
            except HandOffFailed as error:
                failure = self._input_failure(request, error)
            try:
                outlet.fail(request.seq, request.request_id, failure)
            except NeighbourGone:
                return

    def _input_failure(self, request: Request, error: HandOffFailed) -> Failure:
        text = f"request {request.request_id!r} could not be submitted: {error}"
        cause = error.__cause__
        failed: Exception = StageFailed(text, stage=self.plan.caller, key=request.request_id)
        if isinstance(cause, CodecError):
            failed = CodecError(f"request {request.request_id!r}: {cause}", op="put", key=request.request_id)
        self.ledger.fail(request, failed)
        return Failure(self.plan.caller, text)

    def close(self, *, drain: bool) -> None:
        """Stop: after all requests under way are answered, or at once. Idempotent.

        Args:
            drain: False abandons what is under way.
        """
        self.ledger.refuse(lambda: self._failure_or(UsageError("the pipeline is closed")))
        if drain:
            self._drain()
        else:
            self._abort()
        if threading.current_thread() is self._thread:
            # Closed, or dropped for good, in a future's done-callback: the thread ends by itself.
            return
        try:
            self._thread.join()
        except BaseException:
            # Ctrl-C while waiting for slow requests.
            self._abort()
            self._thread.join()
            raise

    def _drain(self) -> None:
        with self._changed:
            if self._state != "running":
                return
            self._state = "draining"
        with self._send_lock:
            for outlet in self._outlets.values():
                try:
                    outlet.stop()
                except NeighbourGone:
                    return

    def _abort(self) -> None:
        with self._changed:
            if self._state in ("aborting", "ended"):
                return
            self._begin_abort()
        self._wake()

    def _begin_abort(self) -> None:
        self._state = "aborting"
        self._deadline = time.monotonic() + _ABORT_S
        for child in self._children:
            child.tell("abort")
        self._changed.notify_all()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(None)
        except OSError:
            pass

    def collect(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The figures of every process, fresh ones where it still answers, else the last ones known."""
        if self._state in ("running", "draining"):
            before = {id(child): child.reports for child in self._children}
            for child in self._children:
                child.tell("stats")
            with self._changed:
                self._changed.wait_for(
                    lambda: all(c.gone or c.finished or c.reports > before[id(c)] for c in self._children),
                    timeout_s,
                )
        own = {
            "put": {outlet.edge: outlet.figures.snapshot() for outlet in self._outlets.values()},
            "get": {inlet.edge: inlet.figures.snapshot() for inlet in self._inlets.values()},
        }
        return [own, *(child.figures for child in self._children)]

    # From here on: the watching thread.

    def _watch(self) -> None:
        try:
            while not all(child.gone for child in self._children):
                self._step()
        except BaseException as error:
            self._fail(f"the pipeline stopped working: {type(error).__name__}: {error}", self.plan.caller)
            for child in self._children:
                child.process.kill()
                child.process.join()
            raise
        finally:
            self._end()

    def _step(self) -> None:
        waiting: list[Any] = [*self._listening, self._wake_reader]
        for child in self._children:
            if not child.gone:
                waiting += [child.death, child.control]
        ready = set(mpc.wait(waiting, self._time_left()))
        for pipe in [pipe for pipe in self._listening if pipe in ready]:
            self._take_result(pipe)
        if self._wake_reader in ready:
            self._wake_reader.recv()
        for child in self._children:
            if child.control in ready and not child.gone:
                self._hear(child)
        for child in self._children:
            if child.death in ready and not child.gone:
                self._bury(child)
        self._advance()

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _take_result(self, pipe: Pipe) -> None:
        inlet = self._inlets[pipe]
        sink = inlet.edge[0]
        try:
            message = inlet.receive()
        except NeighbourGone:
            self._listening.discard(pipe)
            self._open_sinks.discard(sink)
            return
        if message.kind == "stop":
            self._open_sinks.discard(sink)
        else:
            self.ledger.accept(sink, message)

    def _hear(self, child: StageChild) -> None:
        try:
            word, *rest = child.control.recv()
        except (EOFError, OSError):
            # Its sentinel follows; until then the closed pipe would be ready again and again.
            self._bury(child)
            return
        if word == "failed":
            self._fail(rest[1], rest[0])
            return
        with self._changed:
            if word == "ready":
                child.ready = True
            else:
                child.figures = rest[0]
                child.reports += 1
                child.finished = child.finished or word == "finished"
            self._changed.notify_all()

    def _bury(self, child: StageChild) -> None:
        child.process.join()
        # A last word, such as why it could not start, may have come together with its death.
        while not child.gone and child.control.poll():
            try:
                word, *rest = child.control.recv()
            except (EOFError, OSError):
                break
            if word == "failed":
                self._fail(rest[1], rest[0])
        with self._changed:
            child.gone = True
            expected = self._state in ("closing", "aborting")
            self._changed.notify_all()
        if not expected:
            self._drain_results(child)
            self._fail(f"{child.title} died: its process ({child.pid}) {child.how_it_ended}", child.stages[0])

    def _drain_results(self, child: StageChild) -> None:
        """Deliver what a dead stage had finished before it died."""
        for pipe, inlet in self._inlets.items():
            while inlet.edge[0] in child.stages and pipe in self._listening and pipe.poll():
                self._take_result(pipe)

    def _advance(self) -> None:
        with self._changed:
            if self._state == "starting" and all(child.ready for child in self._children):
                self._state = "running"
                self._changed.notify_all()
            elif self._state == "draining" and not self._open_sinks and all(child.finished for child in self._children):
                self._state = "closing"
                self._deadline = time.monotonic() + _CLOSE_S
                for child in self._children:
                    child.tell("close")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for child in self._children:
                if not child.gone:
                    child.process.kill()
            self._deadline = None

    def _fail(self, text: str, stage: str) -> None:
        """A stage is lost: everything under way fails, and the other processes have to end."""
        with self._changed:
            if self._state in ("aborting", "ended"):
                return
            self._failure = StageFailed(text, stage=stage)
            self._begin_abort()
        self.ledger.refuse(self._refusal)
        self.ledger.fail_all(partial(self._request_failure, text, stage))

    @staticmethod
    def _request_failure(text: str, stage: str, request: Request) -> StageFailed:
        head, line, more = text.partition("\n")
        return StageFailed(
            f"{head} (while request {request.request_id!r} was under way){line}{more}",
            stage=stage,
            key=request.request_id,
        )

    def _refusal(self) -> Exception:
        return self._failure_or(UsageError("the pipeline is closed"))

    def _failure_or(self, other: Exception) -> Exception:
        # A new one each time: one exception raised in several places would collect all their tracebacks.
        failure = self._failure
        return StageFailed(str(failure), stage=failure.stage) if failure is not None else other

    def _end(self) -> None:
        clean = self._state == "closing" and all(child.process.exitcode == 0 for child in self._children)
        self.ledger.refuse(self._refusal)
        self.ledger.fail_all(
            lambda request: StageFailed(
                f"request {request.request_id!r} was abandoned: the pipeline was stopped",
                stage=self.plan.caller,
                key=request.request_id,
            )
        )
        self._pool.close()
        try:
            if not clean:
                # Whatever a killed stage left in shared memory.
                janitor.sweep()
        finally:
            for child in self._children:
                child.give_back()
            for pipe in [*self._pipes, self._wake_reader, self._wake_writer]:
                pipe.close()
            with self._changed:
                self._state = "ended"
                self._changed.notify_all()
