"""One stage process, as the pipeline's process holds it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._edges import Edge, Pipe, watch_process
from ._pipeline_plan import PipelinePlan
from ._stage_process import ProcessPlan, stage_process
from .errors import UsageError

__all__ = ["StageChild", "check_main", "start_child"]

_NO_GUARD = 'every stage imports the script, so its main part has to stand under `if __name__ == "__main__":`'
_NO_GUARD_STATUS = 83
_PROCESS_NAME = "omni-fastshm stage "


def check_main() -> None:
    """Refuse to start stages from where they cannot be started.

    Raises:
        UsageError: the main script cannot be imported by a new process, or is being imported by one right now.
        SystemExit: the same, in a process of a pipeline: it ends silently, and the pipeline's own process tells why.
    """
    me = multiprocessing.current_process()
    # The flag that multiprocessing itself goes by. Without this each stage would print a traceback of its own.
    if getattr(me, "_inheriting", False):
        if me.name.startswith(_PROCESS_NAME):
            raise SystemExit(_NO_GUARD_STATUS)
        raise UsageError(f"a process that is still starting cannot start a pipeline: {_NO_GUARD}")
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and file is not None and not Path(file).exists():
        raise UsageError(f"the stages' processes have to import the script, but {file} is not a file: save it in one")


@dataclass
class StageChild:
    """One stage process.

    Args:
        stages: those that live in it.
        title: what messages call it.
        process: of multiprocessing.
        pid: its id, also after `give_back`.
        control: a two-way pipe to it.
        handle: what `watch_process` gave.
        lock: only one thread at a time may write to `control`.
        ready: all its stages are loaded.
        finished: all its stages are through.
        gone: it has ended.
        reports: how often it has sent figures.
        figures: the last ones it sent.
    """

    stages: tuple[str, ...]
    title: str
    process: Any
    pid: int
    control: Pipe
    handle: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ready: bool = False
    finished: bool = False
    gone: bool = False
    reports: int = 0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def death(self) -> int:
        """What becomes readable when the process ends."""
        return self.process.sentinel if self.handle is None else self.handle

    def tell(self, word: str) -> None:
        """Send one word; a process that is gone is noticed by its sentinel."""
        with self.lock:
            try:
                self.control.send((word,))
            except OSError:
                pass

    @property
    def how_it_ended(self) -> str:
        """Signal or exit status in words, after the process was joined."""
        code = self.process.exitcode
        before = "" if self.ready else " before it was ready"
        if code is None or code >= 0:
            hint = "" if self.ready else '; is the script\'s main part under `if __name__ == "__main__":`?'
            if code == _NO_GUARD_STATUS and not self.ready:
                hint = f": {_NO_GUARD}"
            return f"exited with status {code}{before}{hint}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (perhaps by the kernel, for want of memory)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{before}{hint}"

    def give_back(self) -> None:
        """Close what this process holds of a stage process that was joined."""
        self.control.close()
        self.process.close()
        if self.handle is not None:
            os.close(self.handle)


def start_child(
    context: Any, plan: PipelinePlan, stages: tuple[str, ...], ends: Mapping[Edge, tuple[Pipe, Pipe]]
) -> StageChild:
    """Start the process of some stages.

    Args:
        context: multiprocessing's spawn context.
        plan: the pipeline.
        stages: those that live in it.
        ends: the pipe of every edge, its reading and its writing end.

    Returns:
        The process; it is not ready yet.
    """
    inlets = {edge: pipes[0] for edge, pipes in ends.items() if edge[1] in stages}
    outlets = {edge: pipes[1] for edge, pipes in ends.items() if edge[0] in stages}
    process_plan = ProcessPlan(
        tuple(plan.stages[name] for name in stages),
        {edge: plan.edges[edge] for edge in {*inlets, *outlets}},
    )
    titles = " and ".join(plan.stages[name].title for name in stages)
    ours, child_end = context.Pipe()
    process = context.Process(
        target=stage_process,
        args=(process_plan, inlets, outlets, child_end),
        name=f"{_PROCESS_NAME}{titles}",
    )
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        child_end.close()
    return StageChild(stages, f"stage {titles}", process, process.pid, ours, watch_process(process.pid))
