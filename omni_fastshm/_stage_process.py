"""What runs inside a stage's process: load the stages, open the connectors, work, close, leave nothing.

A process holds one stage, or several that are joined by in-process edges; each stage has a thread of its own,
one of them the main thread. Another thread listens to the pipeline's process: it answers questions, and when
that process is gone it closes the connectors and ends this one, whatever the stages are doing.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection as mpc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import janitor
from ._edges import Edge, Inlet, JoinInlet, NeighbourGone, Outlet, Pipe, Receiver, watch_process
from ._stage_worker import StagePlan, StageWorker, build_stage, describe
from .base import OmniConnectorBase
from .factory import ConnectorSpec, OmniConnectorFactory

__all__ = ["ConnectorPool", "ProcessPlan", "stage_process"]

_TEARDOWN_S = 5.0


@dataclass(frozen=True)
class ProcessPlan:
    """All that one stage process needs, apart from its pipes.

    Args:
        stages: the stages that live in it.
        connectors: the backend of every edge that begins or ends in it: name and settings.
    """

    stages: tuple[StagePlan, ...]
    connectors: Mapping[Edge, tuple[str, dict[str, Any]]]


@dataclass
class ConnectorPool:
    """The connectors of one process: edges with equal backend and settings share one, and so one ring."""

    _made: dict[str, OmniConnectorBase] = field(default_factory=dict)

    def get(self, name: str, extra: Mapping[str, Any]) -> OmniConnectorBase:
        """The connector for a backend with these settings, made on first use."""
        key = f"{name} {sorted((str(k), repr(v)) for k, v in extra.items())}"
        if key not in self._made:
            self._made[key] = OmniConnectorFactory.create_connector(ConnectorSpec(name, dict(extra)))
        return self._made[key]

    def health(self) -> list[dict[str, Any]]:
        """The health of each connector."""
        return [made.health() for made in list(self._made.values())]

    def close(self) -> None:
        """Close them all."""
        for made in list(self._made.values()):
            made.close()


class _Process:
    """Everything of one stage process, so that each thread can reach what it needs."""

    def __init__(
        self, plan: ProcessPlan, inlets: Mapping[Edge, Pipe], outlets: Mapping[Edge, Pipe], control: Pipe
    ) -> None:
        self._plan = plan
        self._inlet_pipes = inlets
        self._outlet_pipes = outlets
        self._control = control
        self._control_lock = threading.Lock()
        self._pool = ConnectorPool()
        self._closing = threading.Event()
        self._workers: dict[str, StageWorker] = {}
        self._functions: list[Any] = []
        self._inlets: list[Inlet] = []
        self._outlets: list[Outlet] = []

    def run(self) -> None:
        threading.Thread(target=self._listen, name="pipeline-control", daemon=True).start()
        if not self._start():
            return
        self._tell("ready", os.getpid())
        *others, main = self._workers.items()
        threads = [
            threading.Thread(target=self._work, args=pair, name=f"stage-{pair[0]}", daemon=True) for pair in others
        ]
        for thread in threads:
            thread.start()
        self._work(*main)
        for thread in threads:
            thread.join()
        self._tell("finished", self.figures())
        self._closing.wait()
        self._close_functions()
        self._pool.close()

    def _start(self) -> bool:
        """Load the stages and open the edges; False after an error that the pipeline was told about."""
        stage = self._plan.stages[0]
        try:
            for stage in self._plan.stages:
                self._functions.append(build_stage(stage))
            for stage, function in zip(self._plan.stages, self._functions, strict=True):
                self._workers[stage.name] = self._worker(stage, function)
        except BaseException as error:
            self._tell("failed", stage.name, _report(f"stage {stage.title} did not start", error))
            self._pool.close()
            return False
        return True

    def _worker(self, stage: StagePlan, function: Callable[[Any], Any]) -> StageWorker:
        inlets = [
            Inlet(
                (source, stage.name),
                self._connector((source, stage.name)),
                self._inlet_pipes[source, stage.name],
            )
            for source in stage.sources
        ]
        outlets = [
            Outlet(
                (stage.name, target),
                self._connector((stage.name, target)),
                self._outlet_pipes[stage.name, target],
            )
            for target in stage.targets
        ]
        self._inlets += inlets
        self._outlets += outlets
        inlet: Receiver = inlets[0] if len(inlets) == 1 else JoinInlet(inlets)
        return StageWorker(stage, function, inlet, outlets)

    def _connector(self, edge: Edge) -> OmniConnectorBase:
        return self._pool.get(*self._plan.connectors[edge])

    def _work(self, name: str, worker: StageWorker) -> None:
        try:
            worker.run()
        except NeighbourGone:
            # The pipeline's process has seen that death, too, and ends this process as soon as it may.
            threading.Event().wait()
        except BaseException as error:
            self._tell("failed", name, _report(f"stage {name} stopped working", error))
            threading.Event().wait()

    def figures(self) -> dict[str, Any]:
        """What the pipeline collects for `stats`."""
        return {
            "stages": {name: worker.figures() for name, worker in self._workers.items()},
            "put": {outlet.edge: outlet.figures.snapshot() for outlet in self._outlets},
            "get": {inlet.edge: inlet.figures.snapshot() for inlet in self._inlets},
            "health": self._pool.health(),
        }

    def _tell(self, *words: Any) -> None:
        with self._control_lock:
            try:
                self._control.send(words)
            except OSError:
                # The pipeline's process is gone: the listening thread sees it as well and ends this process.
                pass

    def _listen(self) -> None:
        parent = multiprocessing.parent_process()
        watched: list[Any] = [self._control]
        handle = None if parent is None or parent.pid is None else watch_process(parent.pid)
        if handle is not None:
            watched.append(handle)
        while True:
            try:
                if self._control not in mpc.wait(watched):
                    raise EOFError
                (word,) = self._control.recv()
            except (EOFError, OSError):
                self._end(orphaned=True)
            if word == "stats":
                self._tell("stats", self.figures())
            elif word == "close":
                self._closing.set()
            elif word == "abort":
                self._end(orphaned=False)

    def _end(self, *, orphaned: bool) -> None:
        """Leave at once, with the stages wherever they are, but without leaving shared memory behind."""
        limit = threading.Timer(_TEARDOWN_S, os._exit, args=(1,))
        limit.daemon = True
        limit.start()
        try:
            self._pool.close()
            if orphaned:
                # Whoever killed the pipeline's process left its segments to us.
                janitor.sweep()
        finally:
            os._exit(1 if orphaned else 0)

    def _close_functions(self) -> None:
        for function in self._functions:
            close = getattr(function, "close", None)
            if callable(close):
                try:
                    close()
                except Exception:
                    # All requests are answered by now; there is no one left to raise it to.
                    traceback.print_exc()


def _report(what: str, error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    return f"{what}: {describe(error)}\n\nTraceback in the stage's process:\n{trace}"


def stage_process(plan: ProcessPlan, inlets: Mapping[Edge, Pipe], outlets: Mapping[Edge, Pipe], control: Pipe) -> None:
    """Main function of a stage process.

    Args:
        plan: what lives in it.
        inlets: the notification pipes of the edges that end here.
        outlets: those of the edges that begin here.
        control: a two-way pipe to the pipeline's process.
    """
    # Ctrl-C reaches every process of a terminal; the pipeline's process decides and tells the stages.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Process(plan, inlets, outlets, control).run()
