"""A pipeline's file as Python values that remember their lines.

Every mapping and list read here knows the place of each of its entries, so that whoever checks the values can
say where a wrong one stands, also after a file was laid over its ``base_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .settings import describe

if TYPE_CHECKING:
    import yaml

__all__ = ["Entries", "Items", "Problem", "plain", "read_file", "read_mapping"]

_MERGE = "tag:yaml.org,2002:merge"
_MAP = "tag:yaml.org,2002:map"
_SEQ = "tag:yaml.org,2002:seq"

# What an overlay adds to instead of replacing it.
_DEEP_IN_STAGE = frozenset(
    {
        "default_sampling_params",
        "default_pooling_params",
        "subtalker_sampling_params",
        "engine_extras",
        "engine_args",
    }
)
# A null one of these is a section whose body is commented out: it must not wipe out what the base says.
_NULL_IS_ABSENT = frozenset(
    {
        "connectors",
        "edges",
        "stages",
        "runtime",
        "stage_args",
        "input_connectors",
        "output_connectors",
        "engine_input_source",
        "fn",
    }
)


class Problem(Exception):
    """Something is wrong at one place; collected, and shown to the user as part of one ConfigError.

    Args:
        text: what.
        place: ``file:line``, or "" where there is none.
    """

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.place = place


class _Duplicate(Problem):
    """A key that stands twice in one mapping."""


class Entries(dict[Any, Any]):
    """A mapping that knows where each of its entries stands, and in which folder its file lies."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.places: dict[Any, str] = {}
        self.folders: dict[Any, Path | None] = {}
        self.folder = folder

    def add(self, key: Any, value: Any, place: str = "", folder: Path | None = None) -> None:
        """Set one entry together with its place."""
        self[key] = value
        self.places[key] = place
        self.folders[key] = folder or self.folder


class Items(list[Any]):
    """A list that knows where each of its items stands."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def add(self, value: Any, place: str = "") -> None:
        """Append one item together with its place."""
        self.append(value)
        self.places.append(place)


def plain(value: Any, _seen: dict[int, Any] | None = None) -> Any:
    """A copy of `value` in ordinary dicts and lists; shared parts stay shared, so that it cannot explode."""
    seen = {} if _seen is None else _seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Mapping):
        copy: Any = {}
        seen[id(value)] = copy
        copy.update((key, plain(item, seen)) for key, item in value.items())
        return copy
    if isinstance(value, (list, tuple)):
        copy = []
        seen[id(value)] = copy
        copy.extend(plain(item, seen) for item in value)
        return copy
    return value


def read_mapping(config: Any) -> tuple[Any, list[Problem]]:
    """Take over a configuration that was given as a dict.

    Args:
        config: nested dicts and lists.

    Returns:
        The same as `Entries` and `Items` without places, and the problems found.
    """
    problems: list[Problem] = []
    try:
        return _from_python(config, {}, problems), problems
    except RecursionError:
        return None, [Problem("the configuration is nested too deeply")]


def _from_python(value: Any, seen: dict[int, Any], problems: list[Problem]) -> Any:
    if id(value) in seen:
        if seen[id(value)] is None:
            problems.append(Problem("the configuration contains itself"))
        return seen[id(value)]
    if isinstance(value, Mapping):
        seen[id(value)] = None
        entries = Entries()
        for key, item in value.items():
            entries.add(key, _from_python(item, seen, problems))
        seen[id(value)] = entries
        return entries
    if isinstance(value, (list, tuple)):
        seen[id(value)] = None
        items = Items()
        for item in value:
            items.add(_from_python(item, seen, problems))
        seen[id(value)] = items
        return items
    return value


def read_file(path: Path) -> tuple[Any, list[Problem]]:
    """Read a YAML or JSON file and everything that it inherits through ``base_config``.

    Args:
        path: the file. ``.json`` is JSON, ``.yaml`` and ``.yml`` are YAML; any other is told by its content.

    Returns:
        The content (None for an empty file) and the problems found.
    """
    problems: list[Problem] = []
    return _read_chain(path, [], problems), problems


def _read_chain(path: Path, below: list[Path], problems: list[Problem]) -> Any:
    try:
        content = _read_one(path, problems)
    except Problem as problem:
        problems.append(problem)
        return None
    base = content.pop("base_config", None) if isinstance(content, Entries) else None
    if base is None:
        return content
    place = f"{content.places['base_config']}: base_config"
    if not isinstance(base, str) or not base:
        problems.append(
            Problem(f"must be the path of a file, not {describe(base)}; write it as in base_config: other.yaml", place)
        )
        return content
    target = path.parent / base
    chain = [*below, path.resolve()]
    if target.resolve() in chain:
        names = " -> ".join(step.name for step in [*chain, target.resolve()])
        problems.append(Problem(f"the files inherit from each other: {names}", place))
        return content
    if not target.is_file():
        problems.append(Problem(f"there is no file {target}", place))
        return content
    inherited = _read_chain(target, chain, problems)
    return _overlay(inherited, content) if isinstance(inherited, Entries) else content


def _read_one(path: Path, problems: list[Problem]) -> Any:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Problem(f"cannot be read: {reason}", str(path)) from None
    try:
        if _is_json(path, data):
            return _read_json(path, data, problems)
        return _Reader(path, problems).read(data)
    except RecursionError:
        raise Problem("is nested too deeply", str(path)) from None


def _is_json(path: Path, data: bytes) -> bool:
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        return path.suffix.lower() == ".json"
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _read_json(path: Path, data: bytes, problems: list[Problem]) -> Any:
    if not data.strip():
        return None
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise Problem(f"is not valid JSON: {error.msg}", f"{path}:{error.lineno}") from None
    except ValueError as error:
        raise Problem(f"is not valid JSON: {error}", str(path)) from None
    # The json module knows no line numbers. The text is read a second time as YAML, of which JSON is a subset
    # but for tabs, and only the places are taken from there.
    marked_problems: list[Problem] = []
    try:
        marked = _Reader(path, marked_problems).read(data.replace(b"\t", b" "))
    except Problem:
        marked = None
    problems.extend(problem for problem in marked_problems if isinstance(problem, _Duplicate))
    return _with_places(value, marked)


def _with_places(value: Any, marked: Any) -> Any:
    if isinstance(value, dict):
        entries = Entries(marked.folder if isinstance(marked, Entries) else None)
        places = marked.places if isinstance(marked, Entries) else {}
        for key, item in value.items():
            child = marked.get(key) if isinstance(marked, Entries) else None
            entries.add(key, _with_places(item, child), places.get(key, ""))
        return entries
    if isinstance(value, list):
        items = Items()
        same = isinstance(marked, Items) and len(marked) == len(value)
        for index, item in enumerate(value):
            child = marked[index] if same else None
            items.add(_with_places(item, child), marked.places[index] if same else "")
        return items
    return value


class _Reader:
    """Builds `Entries` and `Items` from the nodes of one YAML document."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self._path = path
        self._problems = problems
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def read(self, data: bytes) -> Any:
        import yaml

        try:
            loader = yaml.SafeLoader(data)
        except yaml.YAMLError as error:
            raise self._syntax(error) from None
        try:
            node = loader.get_single_node()
            return None if node is None else self._value(loader, node)
        except yaml.YAMLError as error:
            raise self._syntax(error) from None
        finally:
            loader.dispose()

    def _syntax(self, error: yaml.YAMLError) -> Problem:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        text = " ".join(
            str(part) for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part
        )
        place = f"{self._path}:{mark.line + 1}" if mark else str(self._path)
        return Problem(f"is not valid YAML: {text or error}", place)

    def _place(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node) -> Any:
        import yaml

        if id(node) in self._done:
            return self._done[id(node)]
        if id(node) in self._open:
            self._problems.append(Problem("contains itself", self._place(node)))
            return None
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            value: Any = self._mapping(loader, node)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            value = Items()
            for item in node.value:
                value.add(self._value(loader, item), self._place(item))
        else:
            value = self._construct(loader, node)
        self._open.discard(id(node))
        self._done[id(node)] = value
        return value

    def _construct(self, loader: yaml.SafeLoader, node: yaml.Node) -> Any:
        import yaml

        try:
            return loader.construct_object(node, deep=True)
        except yaml.YAMLError as error:
            text = getattr(error, "problem", None) or str(error)
        except (ValueError, TypeError, OverflowError, AttributeError) as error:
            # A date such as 2001-13-01 or a number such as 0b_ passes the grammar and fails only here.
            text = f"cannot be read as a value: {error}"
        self._problems.append(Problem(text, self._place(node)))
        return None

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode) -> Entries:
        import yaml

        entries = Entries(self._path.parent)
        merged: list[Any] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged.append(self._value(loader, value_node))
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(Problem("a key must be a single value, as in key: value", self._place(key_node)))
                continue
            key = self._construct(loader, key_node)
            if key in entries:
                first = entries.places[key].rpartition(":")[2]
                text = f"the key {key!r} stands here twice (first in line {first})"
                self._problems.append(_Duplicate(text, self._place(key_node)))
            entries.add(key, self._value(loader, value_node), self._place(key_node))
        for source in merged:
            for part in source if isinstance(source, Items) else [source]:
                self._merge(entries, part, node)
        return entries

    def _merge(self, entries: Entries, part: Any, node: yaml.Node) -> None:
        if not isinstance(part, Entries):
            self._problems.append(
                Problem("<< needs a mapping or a list of mappings, as in <<: *anchor", self._place(node))
            )
            return
        for key, value in part.items():
            if key not in entries:
                entries.add(key, value, part.places[key])


def _overlay(base: Entries, over: Entries) -> Entries:
    """`over` laid over `base`: stages merge by their id, connectors by their name, all else is replaced."""
    merged = _merge_entries(base, over)
    for key in ("stages", "stage_args"):
        if isinstance(base.get(key), Items) and isinstance(over.get(key), Items):
            merged[key] = _merge_stages(base[key], over[key])
    if isinstance(base.get("connectors"), Entries) and isinstance(over.get("connectors"), Entries):
        merged["connectors"] = _merge_entries(base["connectors"], over["connectors"], deep=True)
    return merged


def _merge_entries(base: Entries, over: Entries, *, deep: bool = False) -> Entries:
    merged = Entries()
    for source in (base, over):
        for key, value in source.items():
            if value is None and key in merged and isinstance(key, str) and key in _NULL_IS_ABSENT:
                continue
            if deep and isinstance(value, Entries) and isinstance(merged.get(key), Entries):
                value = _merge_entries(merged[key], value, deep=True)
            merged.add(key, value, source.places[key], source.folders[key])
    return merged


def _merge_stages(base: Items, over: Items) -> Items:
    merged = Items()
    index: dict[str, int] = {}
    for value, place in zip(base, base.places, strict=True):
        name = _stage_key(value)
        if name is not None:
            index.setdefault(name, len(merged))
        merged.add(value, place)
    given: set[str] = set()
    for value, place in zip(over, over.places, strict=True):
        name = _stage_key(value)
        # A stage that the overlay names twice is kept twice, so that the check for duplicates can see it.
        if name is None or name not in index or name in given:
            merged.add(value, place)
            continue
        given.add(name)
        merged[index[name]] = _merge_stage(merged[index[name]], value)
        merged.places[index[name]] = place
    return merged


def _merge_stage(base: Entries, over: Entries) -> Entries:
    merged = _merge_entries(base, over)
    for key in _DEEP_IN_STAGE:
        if isinstance(base.get(key), Entries) and isinstance(over.get(key), Entries):
            merged[key] = _merge_entries(base[key], over[key], deep=True)
    return merged


def _stage_key(stage: Any) -> str | None:
    identity = stage.get("stage_id") if isinstance(stage, Entries) else None
    return str(identity) if isinstance(identity, (str, int)) and not isinstance(identity, bool) else None
