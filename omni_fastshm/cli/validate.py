"""``omni-fastshm validate``: a pipeline's edges as a table, and every problem of its file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_fastshm._pipeline_plan import check_stages, stage_entries
from omni_fastshm.cli.job import read_section
from omni_fastshm.config import OmniTransferConfig, StageSpec, inspect_transfer_config
from omni_fastshm.config_check import find_circle
from omni_fastshm.factory import OmniConnectorFactory

__all__ = ["add_arguments", "main"]

_EXAMPLE = """example:
  omni-fastshm validate examples/qwen2_5_omni.yaml

What the file says about functions is checked when it has a `run` section or an `fn`, without importing them.
docs/configuration.md describes the file, docs/pipeline.md its functions.
"""
_HEADER = ("FROM", "TO", "CONNECTOR", "DEFINED AT", "SETTINGS")
_RED, _YELLOW, _PLAIN = "\033[31m", "\033[33m", "\033[0m"
_SHORT = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the pipeline's YAML or JSON file")
    parser.add_argument("--strict", action="store_true", help="warnings are problems: they fail, too")


def main(arguments: argparse.Namespace) -> int:
    """Check one file and print what it says.

    Args:
        arguments: with `config`, the path, and `strict`.

    Returns:
        0 where the file is fine, also with warnings unless `strict`; 1 where it has problems.
    """
    config, problems = inspect_transfer_config(arguments.config)
    section = read_section(arguments.config)
    runnable = section is not None or any("fn" in stage.places for stage in config.stages.values())
    warnings = list(config.warnings)
    if runnable:
        # No stages at all is a problem of its own only where nothing else says why.
        problems += _function_problems(config) if config.stages or not problems else []
        problems += section.problems if section else ()
    else:
        circle = find_circle(config.stages, config.edges)
        warnings += [f"the edges form a circle, which `run` refuses: {' -> '.join(circle)}"] if circle else []
    if arguments.strict:
        problems, warnings = problems + warnings, []
    lines = [f"{arguments.config}: {_count(len(config.stages), 'stage')}, {_count(len(config.edges), 'edge')}"]
    if config.edges:
        lines += ["", *_table(config), ""]
    elif not problems:
        lines.append("nothing is configured: no edge, no connector")
    lines += [f"note: {_printable(text)}" for text in _notes(config)]
    lines += [f"{_colour('warning', _YELLOW)}: {_printable(text)}" for text in warnings]
    lines += [f"{_colour('problem', _RED)}: {_printable(text)}" for text in problems]
    lines.append(_count(len(problems), "problem") if problems else _verdict(config, warnings, runnable=runnable))
    print("\n".join(lines))
    return 1 if problems else 0


def _verdict(config: OmniTransferConfig, warnings: list[str], *, runnable: bool) -> str:
    good = f"ok, with {_count(len(warnings), 'warning')}" if warnings else "ok"
    if runnable or not config:
        return good
    return f"{'edges' if config.edges else 'stages'} {good}; functions not checked"


def _notes(config: OmniTransferConfig) -> list[str]:
    names = dict.fromkeys(spec.name for spec in config.connectors.values())
    return [
        f"{name} is what vllm-omni knows our {here} by, where our plugin is installed: "
        f"`omni-fastshm doctor --vllm-omni` shows whether it is. Outside vllm-omni the name stands for {here}"
        for name in names
        if (here := OmniConnectorFactory.name_here(name)) is not None
    ]


def _function_problems(config: OmniTransferConfig) -> list[str]:
    # An `fn` that was refused has its problem already.
    entries = [entry for entry in stage_entries(config) if entry.function is not None or "fn" not in entry.places]
    if config.stages and not entries:
        return []
    names = {entry.name for entry in entries}
    return check_stages(entries, [edge for edge in config.edges if names.issuperset(edge)])[1]


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
    return _printable(f"{stage.id} ({stage.label})" if stage.label else stage.id)


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
