"""A pipeline of stages, each in a process of its own, wired from a configuration file."""

from __future__ import annotations

import multiprocessing.util
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal

from ._figures import EdgeSummary
from ._pipeline_plan import PipelinePlan, make_plan, stage_entries
from ._pipeline_run import PipelineRun
from ._stage_child import check_main
from .base import StageId
from .config import OmniTransferConfig, load_omni_transfer_config
from .errors import ConfigError, UsageError
from .settings import Setting, parse_settings, request_name, stage_name

__all__ = ["EdgeSummary", "Pipeline", "PipelineStats"]

_OPTIONS = {
    "max_in_flight": Setting("int", 8, minimum=1),
    "start_timeout_s": Setting("seconds", 120.0),
    "copy_results": Setting("bool", True),
}


@dataclass(frozen=True)
class PipelineStats:
    """What a pipeline has done so far.

    Args:
        edges: what crossed each edge; those from and to the caller are named by `caller`.
        caller: the name under which the caller stands in the edges.
        stages: per stage ``calls``, ``failed`` and ``busy_s`` (seconds inside the stage's function).
        requests: ``submitted``, ``completed``, ``failed``, ``in_flight``.
        health: what `health` says of every connector, by the title of its process.
    """

    edges: tuple[EdgeSummary, ...]
    caller: str
    stages: dict[str, dict[str, Any]]
    requests: dict[str, int]
    health: dict[str, list[dict[str, Any]]]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, for JSON."""
        edges = [{**asdict(edge), "gb_per_s": edge.gb_per_s} for edge in self.edges]
        return {**asdict(self), "edges": edges}


class Pipeline:
    """Runs the stages of a configuration, one process each, and moves payloads along its edges.

    Made by `from_config`. Starts on entering the ``with`` block or on the first request; leaving the block
    waits for what is under way and stops everything. May be used from any thread.
    """

    def __init__(self, plan: PipelinePlan, **options: Any) -> None:
        if not isinstance(plan, PipelinePlan):
            raise ConfigError("a pipeline is made by Pipeline.from_config(config, stages), not by Pipeline(config)")
        self._options = parse_settings("Pipeline", _OPTIONS, options)
        self._plan = plan
        self._run: PipelineRun | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | OmniTransferConfig,
        stages: Mapping[Any, Any] | None = None,
        *,
        max_in_flight: int = 8,
        start_timeout_s: float = 120.0,
        copy_results: bool = True,
        caller_settings: Mapping[str, Any] | None = None,
    ) -> Pipeline:
        """Check a configuration and its functions; nothing is started yet.

        A stage's function takes one payload and returns one. A class is instantiated once, in the stage's
        process, and its instance called. A generator function (or ``__call__``) sends each value that it
        yields at once. A stage with one predecessor gets the payload itself, one with several gets a dict by
        from-stage (text). Functions and classes have to be importable in another process: no lambdas, nothing
        defined in a function.

        Args:
            config: a YAML or JSON file, the same as a dict, or a loaded configuration.
            stages: function or class of each stage, or its reference as ``file.py:Name`` or ``module:Name``.
                For a stage that is missing here the configuration's ``fn`` is used.
            max_in_flight: how many requests may be under way; `submit` blocks beyond.
            start_timeout_s: how long the stages may take to load, in seconds.
            copy_results: True gives results memory of their own. False gives views: no copy, but each result
                that is kept holds room in the last stage's shared memory.
            caller_settings: settings of the `SharedMemoryConnector` on the edges from and to the caller.

        Returns:
            A pipeline that has not been started.

        Raises:
            ConfigError: something is wrong; the message lists every problem.
        """
        if isinstance(config, OmniTransferConfig):
            loaded = config
        elif isinstance(config, Mapping):
            loaded = load_omni_transfer_config(config_dict=config)
        else:
            loaded = load_omni_transfer_config(config)
        edges = {edge: (spec.name, spec.extra) for edge, spec in loaded.connectors.items()}
        plan = make_plan(stage_entries(loaded), edges, stages, caller_settings)
        return cls(plan, max_in_flight=max_in_flight, start_timeout_s=start_timeout_s, copy_results=copy_results)

    @property
    def sources(self) -> tuple[str, ...]:
        """The stages that get the submitted data."""
        return self._plan.sources

    @property
    def sinks(self) -> tuple[str, ...]:
        """The stages whose output is the result."""
        return self._plan.sinks

    @property
    def processes(self) -> dict[str, int]:
        """The process id of each stage; empty before the start. Stages joined in-process share one."""
        return {} if self._run is None else self._run.processes

    def start(self) -> Pipeline:
        """Start all processes and wait until every stage is ready; does nothing when it was started before.

        Returns:
            The pipeline.

        Raises:
            StageFailed: a stage could not be loaded, or was not ready in time; nothing is left running.
            UsageError: the pipeline is closed, or the script's main part cannot be imported by the stages.
        """
        if os.getpid() != self._pid:
            raise UsageError("the pipeline was made before a fork: its stages answer to the other process")
        with self._lock:
            if self._closed:
                raise UsageError("the pipeline is closed; build a new one with Pipeline.from_config")
            if self._run is None:
                check_main()
                run = PipelineRun(
                    self._plan, self._options["max_in_flight"], copy_results=self._options["copy_results"]
                )
                # Before multiprocessing waits at exit for its children, and when nobody holds the pipeline
                # any more.
                multiprocessing.util.Finalize(self, run.close, kwargs={"drain": False}, exitpriority=100)
                self._run = run
                run.start(self._options["start_timeout_s"])
            return self

    def submit(
        self,
        data: Any = None,
        *,
        inputs: Mapping[Any, Any] | None = None,
        request_id: StageId | None = None,
    ) -> Future[Any]:
        """Send one request into the pipeline.

        Blocks while `max_in_flight` requests are under way. `data` may be overwritten after the return.

        Args:
            data: the payload for the first stage; with several first stages each of them gets it.
            inputs: instead of `data`: a payload for each first stage.
            request_id: names the request in errors and logs; no two under way may have the same. None numbers
                it.

        Returns:
            The result to come: what the last stage returned; a dict by stage where several stages are last; a
            list where a stage yields. The future fails with `StageFailed` (a stage raised, died, or could not
            hand its output on; the message has the stage's traceback) or `CodecError` (`data` cannot be
            carried). A failed request does not disturb the others. It cannot be cancelled.

        Raises:
            StageFailed: a stage has died; the pipeline is stopped.
            ConfigError: the id is taken or out of range, or `inputs` does not fit.
            UsageError: the pipeline is closed.
        """
        payloads = self._payloads(data, inputs)
        name = None if request_id is None else request_name(request_id)
        return self.start()._running().submit(payloads, name)

    def run(self, items: Iterable[Any], *, on_error: Literal["raise", "return"] = "raise") -> Iterator[Any]:
        """Send many requests and yield their results in the same order.

        `items` is read ahead of the results by at most `max_in_flight`.

        Args:
            items: the payloads, as for `submit`.
            on_error: "raise" raises at the place of a failed request; "return" yields the exception there and
                goes on.

        Yields:
            One result for each item.

        Raises:
            StageFailed: a request failed.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error: {on_error!r} is neither 'raise' nor 'return'")
        return self._results(items, returned=on_error == "return")

    def _results(self, items: Iterable[Any], *, returned: bool) -> Iterator[Any]:
        under_way: deque[Future[Any]] = deque()
        for item in items:
            while under_way and (under_way[0].done() or len(under_way) >= self._options["max_in_flight"]):
                yield _outcome(under_way.popleft(), returned=returned)
            under_way.append(self.submit(item))
        while under_way:
            yield _outcome(under_way.popleft(), returned=returned)

    def stats(self) -> PipelineStats:
        """Figures so far; also after `close`. A stage that is busy answers all the same."""
        plan, run = self._plan, self._run
        reports = [] if run is None else run.collect()
        put = {edge: side for report in reports for edge, side in report.get("put", {}).items()}
        get = {edge: side for report in reports for edge, side in report.get("get", {}).items()}
        ledger = None if run is None else run.ledger
        names = ("submitted", "completed", "failed", "in_flight")
        return PipelineStats(
            edges=tuple(
                EdgeSummary.of(edge, name, put.get(edge), get.get(edge)) for edge, (name, _) in plan.edges.items()
            ),
            caller=plan.caller,
            stages={name: figures for report in reports for name, figures in report.get("stages", {}).items()},
            requests={name: 0 if ledger is None else getattr(ledger, name) for name in names},
            health={" ".join(report["stages"]): report["health"] for report in reports if report.get("stages")},
        )

    def close(self, *, drain: bool = True) -> None:
        """Stop all processes and give everything back; idempotent.

        Args:
            drain: True waits until all requests under way are answered; False fails them and stops at once.
        """
        if os.getpid() != self._pid:
            # In a fork, leaving the `with` block must not stop the other process's stages.
            return
        with self._lock:
            self._closed = True
        if self._run is not None:
            self._run.close(drain=drain)

    def __enter__(self) -> Pipeline:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _running(self) -> PipelineRun:
        assert self._run is not None
        return self._run

    def _payloads(self, data: Any, inputs: Mapping[Any, Any] | None) -> dict[str, Any]:
        if inputs is None:
            return dict.fromkeys(self._plan.sources, data)
        if data is not None:
            raise ConfigError("give either data or inputs, not both")
        given = {stage_name(key, "inputs"): value for key, value in inputs.items()}
        if set(given) != set(self._plan.sources):
            raise ConfigError(
                f"inputs has the stages {sorted(given)}, but the first stages are {sorted(self._plan.sources)}"
            )
        return given


def _outcome(future: Future[Any], *, returned: bool) -> Any:
    if returned:
        error = future.exception()
        return future.result() if error is None else error
    return future.result()
