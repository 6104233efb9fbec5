"""The rules that a pipeline's configuration has to keep; every breach becomes a `Problem` with its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .config_file import Entries, Items, Problem, plain
from .errors import ConfigError
from .factory import ConnectorSpec, OmniConnectorFactory
from .settings import check_settings, describe, nearest, resolve_namespace, stage_name

__all__ = ["BROKEN", "Checker", "Found", "FoundStage", "find_circle", "label_of"]

Edge = tuple[str, str]

_TOP_KEYS = ("stage_args", "stages", "runtime", "connectors", "edges", "base_config", "run")
_STAGE_KEYS = ("stage_id", "name", "fn", "fn_args", "input_connectors", "output_connectors", "engine_input_source")
_RUNTIME_KEYS = ("connectors", "edges")
_CONNECTOR_KEYS = frozenset({"connector", "connectors", "name", "extra"})  # which an edge has not, in any schema
# Hosts add what they like beside our keys: what looks very much like one of ours is refused; what looks a little like
# one is a warning at the top, and nothing in a stage, where hosts have `input_sources`.
_MISSPELT = 0.87
# Where a key is missing, or nothing but our keys can stand, less likeness is enough.
_TYPO = 0.7
# A host writes these into `extra` per side of an edge; they do not make two connectors of one edge differ.
_PER_SIDE = frozenset({"role", "stage_id", "from_stage", "to_stage"})
# One line of each section as it should be.
_SHAPES = {
    "runtime": "runtime: {connectors: {shm: {name: SharedMemoryConnector}}, edges: [{from: 0, to: 1}]}",
    "connectors": "connectors: {shm: {name: SharedMemoryConnector}}",
    "extra": "extra: {max_bytes: 1073741824}",
    "stages": "stages: [{stage_id: 0}, {stage_id: 1}]",
    "stage_args": "stage_args: [{stage_id: 0}, {stage_id: 1}]",
    "input_connectors": "input_connectors: {from_stage_0: shm}",
    "output_connectors": "output_connectors: {to_stage_1: shm}",
    "engine_input_source": "engine_input_source: [0]",
    "edges": "edges: [{from: 0, to: 1}]",
}
_STAGE, _EDGE = "{stage_id: 0, output_connectors: {to_stage_1: shm}}", "{from: 0, to: 1}"
_CONNECTOR = "{name: SharedMemoryConnector, extra: {max_bytes: 1073741824}}"
_OTHER_IDS = ("id", "stage", "name")  # that people write for a stage_id
BROKEN = ConnectorSpec("?")
"""Stands for the connector of an edge whose own one was refused."""
_FILE_FN = re.compile(r"(?P<place>.+\.py):(?P<name>[^:]+)")
_MODULE_FN = re.compile(r"(?P<place>[^:/]+):(?P<name>[^:]+)")


@dataclass
class FoundStage:
    """One stage as the file has it."""

    fn: str | None
    raw: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)


@dataclass
class Found:
    """What a configuration says, as far as it could be understood."""

    stages: dict[str, FoundStage] = field(default_factory=dict)
    connectors: dict[Edge, ConnectorSpec] = field(default_factory=dict)
    origins: dict[Edge, str] = field(default_factory=dict)
    warnings: list[Problem] = field(default_factory=list)


@dataclass
class _Mention:
    """One place that names an edge; `spec` is None where it says nothing about the connector."""

    edge: Edge
    spec: ConnectorSpec | None
    where: _Where


@dataclass(frozen=True)
class _Where:
    """A place in the file and the path of keys that leads there."""

    path: str
    place: str = ""

    def key(self, key: Any, parent: Entries) -> _Where:
        path = f"{self.path}.{key}" if self.path else str(key)
        return _Where(path, parent.places.get(key, "") or self.place)

    def index(self, index: int, parent: Items) -> _Where:
        return _Where(f"{self.path}[{index}]", parent.places[index] or self.place)

    def __str__(self) -> str:
        return f"{self.place}: {self.path}" if self.place and self.path else self.place or self.path


class Checker:
    """Checks one configuration.

    Args:
        default: the connector of edges that name none.
        problems: the list that problems are added to.
        path: the file, for messages about it as a whole.
    """

    def __init__(self, default: ConnectorSpec, problems: list[Problem], path: Path | None) -> None:
        self._default = default
        self._problems = problems
        self._root = _Where("", str(path) if path else "")
        self._found = Found()
        self._mentions: list[_Mention] = []
        self._table: dict[str, ConnectorSpec | None] = {}
        self._used: set[str] = set()
        self._lists_stages = False

    def check(self, content: Any) -> Found:
        """Check `content`, as `config_file` has read it.

        Args:
            content: the whole configuration; None for an empty one.

        Returns:
            What it says; complete only if no problem was added.
        """
        if content is not None and not isinstance(content, Entries):
            text = f"the configuration must be a mapping, not {describe(content)}"
            self._problem(self._root, f"{text}; its sections are as in {_SHAPES['stages']} and {_SHAPES['edges']}")
            return self._found
        root = content if content is not None else Entries()
        self._misspelt(root, _TOP_KEYS, self._root)
        runtime_at = self._root.key("runtime", root)
        runtime = self._entries(root.get("runtime"), runtime_at)
        self._misspelt(runtime, _RUNTIME_KEYS, runtime_at)
        sections = [(runtime, runtime_at), (root, self._root)]
        tables = [self._connectors(section, at) for section, at in sections]
        self._stages(root)
        for section, at in sections:
            self._edges(section, at)
        self._join()
        for name, where in [pair for table in tables for pair in table.items()]:
            if name not in self._used:
                self._warn(where, f"no edge uses the connector {name!r}")
        return self._found

    # -- small helpers

    def _problem(self, where: _Where, text: str) -> None:
        self._problems.append(Problem(text, str(where)))

    def _warn(self, where: _Where, text: str) -> None:
        self._found.warnings.append(Problem(text, str(where)))

    def _entries(self, value: Any, where: _Where, shape: str = "") -> Entries:
        if isinstance(value, Entries):
            return value
        if value is not None:
            self._problem(where, f"must be a mapping, not {describe(value)}; write it as in {shape or _shape(where)}")
        return Entries()

    def _items(self, value: Any, where: _Where) -> Iterator[tuple[Any, _Where]]:
        if isinstance(value, Items):
            for index, item in enumerate(value):
                yield item, where.index(index, value)
        elif value is not None:
            self._problem(where, f"must be a list, not {describe(value)}; write it as in {_shape(where)}")

    def _misspelt(self, entries: Entries, known: tuple[str, ...], where: _Where) -> None:
        for key in entries:
            if not isinstance(key, str) or key in known:
                continue
            here = where.key(key, entries)
            if near := get_close_matches(key.lower(), known, n=1, cutoff=_MISSPELT):
                self._problem(here, f"is not a key of ours; did you mean {near[0]!r}?")
            elif known is _TOP_KEYS and (near := get_close_matches(key.lower(), known, n=1, cutoff=_TYPO)):
                self._warn(here, f"is not a key of ours and is not read; did you mean {near[0]!r}?")

    def _name(self, value: Any, where: _Where, what: str) -> str | None:
        try:
            return stage_name(value, what)
        except ConfigError as error:
            self._problem(where, str(error).removeprefix(f"{where.path.rpartition('.')[2]}: "))
            return None

    # -- connectors

    def _connectors(self, section: Entries, at: _Where) -> dict[str, _Where]:
        where = at.key("connectors", section)
        table = self._entries(section.get("connectors"), where)
        places: dict[str, _Where] = {}
        for name, definition in table.items():
            here = where.key(name, table)
            if not isinstance(name, str) or not name:
                self._problem(here, f"the name of a connector must be text, not {describe(name)}; put it in quotes")
            elif name in self._table:
                self._problem(here, f"the connector {name!r} is defined under runtime.connectors as well")
            else:
                self._table[name] = self._definition(definition, here)
                places[name] = here
        return places

    def _definition(self, value: Any, where: _Where) -> ConnectorSpec | None:
        """A connector's ``{name, extra}``; None after a problem."""
        before = len(self._problems)
        backend = isinstance(value, str) and OmniConnectorFactory.name_problem(value) is None
        entries = self._entries(value, where, f"{{name: {value}}}" if backend else _CONNECTOR)
        known = ", ".join(OmniConnectorFactory.list_registered_connectors())
        name = entries.get("name")
        if len(self._problems) > before:
            return None
        if name is None:
            self._problem(
                where, f"a connector needs a name{_instead(entries, 'name') or f', as in {_CONNECTOR}.'} Known: {known}"
            )
            return None
        wrong = OmniConnectorFactory.name_problem(name)
        if wrong:
            self._problem(where.key("name", entries), wrong)
            return None
        extra_at = where.key("extra", entries)
        extra = self._entries(entries.get("extra"), extra_at)
        self._beside_name(entries, name, where)
        self._settings(name, extra, extra_at)
        if len(self._problems) > before:
            return None
        missing = OmniConnectorFactory.missing_backend(name)
        if missing:
            self._warn(where, missing)
        return ConnectorSpec(name, plain(extra))

    def _beside_name(self, entries: Entries, name: str, where: _Where) -> None:
        settings = OmniConnectorFactory.settings_of(name) or {}
        for key in entries:
            if key in ("name", "extra"):
                continue
            here = where.key(key, entries)
            near = get_close_matches(str(key).lower(), ("name", "extra"), n=1, cutoff=_TYPO)
            if key in settings:
                self._problem(here, f"this is a setting of {name}: it must stand under extra")
            elif near:
                self._problem(here, f"is neither name nor extra; did you mean {near[0]!r}?")
            else:
                self._warn(here, "is neither name nor extra and is not read")

    def _settings(self, name: str, extra: Entries, where: _Where) -> None:
        table = OmniConnectorFactory.settings_of(name)
        if table is None:
            return
        values, wrong = check_settings(table, extra)
        in_host = OmniConnectorFactory.name_here(name) is not None
        if in_host:  # there, what is no setting of ours is passed over
            for key, text in wrong:
                if key not in table:
                    self._warn(where.key(key, extra), text)
            wrong = [(key, text) for key, text in wrong if key in table]
        for key, text in wrong:
            self._problem(where.key(key, extra), text)
        if wrong:
            return
        for text in _unfit(extra, values):
            self._warn(where, text)
        if in_host or "namespace" not in table:  # vllm-omni's plugin sees to the namespace
            return
        try:
            resolve_namespace(values["namespace"], key_lookup=bool(values.get("key_lookup")))
        except ConfigError as error:
            self._problem(where.key("namespace", extra), str(error).removeprefix("namespace: "))
        if values.get("fallback") == "inline" and values.get("key_lookup"):
            self._problem(where.key("fallback", extra), "'inline' cannot be combined with key_lookup")

    def _reference(self, value: Any, where: _Where, stage: str) -> ConnectorSpec | None:
        """What an edge says of its connector: a name of the table, a definition, or nothing."""
        if value is None:
            return None
        if not isinstance(value, str):
            return self._definition(value, where) or BROKEN
        if value in self._table:
            self._used.add(value)
            spec = self._table[value]
            return ConnectorSpec(spec.name, plain(spec.extra)) if spec else BROKEN
        known = ", ".join(self._table) or "none"
        hint = nearest(value, list(self._table)) or "."
        text = f"stage {stage!r} names {value!r}, which is not under connectors{hint} Defined: {known}"
        if OmniConnectorFactory.name_problem(value) is None:
            text += f". {value} is a backend: write {{name: {value}}}, or define a connector of that name"
        self._problem(where, text)
        return BROKEN

    # -- stages

    def _stages(self, root: Entries) -> None:
        given = [key for key in ("stage_args", "stages") if root.get(key) is not None]
        if len(given) == 2:
            where = self._root.key("stages", root)
            self._problem(where, "the file has stage_args as well; keep one of the two")
        first: dict[str, _Where] = {}
        for section in given:
            at = self._root.key(section, root)
            for value, where in self._items(root[section], at):
                self._lists_stages = True
                self._stage(value, where, first)

    def _stage(self, value: Any, where: _Where, first: dict[str, _Where]) -> None:
        if not isinstance(value, Entries):
            self._problem(
                where, f"a stage must be a mapping with a stage_id, not {describe(value)}; write it as in {_STAGE}"
            )
            return
        self._misspelt(value, _STAGE_KEYS, where)
        if "stage_id" not in value:
            other = next((key for key in _OTHER_IDS if isinstance(value.get(key), str | int)), None)
            hint = f"as in {_STAGE}" if other is None else f"write {{stage_id: {value[other]!r:.40}}} for its {other}"
            self._problem(where, f"a stage needs a stage_id: {hint}")
            return
        name = self._name(value["stage_id"], where.key("stage_id", value), "stage_id")
        if name is None:
            return
        if name in first:
            here = where.key("stage_id", value)
            self._problem(here, f"the stage {name!r} exists already: {first[name]}")
            return
        first[name] = where
        fn = self._fn(value, where)
        places = {"": str(where)} | {key: str(where.key(key, value)) for key in ("fn", "fn_args") if key in value}
        self._found.stages[name] = FoundStage(fn, plain(value), places)
        self._sides(value, where, "input_connectors", "from_stage_", name)
        self._sides(value, where, "output_connectors", "to_stage_", name)
        self._sources(value, where.key("engine_input_source", value), name)

    def _sides(self, stage: Entries, where: _Where, key: str, prefix: str, name: str) -> None:
        at = where.key(key, stage)
        sides = self._entries(stage.get(key), at)
        for side, value in sides.items():
            here = at.key(side, sides)
            if not isinstance(side, str) or not side.startswith(prefix) or side == prefix:
                self._problem(here, f"the key must be {prefix}ID, {_meant(side, prefix)}, not {describe(side)}")
                continue
            other = side.removeprefix(prefix)
            edge = (other, name) if prefix == "from_stage_" else (name, other)
            self._mention(edge, self._reference(value, here, name), here)

    def _sources(self, stage: Entries, where: _Where, name: str) -> None:
        value = stage.get("engine_input_source")
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            single = Items()
            single.add(value, where.place)
            value = single
        for item, here in self._items(value, where):
            source = self._name(item, here, "a source")
            if source is not None:
                self._mention((source, name), None, here)

    def _fn(self, stage: Entries, where: _Where) -> str | None:
        value = stage.get("fn")
        if value is None:
            return None
        here = where.key("fn", stage)
        found = isinstance(value, str) and (_FILE_FN.fullmatch(value) or _MODULE_FN.fullmatch(value))
        if not found or not all(part.isidentifier() for part in found["name"].split(".")):
            self._problem(here, f"must be 'file.py:name' or 'module:name', not {describe(value)}")
            return None
        if not found["place"].endswith(".py"):
            if not all(part.isidentifier() for part in found["place"].split(".")):
                self._problem(here, f"{found['place']!r} is not the name of a module")
                return None
            return str(value)
        file = (stage.folders.get("fn") or Path.cwd()) / found["place"]
        if not file.is_file():
            self._problem(here, f"there is no file {file}")
            return None
        return f"{file.resolve()}:{found['name']}"

    # -- edges

    def _edges(self, section: Entries, at: _Where) -> None:
        where = at.key("edges", section)
        listed: dict[Edge, _Where] = {}
        for value, here in self._items(section.get("edges"), where):
            if not isinstance(value, Entries):
                self._problem(
                    here, f"an edge must be a mapping with from and to, not {describe(value)}; write it as in {_EDGE}"
                )
                continue
            ends = [self._end(value, key, here) for key in ("from", "to")]
            if ends[0] is None or ends[1] is None:
                continue
            for key in _CONNECTOR_KEYS.intersection(value):
                text = f"is not read here: write input_connectors: {{from_stage_{ends[0]}: …}} at stage {ends[1]}"
                self._problem(here.key(key, value), f"{text}, with the connector's name or definition")
            edge = (self._id(ends[0]), self._id(ends[1]))
            if edge in listed:
                self._warn(here, f"the edge {edge[0]} -> {edge[1]} is listed already: {listed[edge]}")
            listed.setdefault(edge, here)
            self._mention(edge, None, here)

    def _end(self, edge: Entries, key: str, where: _Where) -> str | None:
        if edge.get(key) is None:
            self._problem(where, f"an edge needs a stage under {key!r}{_instead(edge, key) or f', as in {_EDGE}'}")
            return None
        return self._name(edge[key], where.key(key, edge), key)

    def _mention(self, edge: Edge, spec: ConnectorSpec | None, where: _Where) -> None:
        self._mentions.append(_Mention(edge, spec, where))
        if edge[0] == edge[1]:
            self._problem(where, f"stage {edge[0]!r} cannot send to itself")

    def _join(self) -> None:
        stages = self._found.stages
        for mention in self._mentions:
            given, mention.edge = mention.edge, (self._id(mention.edge[0]), self._id(mention.edge[1]))
            if mention.edge[0] == mention.edge[1] and given[0] != given[1]:
                text = f"{given[0]!r} and {given[1]!r} are the same stage: it cannot send to itself"
                self._problem(mention.where, text)
        if not self._lists_stages:
            # A configuration of edges alone: they say which stages there are.
            for mention in self._mentions:
                for stage in mention.edge:
                    stages.setdefault(stage, FoundStage(None, {}))
        decided: dict[Edge, _Mention] = {}
        for mention in self._mentions:
            if not self._ends_exist(mention):
                continue
            edge = mention.edge
            earlier = decided.get(edge)
            if earlier is None or (earlier.spec is None and mention.spec is not None):
                decided[edge] = mention
            else:
                self._agree(earlier, mention)
            if edge not in self._found.connectors or mention is decided[edge]:
                spec = mention.spec or ConnectorSpec(self._default.name, dict(self._default.extra))
                self._found.connectors[edge] = spec
                self._found.origins[edge] = str(mention.where)
        joined = {stage for edge in self._found.connectors for stage in edge}
        alone = [stage for stage in stages if stage not in joined]
        if alone and len(stages) > 1 and not self._problems:
            self._warn(self._root, f"no edge leads to or from {', '.join(f'stage {stage!r}' for stage in alone)}")

    def _id(self, stage: str) -> str:
        """The id of a stage that is given by its id or its name; what is neither stays."""
        if stage in self._found.stages:
            return stage
        named = [each for each, found in self._found.stages.items() if label_of(found.raw) == stage]
        return named[0] if len(named) == 1 else stage

    def _ends_exist(self, mention: _Mention) -> bool:
        stages = self._found.stages
        missing = [stage for stage in dict.fromkeys(mention.edge) if stage not in stages]
        for stage in missing:
            names = {name: label_of(found.raw) for name, found in stages.items()}
            known = ", ".join(f"{name} ({label})" if label else name for name, label in names.items()) or "none"
            start, end = mention.edge
            why = "is the name of several: use the stage_id" if stage in names.values() else "does not exist"
            text = f"the edge {start} -> {end} names the stage {stage!r}, which {why}. Stages: {known}"
            self._problem(mention.where, text)
        return not missing and mention.edge[0] != mention.edge[1]

    def _agree(self, one: _Mention, other: _Mention) -> None:
        """Both ends of an edge may name its connector, but not two different ones."""
        if one.spec is None or other.spec is None or BROKEN in (one.spec, other.spec):
            return
        start, end = one.edge
        if not OmniConnectorFactory.same_backend(one.spec.name, other.spec.name):
            text = f"{other.spec.name} here, but {one.spec.name} at {one.where}"
            self._problem(other.where, f"two backends for the edge {start} -> {end}: {text}")
            return
        mine, theirs = _shared(one.spec.extra), _shared(other.spec.extra)
        names = sorted({str(key) for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)})
        if names:
            text = f"{', '.join(names)} differs from {one.where}"
            self._problem(other.where, f"two settings for the edge {start} -> {end}: {text}")


def _shape(where: _Where) -> str:
    """How the section at this place should look."""
    return _SHAPES[where.path.rpartition(".")[2]]


def _unfit(extra: Entries, values: dict[str, Any]) -> Iterator[str]:
    """Sizes that work, but not as whoever set them will have meant."""
    limit, threshold = values.get("max_bytes"), values.get("shm_threshold_bytes")
    if limit is None or threshold is None:
        return
    if limit < threshold and not values.get("key_lookup"):
        instead = "travels inside the metadata" if values.get("fallback") == "inline" else "is refused"
        yield (
            f"max_bytes {limit} is less than shm_threshold_bytes {threshold}: no payload fits that is too large for "
            f"the metadata, so every one of {threshold} bytes and more {instead}"
        )
    if extra.get("segment_bytes") is not None and values["segment_bytes"] > limit:
        yield f"segment_bytes {values['segment_bytes']} is more than max_bytes: segments are {limit} bytes at most"


def label_of(stage: Mapping[str, Any]) -> str:
    """What people call the stage of this section: its own ``name``, or the host's for its model; "" for neither."""
    engine = stage.get("engine_args")
    found = stage.get("name") or (engine.get("model_stage") if isinstance(engine, Mapping) else None)
    return found if isinstance(found, str) else ""


def _shared(extra: dict[str, Any]) -> dict[Any, Any]:
    """The settings in which both sides of an edge must agree."""
    return {key: value for key, value in extra.items() if value is not None and key not in _PER_SIDE}


def _instead(entries: Entries, key: str) -> str:
    """A hint at the entry that was perhaps meant to be the missing `key`, or nothing."""
    found = get_close_matches(key, [str(other) for other in entries if other != key], n=1, cutoff=_TYPO)
    return f"; there is {found[0]!r}: did you mean {key!r}?" if found else ""


def _meant(side: Any, prefix: str) -> str:
    """Which key was meant, where the given one has the other stage's id in it; else an example."""
    stage = re.sub(r"(from|to)_?(stage)?_?|stage_?", "", str(side), count=1)
    plausible = isinstance(side, (str, int)) and not isinstance(side, bool) and re.fullmatch(r"[\w.-]{1,40}", stage)
    return f"here {prefix}{stage}" if plausible else f"such as {prefix}0"


def find_circle(stages: Iterable[str], edges: Iterable[Edge]) -> list[str]:
    """One circle of stages, first and last the same; empty where there is none."""
    waiting: dict[str, dict[str, None]] = {stage: {} for stage in stages}
    following: dict[str, list[str]] = {}
    for start, end in edges:
        if end in waiting:
            waiting[end][start] = None
            following.setdefault(start, []).append(end)
    ready = [stage for stage, sources in waiting.items() if not sources]
    while ready:
        stage = ready.pop()
        del waiting[stage]
        for end in following.get(stage, ()):
            if end in waiting and stage in waiting[end]:
                del waiting[end][stage]
                if not waiting[end]:
                    ready.append(end)
    left = list(waiting)
    if not left:
        return []
    # Each stage that is left waits for another one that is left: going back along them must meet a circle.
    path = [left[0]]
    while path[-1] not in path[:-1]:
        path.append(next(iter(waiting[path[-1]])))
    return path[path.index(path[-1]) :][::-1]
