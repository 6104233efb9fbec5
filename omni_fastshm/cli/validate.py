"""``omni-fastshm validate``: a pipeline's edges as a table, and every problem of its file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_fastshm.config import OmniTransferConfig, StageSpec, inspect_transfer_config

__all__ = ["add_arguments", "main"]

_HEADER = ("FROM", "TO", "CONNECTOR", "DEFINED AT", "SETTINGS")
_RED, _YELLOW, _PLAIN = "\033[31m", "\033[33m", "\033[0m"
_SHORT = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.add_argument("config", metavar="CONFIG", help="a pipeline's YAML or JSON file")


def main(arguments: argparse.Namespace) -> int:
    """Check one file and print what it says.

    Args:
        arguments: with `config`, the path.

    Returns:
        0 where the file is fine, also with warnings; 1 where it has problems.
    """
    config, problems = inspect_transfer_config(arguments.config)
    lines = [f"{arguments.config}: {_count(len(config.stages), 'stage')}, {_count(len(config.edges), 'edge')}"]
    if config.edges:
        lines += ["", *_table(config), ""]
    elif not problems:
        lines.append("nothing is configured: no edge, no connector")
    lines += [f"{_colour('warning', _YELLOW)}: {_printable(text)}" for text in config.warnings]
    lines += [f"{_colour('problem', _RED)}: {_printable(text)}" for text in problems]
    lines.append(_count(len(problems), "problem") if problems else "ok")
    print("\n".join(lines))
    return 1 if problems else 0


def _table(config: OmniTransferConfig) -> list[str]:
    rows: list[Sequence[str]] = [_HEADER]
    for (start, end), spec in config.connectors.items():
        rows.append(
            (
                _title(config.stages[start]),
                _title(config.stages[end]),
                _printable(spec.name),
                _origin(config, (start, end)),
                _settings(spec.extra),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _title(stage: StageSpec) -> str:
    """The stage's id, with the name that hosts give it where there is one."""
    engine = stage.raw.get("engine_args")
    name = stage.raw.get("name") or (engine.get("model_stage") if isinstance(engine, Mapping) else None)
    return _printable(f"{stage.id} ({name})" if isinstance(name, str) else stage.id)


def _settings(extra: Mapping[str, Any]) -> str:
    texts = []
    for key, value in extra.items():
        if value is None:
            continue
        text = f"{key}={value}"
        texts.append(text if len(text) <= _SHORT else text[: _SHORT - 3] + "...")
    return _printable(", ".join(texts)) or "-"


def _origin(config: OmniTransferConfig, edge: tuple[str, str]) -> str:
    """The place without its folder; inherited files keep their own name."""
    place, _, path = config.origins[edge].rpartition(": ")
    return _printable(f"{Path(place).name} {path}" if place else path)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _printable(text: str) -> str:
    """`text` on one line: a file must not be able to move the cursor of whoever checks it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _colour(text: str, colour: str) -> str:
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"{colour}{text}{_PLAIN}" if wanted else text
