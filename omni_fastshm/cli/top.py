"""``omni-fastshm top``: a running namespace, live. Reads shared memory from outside; no process notices."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_fastshm.cli.text import add_namespace_argument, count, human_bytes, human_seconds, printable
from omni_fastshm.errors import ConfigError
from omni_fastshm.watching import EdgeView, EndpointView, Look, Names, RingView, View, compare, edge_names, look

__all__ = ["add_arguments", "main"]

FORMAT = 1  # of the JSON; changes when a key changes its meaning or goes

_NOTE = """Keys: q or Ctrl-C ends. docs/top.md explains the screen and the JSON. Rates are what happened since the last
look; what an edge has of its producer's rate is estimated from the latest payloads.
"""
_STEPS = " ▁▂▃▄▅▆▇█"
_RED, _YELLOW, _GREEN, _DIM = "bold red", "yellow", "green", "dim"

Line = list[tuple[str, str]]
"""Pieces of a line with their style."""
Titles = Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_namespace_argument(parser)
    parser.add_argument("--config", metavar="FILE", type=Path, help="a pipeline's file: shows its edges by name")
    parser.add_argument("--interval", metavar="SECONDS", type=_interval, default=1.0, help="between looks (default 1)")
    parser.add_argument("--once", action="store_true", help="look twice, one interval apart, print, and end")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each interval")


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r:.20} is no number of seconds from 0.05 to 3600")
    return seconds


def main(arguments: argparse.Namespace) -> int:
    """Show a namespace until somebody ends it.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0.

    Raises:
        SegmentError: there is no shm mount.
        ConfigError: the pipeline's file cannot be read, or the live view lacks a terminal or the package ``rich``.
    """
    names, titles = _names(arguments.config)
    if not arguments.once and not arguments.json:
        return _live(arguments, names, titles)
    before = look(arguments.namespace)
    while True:
        time.sleep(arguments.interval)
        now = look(arguments.namespace)
        view = compare(before, now, names)
        if arguments.json:
            print(json.dumps({"format": FORMAT, **view.as_dict()}), flush=True)
        else:
            print("\n".join("".join(text for text, _ in line).rstrip() for line in render(view, titles)))
        if arguments.once:
            return 0
        before = now


def _names(path: Path | None) -> tuple[Names, Titles]:
    """Edges by their hash, also where processes call a stage by its name, and what the screen calls each stage."""
    if path is None:
        return {}, {}
    from omni_fastshm.config import load_omni_transfer_config

    config = load_omni_transfer_config(path)
    called = {stage.id: [stage.id] for stage in config.stages.values()}
    for stage in config.stages.values():
        with contextlib.suppress(ConfigError):  # the name of several
            if stage.label and config.find_stage(stage.label) == stage.id:
                called[stage.id].append(stage.label)
    found = dict(edge_names(config.edges))
    for edge in config.edges:
        for hashed in edge_names([(one, other) for one in called[edge[0]] for other in called[edge[1]]]):
            found.setdefault(hashed, edge)
    titles = {stage.id: f"{stage.id} ({stage.label})" for stage in config.stages.values() if stage.label}
    return found, titles


def _live(arguments: argparse.Namespace, names: Names, titles: Titles) -> int:
    if not sys.stdout.isatty():
        raise ConfigError("top: the live view needs a terminal; --once and --json do not", op="top")
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise ConfigError(
            "top: the live view needs the package rich; pip install 'omni-fastshm[cli]' brings it, --once and --json "
            "work without",
            op="top",
        ) from None

    def screen(view: View) -> Text:
        lines = render(view, titles)[: max(console.size.height - 1, 1)]
        text = Text(no_wrap=True, overflow="crop")
        for line in lines:
            for piece, style in line:
                text.append(piece, style)
            text.append("\n")
        return text

    console = Console()
    before: Look = look(arguments.namespace)
    with _keys() as quit_pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        now = look(arguments.namespace)
        while True:
            live.update(screen(compare(before, now, names)), refresh=True)
            if quit_pressed(arguments.interval):
                return 0
            before, now = now, look(arguments.namespace)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds and says whether q was pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    old = termios.tcgetattr(fd)

    def pressed(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                typed = os.read(fd, 64)
                if not typed or b"q" in typed.lower():
                    return True
        return False

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, old)


# -- the screen


def render(view: View, titles: Titles | None = None) -> list[Line]:
    """Lines of the screen, from top to bottom.

    Args:
        view: what to show.
        titles: what to call a stage, by its id; others are called by their id.
    """
    where = "all namespaces" if view.namespace is None else f"namespace {view.namespace}"
    free = f"{human_bytes(view.free)} of {human_bytes(view.size)} free" if view.size else "no size limit"
    lines: list[Line] = [[(f"omni-fastshm top   {where}   {view.mount}: {free}   last {view.seconds:.1f} s", "bold")]]
    if not view.endpoints:
        lines += [[], [("no producer: nothing was put through shared memory, or all have closed", _DIM)]]
    for endpoint in view.endpoints:
        lines += [[], *_producer(endpoint, titles or {})]
    if view.oddities:
        kinds = ", ".join(sorted({each.kind for each in view.oddities}))
        lines += [[], [(f"also there: {count(len(view.oddities), 'name')} ({kinds}): see omni-fastshm ls", _DIM)]]
    return lines


def _producer(each: EndpointView, titles: Titles) -> list[Line]:
    state = f"{each.state} {human_seconds(each.age_s)}"
    if each.orphan_left_s is not None:
        state += f", keeps {human_seconds(each.orphan_left_s)}"
    head: Line = [
        (f"{each.namespace} {each.endpoint}", "bold"),
        (f"  pid {each.pid}  ", ""),
        (state, _GREEN if each.state == "alive" else _RED),
        (f"   {_rate(each.puts_per_s)} puts/s  {human_bytes(each.bytes_per_s)}/s  {each.puts} in all", ""),
    ]
    if each.puts_wait:
        head.append(("   PUTS WAIT FOR ROOM", _RED))
    oldest = "" if each.oldest_s is None else f", oldest {human_seconds(each.oldest_s)}"
    load: Line = [
        (f"  pending {each.pending}{oldest}", _YELLOW if (each.oldest_s or 0) > 10 else ""),
        (f"   held {each.held}   memory {human_bytes(each.memory)}", ""),
    ]
    return [head, load, *map(_bar, each.rings), *(_edge(edge, titles) for edge in each.edges), _readers(each)]


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _bar(ring: RingView) -> Line:
    share = ring.used / ring.length if ring.length else 0.0
    cells = "".join(_STEPS[0 if not cell else max(1, round(cell * (len(_STEPS) - 1)))] for cell in ring.cells)
    style = _RED if share > 0.9 else _YELLOW if share > 0.7 else _GREEN
    figures = f"{share:4.0%}  {human_bytes(ring.used)} of {human_bytes(ring.length)}"
    return [(f"  d{ring.number:<3}", ""), ("|", _DIM), (cells, style), ("|", _DIM), (f" {figures}", "")]


def _edge(edge: EdgeView, titles: Titles) -> Line:
    name = edge.edge
    if edge.from_stage is not None and edge.to_stage is not None:
        name = f"{titles.get(edge.from_stage, edge.from_stage)} -> {titles.get(edge.to_stage, edge.to_stage)}"
    return [
        (f"  edge {printable(name)}", "cyan"),
        (f"   ~{_rate(edge.puts_per_s)}/s   pending {edge.pending}   held {edge.held}", ""),
        (f"   {human_bytes(edge.bytes)}   last {human_seconds(edge.last_s)} ago", ""),
    ]


def _readers(each: EndpointView) -> Line:
    if not each.readers:
        return [("  no reader yet", _DIM)]
    line: Line = [("  readers ", "")]
    for number, reader in enumerate(each.readers):
        holds = f" holds {reader.blocks}" if reader.blocks else ""
        text = f"{reader.pid}{'' if reader.alive else ' dead'}{holds}"
        line += [(", " if number else "", ""), (text, "" if reader.alive else _RED)]
    return line
