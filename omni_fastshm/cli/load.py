"""What `plan` and `simulate` are told about the traffic of a pipeline."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_fastshm.config import OmniTransferConfig
from omni_fastshm.errors import ConfigError
from omni_fastshm.sizing import Edge, Load

__all__ = ["add_load_arguments", "loads_of", "nodes_of", "size"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


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
        help="bytes of a payload: 28700000, 28.7MB, 64KiB",
    )
    parser.add_argument(
        "--burst", metavar=f"{value}N", action="append", default=[], help="so many arrive at once (default 1)"
    )
    parser.add_argument(
        "--risk", metavar="SHARE", type=_share, default=1e-4, help="of the puts may find no room (default 0.0001)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


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
        ValueError: it is something else.
    """
    lower = text.strip().lower().removesuffix("b").rstrip()
    digits = lower.rstrip("kmgi")
    number = float(digits) * _UNITS[lower[len(digits) :].strip()]
    if not 0 <= number < 1 << 63:
        raise ValueError(text)
    return int(number)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def loads_of(config: OmniTransferConfig, arguments: argparse.Namespace) -> dict[Edge, Load]:
    """What crosses each edge of a pipeline's file.

    Raises:
        ConfigError: a value cannot be read, names an edge that does not exist, or an edge has none.
    """
    edges = config.edges
    if not edges:
        raise ConfigError(f"{arguments.config}: there is no edge in it")
    rates = _by_edge(edges, "--rps", arguments.rps, _number)
    holds = _by_edge(edges, "--hold-ms", arguments.hold_ms, _number)
    sizes = _by_edge(edges, "--payload", arguments.payload, size)
    bursts = _by_edge(edges, "--burst", ["1", *arguments.burst], _whole)
    return {edge: Load(rates[edge], holds[edge] / 1000, int(sizes[edge]), int(bursts[edge])) for edge in edges}


def _by_edge(
    edges: Sequence[Edge], option: str, texts: Sequence[str], read: Callable[[str], float]
) -> dict[Edge, float]:
    names = {f"{start}:{end}": (start, end) for start, end in edges}
    found: dict[Edge, float] = {}
    for text in sorted(texts, key=lambda text: "=" in text):  # what is for all edges comes first
        name, _, value = text.rpartition("=")
        if name and name not in names:
            raise ConfigError(f"{option}: there is no edge {name!r}; there are {', '.join(names)}")
        try:
            number = read(value)
        except (ValueError, KeyError):
            raise ConfigError(f"{option}: {value!r:.40} cannot be used") from None
        found.update({names[name]: number} if name else dict.fromkeys(edges, number))
    missing = [f"{start}:{end}" for start, end in edges if (start, end) not in found]
    if missing:
        raise ConfigError(f"{option}: nothing is said about the edges {', '.join(missing)}")
    return found


def nodes_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Stages by node, from ``NAME=STAGE,STAGE``.

    Raises:
        ConfigError: one reads differently.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, stages = text.partition("=")
        if not name or not equals or not stages or name in found:
            raise ConfigError(f"--node: {text!r:.60} does not read NAME=STAGE,STAGE with a name of its own")
        found[name] = [stage.strip() for stage in stages.split(",")]
    return found
