"""What `plan` and `simulate` are told about the traffic of a pipeline."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_fastshm.config import OmniTransferConfig
from omni_fastshm.errors import ConfigError
from omni_fastshm.sizing import LARGEST, MOST_UNDER_WAY, Edge, Load, rounded_down

__all__ = ["add_load_arguments", "add_node_argument", "loads_of", "nodes_of", "size"]

_UNITS: dict[str, int] = {"": 1} | {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kKmMgGtT]?i?)([bB]?)", re.ASCII)


def add_load_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Arguments for rates, sizes and times, for all edges or one at a time."""
    value = "[FROM:TO=]"
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the pipeline's YAML or JSON file")
    parser.add_argument(
        "--rps",
        metavar=f"{value}N",
        action="append",
        default=[],
        required=required,
        help="payloads per second on every edge, or on one; give it again for others",
    )
    parser.add_argument(
        "--hold-ms",
        metavar=f"{value}MS",
        action="append",
        default=[],
        required=required,
        help="from the put of a payload until its last view is dropped",
    )
    parser.add_argument(
        "--payload",
        metavar=f"{value}SIZE",
        action="append",
        default=[],
        required=required,
        help="bytes of a payload: 28700000, 28.7MB (millions), 64KiB (of 1,024 bytes)",
    )
    parser.add_argument(
        "--burst", metavar=f"{value}N", action="append", default=[], help="so many arrive at once (default 1)"
    )
    parser.add_argument(
        "--risk", metavar="SHARE", type=_share, default=1e-4, help="of the puts may find no room (default 0.0001)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_node_argument(parser: argparse.ArgumentParser) -> None:
    """The argument that says which stages run where."""
    parser.add_argument(
        "--node",
        metavar="NAME=STAGE,STAGE",
        action="append",
        default=[],
        help="which stages a node has; give it for each. Without it all are on one",
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.20} is no share between 0 and 1")
    return share


def size(text: str) -> int:
    """Bytes, from ``"28.7MB"`` (powers of 1000) or ``"64KiB"`` (of 1024).

    Raises:
        ValueError: it is something else, may mean bits, or is a fraction of a byte; the message says which.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError("is no size; write bytes as a number, or a unit as in 28.7MB (millions) or 64KiB (of 1,024)")
    digits, unit, byte = found.groups()
    if byte == "b":
        raise ValueError(f"may mean bits or bytes; write {digits}{unit}B for bytes")
    number = float(digits) * _UNITS[unit.lower()]
    if not unit and not number.is_integer():
        raise ValueError(f"is no whole number of bytes; a unit is missing, as in {digits}MB")
    if not number < 1 << 63:
        raise ValueError("is more bytes than there can be")
    if number and not round(number):
        raise ValueError("is less than one byte; write whole bytes, or a larger unit")
    return round(number)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError("is no number from 0 on")
    return number


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("is no whole number from 1 on")
    return number


def loads_of(config: OmniTransferConfig, arguments: argparse.Namespace) -> dict[Edge, Load]:
    """What crosses each edge of a pipeline's file.

    Raises:
        ConfigError: a value cannot be read, names an edge that does not exist, or an edge has none.
    """
    edges = config.edges
    if not edges:
        raise ConfigError(f"{arguments.config}: there is no edge in it")
    rates = _by_edge(config, "--rps", arguments.rps, _number, LARGEST["per_s"])
    holds = _by_edge(config, "--hold-ms", arguments.hold_ms, _number, LARGEST["hold_s"] * 1000)
    sizes = _by_edge(config, "--payload", arguments.payload, size, LARGEST["size"])
    bursts = _by_edge(config, "--burst", ["1", *arguments.burst], _whole, LARGEST["burst"])
    for edge in edges:
        if rates[edge] * holds[edge] > MOST_UNDER_WAY * 1000:
            most = rounded_down(MOST_UNDER_WAY * 1000 / rates[edge])
            raise ConfigError(
                f"--hold-ms: {holds[edge]:g} on edge {edge[0]} -> {edge[1]} keeps more than {MOST_UNDER_WAY:,} of its "
                f"payloads under way; at --rps {rates[edge]:g} the most is {most}"
            )
    return {edge: Load(rates[edge], holds[edge] / 1000, int(sizes[edge]), int(bursts[edge])) for edge in edges}


def _by_edge(
    config: OmniTransferConfig, option: str, texts: Sequence[str], read: Callable[[str], float], most: int
) -> dict[Edge, float]:
    edges = config.edges
    names = _edge_names(config)
    found: dict[Edge, float] = {}
    for text in sorted(texts, key=lambda text: "=" in text):  # what is for all edges comes first
        name, _, value = text.rpartition("=")
        if name and name not in names:
            raise ConfigError(f"{option}: there is no edge {name!r}; there are {', '.join(names)}")
        try:
            number = read(value)
        except ValueError as error:
            raise ConfigError(f"{option}: {value!r:.40} {error}") from None
        if number > most:
            raise ConfigError(f"{option}: {value!r:.40} is too large: the most is {most:,}")
        found.update({names[name]: number} if name else dict.fromkeys(edges, number))
    missing = [f"{start}:{end}" for start, end in edges if (start, end) not in found]
    if missing:
        raise ConfigError(f"{option}: nothing is said about the edges {', '.join(missing)}")
    return found


def _edge_names(config: OmniTransferConfig) -> dict[str, Edge]:
    """Edges as ``from:to``, by the stages' ids and, where a name has only one stage, by their names."""
    called = {stage.id: [stage.id] for stage in config.stages.values()}
    for stage in config.stages.values():
        with contextlib.suppress(ConfigError):
            if stage.label and config.find_stage(stage.label) == stage.id:
                called[stage.id].append(stage.label)
    names = {f"{start}:{end}": (start, end) for start, end in config.edges}
    for start, end in config.edges:
        for one in called[start]:
            for other in called[end]:
                names.setdefault(f"{one}:{other}", (start, end))
    return names


def nodes_of(config: OmniTransferConfig, texts: Sequence[str]) -> dict[str, list[str]]:
    """Ids of the stages by node, from ``NAME=STAGE,STAGE``.

    Raises:
        ConfigError: one reads differently, or names a stage that does not exist.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, stages = text.partition("=")
        if not name or not equals or not stages or name in found:
            raise ConfigError(f"--node: {text!r:.60} does not read NAME=STAGE,STAGE with a name of its own")
        found[name] = [config.find_stage(stage.strip()) for stage in stages.split(",")]
    return found
