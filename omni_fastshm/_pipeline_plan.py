"""From a pipeline's configuration and functions to a plan: everything that can be wrong is found here."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import pickle
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._edges import Edge
from ._stage_worker import StagePlan, unfit_reason
from .config import OmniTransferConfig
from .config_check import find_circle
from .errors import ConfigError
from .factory import OmniConnectorFactory
from .settings import describe, nearest, parse_settings, stage_name

__all__ = ["RUNS", "PipelinePlan", "StageEntry", "check_reference", "check_stages", "make_plan", "stage_entries"]

_DEFAULT = "SharedMemoryConnector"
RUNS = re.compile(r"run-[0-9]+-[0-9a-f]{8}\w*")
"""The namespaces that runs of pipelines make up."""


@dataclass(frozen=True)
class StageEntry:
    """What the pipeline's file says about one stage.

    Args:
        name: its id.
        label: a name for people, or "".
        function: ``file.py:Name`` or ``module:Name``; None when the file names none.
        arguments: the file's ``fn_args``.
        folder: what ``file.py`` is relative to.
        places: where the stage stands in the file (under ""), and its ``fn`` and ``fn_args``.
    """

    name: str
    label: str
    function: Any
    arguments: Any
    folder: Path
    places: Mapping[str, str] = field(default_factory=dict)

    def problem(self, text: str, key: str = "") -> str:
        """`text` with the stage's name and, where it is known, the place of one of its keys."""
        place = self.places.get(key) or self.places.get("")
        return f"{place}: stage {self.name}: {text}" if place else f"stage {self.name}: {text}"


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline that can be started.

    Args:
        stages: by name, in the order of the file.
        edges: the backend of every edge, name and settings; also of those from and to the caller.
        groups: the stages of each process.
        caller: the name under which the pipeline's own process stands in the edges.
    """

    stages: dict[str, StagePlan]
    edges: dict[Edge, tuple[str, dict[str, Any]]]
    groups: tuple[tuple[str, ...], ...]
    caller: str

    @property
    def sources(self) -> tuple[str, ...]:
        """The stages that get the submitted data."""
        return tuple(target for source, target in self.edges if source == self.caller)

    @property
    def sinks(self) -> tuple[str, ...]:
        """The stages whose outputs are the result."""
        return tuple(source for source, target in self.edges if target == self.caller)


def stage_entries(config: OmniTransferConfig) -> list[StageEntry]:
    """The stages of a configuration, in its order."""
    folder = config.path.parent if config.path else Path.cwd()
    return [
        StageEntry(stage.id, stage.label, stage.fn, stage.raw.get("fn_args"), folder, stage.places)
        for stage in config.stages.values()
    ]


def make_plan(
    entries: list[StageEntry],
    edges: Mapping[Edge, tuple[str, Mapping[str, Any]]],
    functions: Mapping[Any, Any] | None,
    caller_settings: Mapping[str, Any] | None,
) -> PipelinePlan:
    """Check a pipeline and plan its processes.

    Args:
        entries: the stages of the file, in its order.
        edges: backend and settings of every edge.
        functions: what the caller gave as ``stages=``.
        caller_settings: settings for the edges from and to the caller.

    Returns:
        The plan.

    Raises:
        ConfigError: something is wrong; the message lists every problem.
    """
    names = [entry.name for entry in entries]
    targets, problems = check_stages(entries, edges, functions)
    try:
        parse_settings("caller_settings", OmniConnectorFactory.settings_of(_DEFAULT) or {}, caller_settings)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(_listed(problems))
    caller = "caller"
    while caller in names:
        caller += "_"
    all_edges = _with_caller(names, edges, caller, caller_settings or {})
    run = f"run-{os.getpid()}-{secrets.token_hex(4)}"  # as RUNS has it
    placed = {edge: (name, _settings(name, extra, run)) for edge, (name, extra) in all_edges.items()}
    stages = {
        entry.name: StagePlan(
            entry.name,
            f"{entry.name} ({entry.label})" if entry.label else entry.name,
            targets[entry.name],
            dict(entry.arguments or {}),
            tuple(source for source, target in placed if target == entry.name),
            tuple(target for source, target in placed if source == entry.name),
        )
        for entry in entries
    }
    return PipelinePlan(stages, placed, _groups(names, edges), caller)


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the pipeline:\n" + "\n".join(f"  - {text}" for text in problems)


def check_stages(
    entries: list[StageEntry], edges: Iterable[Edge], functions: Mapping[Any, Any] | None = None
) -> tuple[dict[str, bytes | str], list[str]]:
    """Check whether stages can be run, without importing what the file names.

    Args:
        entries: the stages of the file.
        edges: all edges.
        functions: what the caller gave as ``stages=``.

    Returns:
        What to load in each stage's process, and every problem.
    """
    problems = [] if entries else ["the configuration has no stages; list them under `stages` or `stage_args`"]
    given = _given(entries, functions, problems)
    targets: dict[str, bytes | str] = {}
    for entry in entries:
        mine = entry.name in given
        try:
            targets[entry.name] = _target(given[entry.name] if mine else entry.function, entry)
        except ConfigError as error:
            problems.append(f"stage {entry.name}: {error}" if mine else entry.problem(str(error), "fn"))
        if entry.arguments is not None and not (
            isinstance(entry.arguments, Mapping) and all(isinstance(key, str) for key in entry.arguments)
        ):
            problems.append(entry.problem("fn_args must be a mapping of argument names to values", "fn_args"))
    circle = find_circle([entry.name for entry in entries], edges)
    if circle:
        problems.append(f"the edges form a circle: {' -> '.join(circle)}; a pipeline must run in one direction")
    return targets, problems


def _given(entries: list[StageEntry], functions: Any, problems: list[str]) -> dict[str, Any]:
    """The caller's functions by the stage's name."""
    if functions is None:
        return {}
    if not isinstance(functions, Mapping):
        problems.append(
            f"stages must be a mapping such as {{0: function, 1: Class}}, by stage_id, not {describe(functions)}"
        )
        return {}
    given: dict[str, Any] = {}
    names = [entry.name for entry in entries]
    for key, function in functions.items():
        try:
            name = stage_name(key, "stages")
        except ConfigError as error:
            problems.append(str(error))
            continue
        given[name] = function
        if name not in names:
            labelled = [entry.name for entry in entries if entry.label == name]
            hint = nearest(name, names)
            if labelled:
                hint = f"; that is what stage {labelled[0]} is called: write its stage_id, {{{labelled[0]!r}: …}}"
            problems.append(
                f"a function is given for stage {name!r}, which the configuration does not have{hint or '.'} "
                f"Its stages: {', '.join(names) or 'none'}"
            )
    return given


def _target(function: Any, entry: StageEntry) -> bytes | str:
    if function is None:
        raise ConfigError(
            f"it has no function: give one with stages={{{entry.name!r}: function}}, "
            "or write `fn: file.py:Name` (or `module:Name`) into the configuration"
        )
    if isinstance(function, str):
        return check_reference(function, entry.folder)
    reason = unfit_reason(function)
    if reason:
        raise ConfigError(reason)
    name = getattr(function, "__qualname__", None) or repr(function)
    if getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(f"{name} was typed in or given with -c, so the stage's process cannot import it: use a file")
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to the stage's process ({error}): it must be importable "
            "there; define it at the top level of a module, not as a lambda and not inside a function"
        ) from error


def check_reference(text: str, folder: Path) -> str:
    """Check ``file.py:Name`` or ``module:Name`` without importing anything.

    Args:
        text: the reference.
        folder: what a file is relative to.

    Returns:
        The reference, a file with its full path.

    Raises:
        ConfigError: the form is wrong, the file or module is not there, or the file does not define the name.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{text!r} is not a reference; write file.py:Name or module:Name")
    if not place.endswith(".py"):
        _check_module(place)
        return text
    path = (folder / place).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path} (for {text!r})")
    known = _defined_names(path)
    first = name.split(".")[0]
    if known is not None and first not in known:
        raise ConfigError(f"{path} does not define {first!r}{nearest(first, sorted(known))}")
    return f"{path}:{name}"


def _check_module(module: str) -> None:
    if module in sys.modules:
        return
    first, *others = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
        for index in range(len(others)):
            # Not find_spec for the whole name: that would import the packages above it.
            if spec is not None:
                name = ".".join([first, *others[: index + 1]])
                spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations or [])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(f"there is no module {module!r}; is it installed, or its folder on PYTHONPATH?")


def _defined_names(path: Path) -> set[str] | None:
    """The top-level names of a Python file; None where only running it could tell."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not valid Python: {error}") from None
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            names |= {node.target.id} if isinstance(node.target, ast.Name) else set()
        elif not isinstance(node, ast.Expr):
            # An `if` or a `try` may define anything.
            return None
    return None if "*" in names or "__getattr__" in names else names


def _with_caller(
    names: list[str],
    edges: Mapping[Edge, tuple[str, Mapping[str, Any]]],
    caller: str,
    settings: Mapping[str, Any],
) -> dict[Edge, tuple[str, Mapping[str, Any]]]:
    with_input = {target for _, target in edges}
    with_output = {source for source, _ in edges}
    found: dict[Edge, tuple[str, Mapping[str, Any]]] = {
        (caller, name): (_DEFAULT, settings) for name in names if name not in with_input
    }
    found |= edges
    found |= {(name, caller): (_DEFAULT, settings) for name in names if name not in with_output}
    return found


def _settings(name: str, extra: Mapping[str, Any], run: str) -> dict[str, Any]:
    """An edge's settings, with the run's own namespace where the file gives none.

    In a namespace of its own nobody else's payloads can be met. What a killed stage leaves can be
    cleared at once: its death ends the pipeline, so nobody will come for it.
    """
    known = OmniConnectorFactory.settings_of(name) or {}
    settings = dict(extra)
    if "namespace" in known and settings.get("namespace") is None:
        settings["namespace"] = run
    if "orphan_ttl_s" in known and settings.get("orphan_ttl_s") is None:
        settings["orphan_ttl_s"] = 0
    return settings


def _groups(names: list[str], edges: Mapping[Edge, tuple[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """The stages of each process: those joined by in-process edges live together, all others alone."""
    home = {name: name for name in names}
    for (source, target), (backend, _) in edges.items():
        if OmniConnectorFactory.same_backend(backend, "InProcessConnector"):
            old, new = home[target], home[source]
            home = {name: new if place == old else place for name, place in home.items()}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(home[name], []).append(name)
    return tuple(tuple(group) for group in groups.values())
