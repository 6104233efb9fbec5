"""One stage at work: loading its function or class, and calling it for each request, in order."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import GeneratorType
from typing import Any

from ._edges import Failure, HandOffFailed, Message, NeighbourGone, Outlet, Receiver

__all__ = ["StagePlan", "StageWorker", "build_stage", "describe", "load_target", "unfit_reason"]

_END = object()


@dataclass(frozen=True)
class StagePlan:
    """One stage as its process gets it.

    Args:
        name: its id in the pipeline's file.
        title: how messages call it, such as ``1 (talker)``.
        target: the pickled function or class, or a text ``file.py:Name`` or ``module:Name``.
        arguments: keyword arguments for the class, or fixed ones for the function.
        sources: the stages it receives from, in the order of the file.
        targets: the stages it sends to.
    """

    name: str
    title: str
    target: bytes | str
    arguments: Mapping[str, Any]
    sources: tuple[str, ...]
    targets: tuple[str, ...]


def load_target(target: bytes | str) -> Any:
    """The function or class that a plan names.

    Args:
        target: pickled, or ``file.py:Name``, or ``module:Name``.

    Returns:
        The object.
    """
    if isinstance(target, bytes):
        return pickle.loads(target)
    place, _, name = target.rpartition(":")
    found: Any = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _load_file(path: Path) -> Any:
    """Import a file under its own name, so that its classes are known to the codec by that name."""
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path.resolve():
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    if loaded is None:
        sys.modules[name] = module
    # Files beside it can be imported by it, as when it is run as a script.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        raise
    return module


def build_stage(plan: StagePlan) -> Callable[[Any], Any]:
    """Load a stage and, for a class, make its one instance."""
    target = load_target(plan.target)
    # Checked here as well as before the start: a stage that the file names is imported in this process only.
    reason = unfit_reason(target)
    if reason:
        raise TypeError(f"it cannot be a stage: {reason}")
    if isinstance(target, type):
        made: Callable[[Any], Any] = target(**plan.arguments)
        return made
    return functools.partial(target, **plan.arguments) if plan.arguments else target


def unfit_reason(target: Any) -> str:
    """Why an object cannot be called for each payload; "" where it can."""
    if not callable(target):
        return f"{target!r} is neither a function nor a class"
    name = getattr(target, "__qualname__", None) or repr(target)
    called = target
    if isinstance(target, type):
        # Asking the class itself for __call__ would find the one that makes its instances.
        called = next((base.__dict__["__call__"] for base in target.__mro__ if "__call__" in base.__dict__), None)
        if called is None:
            return f"{name} has no __call__ method"
    elif not inspect.isroutine(target):
        called = type(target).__call__
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (target, called)):
        return f"{name} is async; a stage is called like an ordinary function"
    return ""


class StageWorker:
    """One stage at work: message in, function, messages out; order kept."""

    def __init__(self, plan: StagePlan, function: Callable[[Any], Any], inlet: Receiver, outlets: list[Outlet]) -> None:
        self.calls = 0
        self.failed = 0
        self.busy_s = 0.0
        self._plan = plan
        self._function = function
        self._inlet = inlet
        self._outlets = outlets
        self._over = -1

    def run(self) -> None:
        """Work until the stop has come. NeighbourGone: the process at the end of one edge is gone."""
        # No name is bound to the message here: it would keep the last payload's room taken while waiting.
        while self._handle(self._inlet.receive()):
            pass

    def figures(self) -> dict[str, Any]:
        """Calls, failed requests and seconds inside the function."""
        return {"calls": self.calls, "failed": self.failed, "busy_s": self.busy_s}

    def _handle(self, message: Message) -> bool:
        if message.kind == "stop":
            for outlet in self._outlets:
                outlet.stop()
            return False
        if message.seq == self._over:
            return True
        if message.failure is not None:
            self._fail(message, message.failure)
        elif message.kind == "end":
            for outlet in self._outlets:
                outlet.end(message.seq, message.request_id)
        else:
            self._call(message)
        return True

    def _call(self, message: Message) -> None:
        self.calls += 1
        try:
            result = self._timed(self._function, message.value)
            if isinstance(result, GeneratorType):
                self._stream(message, result)
            else:
                self._send(message, result, last=message.last)
        except NeighbourGone:
            raise
        except HandOffFailed as error:
            text = f"stage {self._plan.title} failed on request {message.request_id!r}: {error}"
            self._fail(message, Failure(self._plan.name, text))
        except BaseException as error:
            # Also SystemExit: one request must not end the stage for all others.
            self._fail(message, self._failure(message, error))

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.busy_s += time.perf_counter() - started

    def _stream(self, message: Message, pieces: GeneratorType[Any, Any, Any]) -> None:
        while True:
            piece = self._timed(next, pieces, _END)
            if piece is _END:
                break
            self._send(message, piece, last=False)
        if message.last:
            for outlet in self._outlets:
                outlet.end(message.seq, message.request_id)

    def _send(self, message: Message, value: Any, *, last: bool) -> None:
        for outlet in self._outlets:
            outlet.send(message.seq, message.request_id, value, last=last)

    def _fail(self, message: Message, failure: Failure) -> None:
        self.failed += 1
        self._over = message.seq
        for outlet in self._outlets:
            outlet.fail(message.seq, message.request_id, failure)

    def _failure(self, message: Message, error: BaseException) -> Failure:
        # The first two frames are this file's; what the user wants to see begins below them.
        trace = error.__traceback__
        for _ in range(2):
            trace = trace.tb_next if trace else None
        text = "".join(traceback.format_exception(type(error), error, trace))
        return Failure(
            self._plan.name,
            f"stage {self._plan.title} failed on request {message.request_id!r}: {describe(error)}\n\n"
            f"Traceback in the stage's process:\n{text}",
        )


def describe(error: BaseException) -> str:
    """Class and text of an error in one line."""
    return "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
