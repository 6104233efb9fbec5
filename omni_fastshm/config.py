"""A pipeline's file: which stages there are, which edges join them, and which connector serves each edge."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config_check import Checker, Found, label_of
from .config_file import Problem, read_file, read_mapping
from .errors import ConfigError
from .factory import ConnectorSpec
from .settings import Setting, check_edge, nearest, parse_settings, stage_name

__all__ = [
    "DEFAULT_CONNECTOR",
    "DEFAULT_SHM_THRESHOLD",
    "ConnectorSpec",
    "OmniTransferConfig",
    "StageSpec",
    "get_connectors_config_for_stage",
    "get_stage_connector_config",
    "inspect_transfer_config",
    "load_omni_transfer_config",
]

DEFAULT_CONNECTOR = "SharedMemoryConnector"
DEFAULT_SHM_THRESHOLD = 65536

Edge = tuple[str, str]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline.

    Args:
        id: its id, as text.
        fn: what runs it under ``omni-fastshm run``: ``/absolute/path/file.py:Name`` or ``module:Name``; None
            where the file says nothing.
        sources: the stages it receives from, in the order of the file.
        targets: the stages it sends to.
        raw: the whole section of the file in plain dicts and lists, with everything that is meant for a host.
        places: where the stage stands (under ""), and its ``fn`` and ``fn_args`` where it has them.
    """

    id: str
    fn: str | None = None
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def label(self) -> str:
        """What people call the stage: its own ``name``, or the host's name for its model; "" for neither."""
        return label_of(self.raw)


class _Stages(dict[str, StageSpec]):
    """Stages by their id; an int finds the stage of that number."""

    def __missing__(self, key: Any) -> StageSpec:
        if isinstance(key, int) and not isinstance(key, bool) and str(key) in self:
            return self[str(key)]
        raise KeyError(key)


@dataclass(frozen=True)
class OmniTransferConfig:
    """What a pipeline's file says about its edges. False where it configures nothing.

    Args:
        connectors: the connector of each edge, by ``(from, to)``; stages are text.
        stages: the stages in the order of the file, by their id (text or int).
        default_connector: what an edge gets for which the file names no connector.
        origins: for each edge, where its connector is named.
        warnings: what looks wrong but does not stop anything; also logged.
        path: the file, if it came from one.
    """

    connectors: dict[Edge, ConnectorSpec] = field(default_factory=dict)
    stages: dict[str, StageSpec] = field(default_factory=_Stages)
    default_connector: ConnectorSpec = field(default_factory=lambda: _default(DEFAULT_SHM_THRESHOLD))
    origins: dict[Edge, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the order of the file."""
        return tuple(self.connectors)

    def __bool__(self) -> bool:
        return bool(self.stages or self.connectors)

    def get_connector_for_edge(self, from_stage: str | int, to_stage: str | int) -> ConnectorSpec:
        """The connector of an edge; the default one where the file does not name the edge.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.

        Returns:
            Its name and settings.

        Raises:
            ConfigError: one of the stages does not exist, or both are the same.
        """
        edge = check_edge(from_stage, to_stage)
        for stage in edge:
            self.check_stage(stage)
        return self.connectors.get(edge, self.default_connector)

    def has_connector_for_edge(self, from_stage: str | int, to_stage: str | int) -> bool:
        """Whether the file names this edge."""
        return check_edge(from_stage, to_stage) in self.connectors

    def check_stage(self, stage: str | int) -> str:
        """The stage's id as text.

        Args:
            stage: its id.

        Returns:
            The same as str.

        Raises:
            ConfigError: the file has stages, and this is none of them.
        """
        name = stage_name(stage)
        if self.stages and name not in self.stages:
            known = ", ".join(self.stages)
            raise ConfigError(f"there is no stage {name!r}{nearest(name, list(self.stages)) or '.'} Stages: {known}")
        return name

    def find_stage(self, name: str | int) -> str:
        """The id of a stage that people name.

        Args:
            name: its id, or what `StageSpec.label` says, where no other stage has that.

        Returns:
            The id as text.

        Raises:
            ConfigError: it is none of the file's stages, or the name of several.
        """
        text = stage_name(name)
        if text in self.stages:
            return text
        named = [stage.id for stage in self.stages.values() if stage.label == text]
        if len(named) > 1:
            raise ConfigError(f"{text!r} is the name of the stages {', '.join(named)}: use one of these")
        return named[0] if named else self.check_stage(text)


def load_omni_transfer_config(
    path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    config_dict: Mapping[str, Any] | None = None,
    default_shm_threshold: int = DEFAULT_SHM_THRESHOLD,
) -> OmniTransferConfig:
    """Read a pipeline's configuration and check all of it.

    Both generations of the schema are understood: `stage_args` with `runtime.connectors` and `runtime.edges`,
    and `stages` with `connectors`, `edges` and `base_config` at the top level.

    Args:
        path: a YAML or JSON file, or the configuration itself as a dict.
        config_dict: the configuration as a dict, instead of `path`.
        default_shm_threshold: bytes from which on payloads go to shared memory, for edges without a connector
            of their own.

    Returns:
        The configuration; an empty one where nothing is given or the file is empty.

    Raises:
        ConfigError: something is wrong; the message lists every problem with its place.
    """
    if path is not None and config_dict is not None:
        raise ConfigError("give either a path or config_dict, not both")
    source = path if config_dict is None else config_dict
    config, problems = inspect_transfer_config(source, default_shm_threshold=default_shm_threshold)
    for warning in config.warnings:
        _log.warning("%s", warning)
    if not problems:
        return config
    if len(problems) == 1:
        raise ConfigError(problems[0])
    title = config.path or "the configuration"
    raise ConfigError(f"{title}: {len(problems)} problems:\n" + "\n".join(f"  - {text}" for text in problems))


def inspect_transfer_config(
    source: Any, *, default_shm_threshold: int = DEFAULT_SHM_THRESHOLD
) -> tuple[OmniTransferConfig, list[str]]:
    """Like `load_omni_transfer_config`, but the problems are returned instead of raised.

    Args:
        source: a path, a dict, or None.
        default_shm_threshold: as there.

    Returns:
        What could be understood, and every problem with its place.
    """
    parsed = parse_settings(
        "load_omni_transfer_config",
        {"default_shm_threshold": Setting("bytes", DEFAULT_SHM_THRESHOLD)},
        {"default_shm_threshold": default_shm_threshold},
    )
    path: Path | None = None
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        content, problems = read_file(path)
    else:
        content, problems = read_mapping(source)
    default = _default(parsed["default_shm_threshold"])
    try:
        found = Checker(default, problems, path).check(content)
    except RecursionError:
        found = Found()
        problems.append(Problem("is nested too deeply", str(path or "")))
    return _result(found, default, path), [_line(problem) for problem in problems]


def _default(threshold: int) -> ConnectorSpec:
    return ConnectorSpec(DEFAULT_CONNECTOR, {"shm_threshold_bytes": threshold})


def _line(problem: Problem) -> str:
    return f"{problem.place}: {problem.text}" if problem.place else problem.text


def _result(found: Found, default: ConnectorSpec, path: Path | None) -> OmniTransferConfig:
    stages = _Stages()
    sources: dict[str, list[str]] = {}
    targets: dict[str, list[str]] = {}
    for start, end in found.connectors:
        sources.setdefault(end, []).append(start)
        targets.setdefault(start, []).append(end)
    for name, stage in found.stages.items():
        stages[name] = StageSpec(
            id=name,
            fn=stage.fn,
            sources=tuple(sources.get(name, ())),
            targets=tuple(targets.get(name, ())),
            raw=stage.raw,
            places=stage.places,
        )
    return OmniTransferConfig(
        connectors=found.connectors,
        stages=stages,
        default_connector=default,
        origins=found.origins,
        warnings=tuple(_line(warning) for warning in found.warnings),
        path=path,
    )


def get_connectors_config_for_stage(transfer_config: OmniTransferConfig | None, stage_id: str | int) -> dict[str, Any]:
    """The connectors that one stage needs, in plain data that can be sent to its process.

    Args:
        transfer_config: the pipeline's configuration; None gives an empty result.
        stage_id: the stage.

    Returns:
        ``{"from_stage_0": {"spec": {"name": …, "extra": {…}}}, "to_stage_2": …}``, as
        `build_stage_connectors` takes it.

    Raises:
        ConfigError: there is no such stage.
    """
    if transfer_config is None:
        return {}
    stage = transfer_config.check_stage(stage_id)
    config: dict[str, Any] = {}
    for (start, end), spec in transfer_config.connectors.items():
        if stage in (start, end):
            key = f"from_stage_{start}" if end == stage else f"to_stage_{end}"
            config[key] = {"spec": {"name": spec.name, "extra": dict(spec.extra)}}
    return config


def get_stage_connector_config(transfer_config: OmniTransferConfig | None, stage_id: str | int) -> dict[str, Any]:
    """The same as `get_connectors_config_for_stage`, under the ecosystem's other name."""
    return get_connectors_config_for_stage(transfer_config, stage_id)
