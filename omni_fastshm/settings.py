"""Settings of connectors and arguments of calls: checked in one place, so that every backend says the same.

Nothing is ever clamped: a value out of range is an error that names the setting, because a silently changed
size or time shows up only as a slow or a stuck pipeline.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from numbers import Integral, Real
from reprlib import Repr
from threading import TIMEOUT_MAX
from typing import Any, Literal

from .errors import ConfigError

__all__ = [
    "HOST_SETTINGS",
    "NAMESPACE_VARIABLE",
    "ONLY_IN_HOST",
    "Setting",
    "check_consumers",
    "check_edge",
    "check_namespace",
    "check_settings",
    "check_timeout",
    "describe",
    "is_import_path",
    "known_edge",
    "misspelt_settings",
    "nearest",
    "parse_settings",
    "request_name",
    "resolve_namespace",
    "stage_name",
]

Kind = Literal["int", "bytes", "size", "seconds", "microseconds", "bool", "auto", "str", "choice", "names"]

HOST_SETTINGS = (
    "stage_id",
    "role",
    "from_stage",
    "to_stage",
    "codec_*",
    "initial_codec_*",
    "connector_get_*",
    "delivery_timeout_s",
    "wakeup_scope",
)
"""Names (fnmatch patterns) that a host mixes into a connector's settings for itself: accepted and ignored."""

NAMESPACE_VARIABLE = "OMNI_FASTSHM_NAMESPACE"

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,40}", re.ASCII)
_SIZES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT])(i?)[bB]?\s*", re.ASCII)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
_DEVICE = re.compile(r"\s*([A-Za-z]+)[\s:_.]*([0-9]{0,3})\s*", re.ASCII)
# As people write it, and as torch does.
_DEVICES = {"cuda": "cuda", "cpu": "cpu", "gpu": "cuda", "nvidia": "cuda", "host": "cpu", "xpu": "xpu", "mps": "mps"}
_MAX_CONSUMERS = 255
_EVERY_BYTE = 1 << 63
_PART_LIKENESS = 0.8


class _Short(Repr):
    """Not repr(): a file of a few lines full of YAML aliases can stand for gigabytes of text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = 60

    def repr1(self, x: Any, level: int) -> str:
        # The base class goes by the name of the type, so that a subclass would be written out in full.
        for base in (dict, list, tuple):
            if isinstance(x, base):
                shorten: Callable[[Any, int], str] = getattr(self, f"repr_{base.__name__}")
                return shorten(x, level)
        return super().repr1(x, level)


_SHORT = _Short()


@dataclass(frozen=True)
class Setting:
    """What one setting of a connector may be.

    Args:
        kind: "int" and "bytes" give an int, "size" too, from a number of bytes or a text such as "512MiB" (of 1024
            based units, also without the i), "seconds" and "microseconds" a float, "bool" a bool, "auto" a bool or
            "auto", "str" and "choice" a str, "names" (a list of ``"module:Class"``, or one) a tuple of str.
        default: used when the setting is absent or null; it is not checked and may be None.
        minimum: smallest number allowed; None means 0, for nothing counted or timed here can be negative.
        maximum: largest number allowed; None means no limit.
        choices: the texts allowed for "choice".
        help: one line for tables and documentation.
        env: ``$NAME`` and ``${NAME}`` in a text stand for variables of the environment.
    """

    kind: Kind
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    help: str = ""
    env: bool = False


ONLY_IN_HOST = {
    "unread_ttl_s": Setting("seconds", 1800.0, help="what was not read in this time may be dropped to make room"),
}
"""What our connectors have inside vllm-omni beside the settings that they have here."""


def nearest(name: Any, known: Sequence[str]) -> str:
    """A hint such as ``"; did you mean 'namespace'?"`` for the known name nearest to `name`, or nothing."""
    by_lower = {text.lower(): text for text in known}
    given = str(name).lower()
    found = get_close_matches(given, by_lower, n=1)
    if not found:  # a part of a long name, such as `treshold` for `shm_threshold_bytes`
        by_part = {part: text for text in reversed(by_lower) for part in text.split("_") if len(part) > 3}
        found = [by_part[part] for part in get_close_matches(given, by_part, n=1, cutoff=_PART_LIKENESS)]
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""


def parse_settings(owner: str, table: Mapping[str, Setting], extra: Any) -> dict[str, Any]:
    """Check a connector's settings and fill in the defaults.

    Args:
        owner: the connector's name, which starts every message.
        table: the settings that the connector has.
        extra: what the user wrote. None, and a value that is None, mean the default. Settings of the host
            (`HOST_SETTINGS`) and those matching an entry of ``extra["extra_ignored"]`` are skipped.

    Returns:
        A value for every name in `table`.

    Raises:
        ConfigError: something is wrong; the message lists every problem.
    """
    values, problems = check_settings(table, extra)
    if not problems:
        return values
    lines = [f"{key}: {text}" if key else text for key, text in problems]
    if len(lines) == 1:
        raise ConfigError(f"{owner}: {lines[0]}")
    raise ConfigError(f"{owner}: {len(lines)} problems in its settings:\n" + "\n".join(f"  - {x}" for x in lines))


def check_settings(table: Mapping[str, Setting], extra: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Like `parse_settings`, but the problems are returned, so that a file's loader can add each one's place.

    Args:
        table: the settings that there are.
        extra: what the user wrote.

    Returns:
        The values (defaults where something is wrong) and ``(name, what is wrong)`` for each problem; the
        name is "" where `extra` as a whole is wrong.
    """
    values = {name: setting.default for name, setting in table.items()}
    if extra is None:
        return values, []
    if not isinstance(extra, Mapping):
        return values, [("", f"the settings must be a mapping of names to values, not {describe(extra)}")]
    ignored, problems = _ignored(extra.get("extra_ignored"))
    for name, value in extra.items():
        if isinstance(name, str) and name in table:
            if value is None:
                continue
            try:
                values[name] = _CONVERTERS[table[name].kind](table[name], _from_environment(table[name], value))
            except ConfigError as error:
                problems.append((name, str(error)))
        elif not isinstance(name, str):
            problems.append((str(name), f"the name of a setting must be text, not {describe(name)}"))
        elif name != "extra_ignored" and not any(fnmatchcase(name, pattern) for pattern in ignored):
            known = ", ".join(sorted(table)) or "none"
            problems.append(
                (
                    name,
                    f"there is no such setting{nearest(name, list(table)) or '.'} Known: {known}. "
                    "A setting meant for the host can be named in extra_ignored",
                )
            )
    return values, problems


def misspelt_settings(table: Mapping[str, Setting], extra: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What looks very much like one of the settings and is none: for where a host mixes its own among them.

    Args:
        table: the settings that there are.
        extra: what the user and the host wrote.

    Returns:
        Each name, and the one that was probably meant.
    """
    ignored = _ignored(extra.get("extra_ignored"))[0]
    found = []
    for name in extra:
        if isinstance(name, str) and name not in table and not any(fnmatchcase(name, each) for each in ignored):
            near = get_close_matches(name.lower(), table, n=1, cutoff=_PART_LIKENESS)
            found += [(name, near[0])] if near and name != "extra_ignored" else []
    return found


def _ignored(given: Any) -> tuple[list[str], list[tuple[str, str]]]:
    if given is None:
        return list(HOST_SETTINGS), []
    try:
        return [*HOST_SETTINGS, *_texts(given)], []
    except ConfigError as error:
        return list(HOST_SETTINGS), [("extra_ignored", str(error))]


def describe(value: Any) -> str:
    """`value` and its type, short enough for a message whatever the value is."""
    try:
        text = _SHORT.repr(value)
    except Exception:
        # A repr that fails must not hide the error that is being reported.
        text = "<a value without a repr>"
    kind = next((base for base in (dict, list) if isinstance(value, base)), type(value))
    return f"{text} ({kind.__name__})"


def _from_environment(setting: Setting, value: Any) -> Any:
    """`value` with the variables that it names; one that is not set is an error, not an empty text."""
    if not setting.env or not isinstance(value, str) or "$" not in value:
        return value

    def look_up(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        text = os.environ.get(name)
        if not text:
            raise ConfigError(f"{describe(value)} needs the environment variable {name}, which is not set")
        return text

    return _VARIABLE.sub(look_up, value)


def _number(setting: Setting, value: Any) -> int | float:
    """`value` as an exact int where it is one, else as a float; range checked."""
    number = _read_number(value)
    if number is None:
        raise ConfigError(f"{describe(value)} is not a number{_unit_hint(setting, value)}")
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{describe(value)} is not a finite number")
    low = 0 if setting.minimum is None else setting.minimum
    if number < low:
        raise ConfigError(f"{describe(value)} is too small: the least is {low}")
    if setting.maximum is not None and number > setting.maximum:
        raise ConfigError(f"{describe(value)} is too large: the most is {setting.maximum}")
    return number


def _read_number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return None
    try:
        # int first: through a float, sys.maxsize would come back as a larger number.
        return int(value)
    except ValueError:
        return float(value)


def _unit_hint(setting: Setting, value: Any) -> str:
    if setting.kind == "size":
        return "; write bytes as a number, or a text such as '512MiB'"
    size = _read_size(value) if setting.kind == "bytes" else None
    return f"; write {setting.kind} as a plain number" if size is None else f"; write it in bytes: {size}"


def _read_size(value: Any) -> int | None:
    """The bytes that a text with a unit stands for; None where it is no such text."""
    found = _SIZES.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    size = float(found[1]) * 1024 ** " kmgt".index(found[2].lower())
    if 0 < size < 1:
        raise ConfigError(f"{describe(value)} is less than one byte")
    if size >= _EVERY_BYTE:
        raise ConfigError(f"{describe(value)} is more bytes than there can be")
    return int(size)


def _size(setting: Setting, value: Any) -> int:
    size = _read_size(value)
    return _whole(setting, value if size is None else size)


def _whole(setting: Setting, value: Any) -> int:
    number = _number(setting, value)
    if number != int(number):
        raise ConfigError(f"{describe(value)} is not a whole number")
    return int(number)


def _time(setting: Setting, value: Any) -> float:
    number = _number(setting, value)
    if number > TIMEOUT_MAX:
        raise ConfigError(f"{describe(value)} is too large: the system can wait {int(TIMEOUT_MAX)} seconds")
    return float(number)


def _bool(setting: Setting, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ConfigError(f"{describe(value)} is neither true nor false")


def _auto(setting: Setting, value: Any) -> bool | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return _bool(setting, value)
    except ConfigError:
        raise ConfigError(f"{describe(value)} is neither auto nor true nor false") from None


def _text(setting: Setting, value: Any) -> str:
    # A number is refused, not converted: YAML has turned 007 into 7 before we see it.
    if not isinstance(value, str):
        raise ConfigError(f"{describe(value)} is not text; put it in quotes")
    return str.__str__(value)


def _choice(setting: Setting, value: Any) -> str:
    if isinstance(value, str) and value in setting.choices:
        return str.__str__(value)
    known = ", ".join(setting.choices)
    raise ConfigError(f"{describe(value)} is not one of: {known}{nearest(value, setting.choices)}")


def _names(setting: Setting, value: Any) -> tuple[str, ...]:
    names = _texts(value)
    for name in names:
        if not is_import_path(name):
            raise ConfigError(f"{describe(name)} does not read 'module:Class'")
    return names


def is_import_path(text: Any) -> bool:
    """Whether `text` reads ``module:Class``, both parts dotted names; nothing is imported."""
    if not isinstance(text, str):
        return False
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (str.__str__(value),)
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{describe(value)} is not a list of texts")
    return tuple(str.__str__(item) for item in value)


_CONVERTERS: dict[str, Callable[[Setting, Any], Any]] = {
    "int": _whole,
    "bytes": _whole,
    "size": _size,
    "seconds": _time,
    "microseconds": _time,
    "bool": _bool,
    "auto": _auto,
    "str": _text,
    "choice": _choice,
    "names": _names,
}


def check_namespace(value: Any) -> str:
    """A namespace's name: it becomes part of the names of shared memory.

    Args:
        value: 1 to 40 characters out of A-Z, a-z, 0-9, "_" and "-".

    Returns:
        The same text.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, str) and _NAMESPACE.fullmatch(value):
        return str.__str__(value)
    raise ConfigError(
        f"namespace: {describe(value)} cannot be used; a namespace is 1 to 40 characters out of A-Z, a-z, 0-9, _ and -"
    )


def resolve_namespace(value: str | None, *, key_lookup: bool = False) -> str:
    """The namespace to use: the setting, else ``$OMNI_FASTSHM_NAMESPACE``, else "default".

    Args:
        value: the setting `namespace`; None where it is not given.
        key_lookup: whether payloads can be got by their key alone; the namespace has to be given then, for in
            the common one two pipelines with equal request ids would take each other's payloads.

    Returns:
        The namespace's name.

    Raises:
        ConfigError: the name cannot be used, or is missing where it is needed.
    """
    if value is None:
        value = os.environ.get(NAMESPACE_VARIABLE) or None
    if value is not None:
        return check_namespace(value)
    if key_lookup:
        raise ConfigError(
            "namespace: with key_lookup the namespace must be given, because payloads are then found by edge "
            f"and request id alone; set `namespace` or ${NAMESPACE_VARIABLE} to one name for the pipeline"
        )
    return "default"


def stage_name(value: Any, what: str = "stage") -> str:
    """A stage's name as text: an int means the same as its ``str()``.

    Args:
        value: the stage.
        what: how the message calls it, such as "from_stage".

    Returns:
        The name.

    Raises:
        ConfigError: it is empty or neither str nor int.
    """
    name = _name(value, what)
    if not name:
        raise ConfigError(f"{what}: a stage's name must not be empty")
    return name


def request_name(value: Any) -> str:
    """A request id as text; any text goes, also the empty one, with slashes or line breaks.

    Args:
        value: the id, str or int.

    Returns:
        The id as str.

    Raises:
        ConfigError: it is neither str nor int, or holds half a surrogate pair, which no encoding can carry.
    """
    return _name(value, "request_id")


def _name(value: Any, what: str) -> str:
    if isinstance(value, str):
        # str.__str__ and not str(): an enum's members would give "Stage.THINKER" instead of their text.
        name = value if type(value) is str else str.__str__(value)
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{what}: {describe(value)} is not valid Unicode text") from None
        return name
    if not isinstance(value, bool) and isinstance(value, Integral):
        try:
            return str(int(value))
        except ValueError:
            raise ConfigError(f"{what}: the number has too many digits") from None
    raise ConfigError(f"{what}: {describe(value)} is neither text nor a whole number")


def check_edge(from_stage: Any, to_stage: Any) -> tuple[str, str]:
    """Both ends of an edge as text.

    Args:
        from_stage: the sending stage.
        to_stage: the receiving stage.

    Returns:
        ``(from, to)``.

    Raises:
        ConfigError: one of them is no stage's name, or both are the same stage.
    """
    edge = stage_name(from_stage, "from_stage"), stage_name(to_stage, "to_stage")
    if edge[0] == edge[1]:
        raise ConfigError(f"to_stage: stage {edge[0]!r} cannot send to itself")
    return edge


_remembered_edge = functools.lru_cache(maxsize=1024, typed=True)(check_edge)  # typed: True is not the stage 1


def known_edge(from_stage: Any, to_stage: Any) -> tuple[str, str]:
    """`check_edge` for every message: remembers what it has seen."""
    try:
        return _remembered_edge(from_stage, to_stage)
    except TypeError:  # unhashable: let the check say what is wrong with it
        return check_edge(from_stage, to_stage)


def check_consumers(n: Any) -> int:
    """How many times a payload can be taken.

    Args:
        n: 1 to 255.

    Returns:
        The number.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(n, bool) and isinstance(n, Integral) and 1 <= int(n) <= _MAX_CONSUMERS:
        return int(n)
    raise ConfigError(f"consumers: {describe(n)} is not a whole number from 1 to {_MAX_CONSUMERS}")


def check_copy(copy: Any) -> None:
    """Is this what `get` takes for `copy`?

    Args:
        copy: None, True or False.

    Raises:
        ConfigError: it is something else.
    """
    if copy is not None and type(copy) is not bool:
        raise ConfigError(f"copy: {describe(copy)} is neither None, True nor False", op="get")


def check_timeout(t: Any) -> float | None:
    """A time to wait.

    Args:
        t: seconds, 0 or more; None waits for ever.

    Returns:
        Seconds, or None for ever; also for a time longer than the system's clocks can count (292 years).

    Raises:
        ConfigError: it is negative, NaN or no number.
    """
    if t is None:
        return None
    if not isinstance(t, bool) and isinstance(t, Real) and float(t) >= 0:
        return float(t) if float(t) < TIMEOUT_MAX else None
    raise ConfigError(f"timeout: {describe(t)} is not a time; give seconds (0 or more), or None to wait for ever")


def check_device(device: Any) -> None:
    """Is this where tensors can arrive?

    Args:
        device: what ``torch.device`` takes: "cuda:1", an index, a device; or None.

    Raises:
        ConfigError: torch does not know it.
    """
    if device is None or (isinstance(device, str) and device == "cpu"):
        return
    import torch

    try:
        torch.device(device)
    except (TypeError, RuntimeError) as error:
        hint = _device_meant(device, torch.device)
        why = f"; did you mean {hint!r}?" if hint else f": {str(error).partition(chr(10))[0]}"
        if isinstance(device, bool) or not isinstance(device, (str, Integral)):
            why = "; give a text such as 'cuda', 'cuda:1' or 'cpu', an index, or a torch.device"
        raise ConfigError(f"device: {describe(device)} is no device of torch{why}") from None


def _device_meant(device: Any, parse: Callable[[str], Any]) -> str:
    """What somebody wrote a little differently from torch, as torch writes it; "" for all else."""
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        return ""
    kind = found[1].lower()
    near = _DEVICES.get(kind) or next(iter(get_close_matches(kind, _DEVICES, n=1)), "")
    meant = _DEVICES.get(near, near) + (f":{int(found[2])}" if found[2] else "")
    try:
        parse(meant)
    except (TypeError, RuntimeError):
        return ""
    return meant
