"""``omni-fastshm run``: run the stages of a configuration on real input and show what crossed the edges.

What is special about a pipeline stands in its file and in its own Python files; see ``docs/pipeline.md``::

    run:
      load: omni_stages.py:load_requests   # (inputs: Path, count: int) -> iterable of payloads
      write: omni_stages.py:write_wav      # (results: iterable, out: Path) -> None, or a line to print
      inputs: inputs                       # a folder, relative to this file
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_fastshm._figures import EdgeSummary, Spread
from omni_fastshm._pipeline_plan import check_reference
from omni_fastshm._stage_worker import load_target
from omni_fastshm.config import load_omni_transfer_config
from omni_fastshm.config_file import Entries, plain, read_file
from omni_fastshm.errors import ConfigError
from omni_fastshm.pipeline import Pipeline, PipelineStats
from omni_fastshm.settings import Setting, parse_settings

__all__ = ["add_arguments", "main"]

_RUN = {
    "load": Setting("str", None, help="makes the requests"),
    "write": Setting("str", None, help="takes the results"),
    "inputs": Setting("str", "inputs", help="folder of the input files, relative to the configuration"),
    "out": Setting("str", "out.wav", help="file for the results"),
    "requests": Setting("int", 8, minimum=1, help="how many"),
    "max_in_flight": Setting("int", 8, minimum=1, help="how many at a time"),
}


@dataclass(frozen=True)
class Job:
    """What to run besides the stages.

    Args:
        load: makes the requests from the inputs' folder and their number.
        write: takes the results; None when the configuration names nothing.
        inputs: the inputs' folder.
        out: the file for `write`.
        count: how many requests.
        max_in_flight: how many at a time.
    """

    load: Callable[[Path, int], Iterable[Any]]
    write: Callable[[Iterable[Any], Path], Any] | None
    inputs: Path
    out: Path
    count: int
    max_in_flight: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line.

    Args:
        parser: the sub-command's parser.
    """
    parser.add_argument("config", type=Path, help="the pipeline's YAML or JSON file")
    parser.add_argument("--requests", type=_positive, metavar="N", help="how many requests (8)")
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="folder of the input files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results (out.wav)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Run the pipeline; an error is printed as one message.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0, 1 after an error, 130 after Ctrl-C.
    """
    try:
        _run(arguments)
    except KeyboardInterrupt:
        print("omni-fastshm run: interrupted; all stages are stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.verbose:
            traceback.print_exc()
        print(f"omni-fastshm run: {_message(error, verbose=arguments.verbose)}", file=sys.stderr)
        return 1
    return 0


def _message(error: Exception, *, verbose: bool) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ImportError):
        text = f"{text} (while loading the pipeline's Python files)"
    head, mark, _ = text.partition("\n\nTraceback in the stage's process:")
    return text if verbose or not mark else f"{head}\n(--verbose shows the stage's traceback)"


def _run(options: argparse.Namespace) -> None:
    config = load_omni_transfer_config(options.config)
    job = read_job(options)
    pipeline = Pipeline.from_config(config, max_in_flight=job.max_in_flight)
    # The first request is read before anything starts: most mistakes in the inputs show there.
    requests = iter(job.load(job.inputs, job.count))
    first = list(itertools.islice(requests, 1))
    begun = time.perf_counter()
    with pipeline:
        started = time.perf_counter()
        with _progress(job.count) as advance:
            results = _counted(pipeline.run(itertools.chain(first, requests)), advance)
            note = job.write(results, job.out) if job.write else None
            # A writer that stops early must not leave requests unread, nor hide the failure of one.
            count = advance.count + sum(1 for _ in results)
        worked = time.perf_counter() - started
    stats = pipeline.stats()
    print(table(stats))
    print(f"{count} requests in {worked:.2f} s, after {started - begun:.2f} s of start-up")
    if note:
        print(note)
    if options.json:
        figures = {"config": str(options.config), "seconds": worked, "start_up_s": started - begun}
        options.json.write_text(json.dumps({**figures, **stats.as_dict()}, indent=2) + "\n")


def read_job(options: argparse.Namespace) -> Job:
    """The ``run`` section of the configuration, overridden by the command line.

    Raises:
        ConfigError: a part is missing or wrong.
    """
    config: Path = options.config
    content, _ = read_file(config)
    section = content.get("run") if isinstance(content, Entries) else None
    folders = content.folders if isinstance(content, Entries) else {}
    if section is None:
        raise ConfigError(
            f"{config} has no `run` section, so it is not known what to send through it; add\n"
            "  run:\n    load: your_file.py:your_function   # (inputs folder, count) -> iterable of payloads"
        )
    values = parse_settings(f"{config}: run", _RUN, plain(section))
    folder = (folders.get("run") or config.parent).resolve()
    if values["load"] is None:
        raise ConfigError(f"{config}: run.load is missing; write `load: file.py:function` or `module:function`")
    if options.out is not None and values["write"] is None:
        raise ConfigError(f"--out: {config} names no run.write, so there is nothing that could write a file")
    job = Job(
        load=_function(f"{config}: run.load", values["load"], folder),
        write=None if values["write"] is None else _function(f"{config}: run.write", values["write"], folder),
        inputs=options.inputs or folder / values["inputs"],
        out=options.out or Path(values["out"]),
        count=options.requests or values["requests"],
        max_in_flight=values["max_in_flight"],
    )
    if not job.inputs.is_dir():
        raise ConfigError(f"there is no folder {job.inputs} with input files; name one with --inputs")
    for file in [job.out if job.write else None, options.json]:
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    return job


def _function(what: str, reference: str, folder: Path) -> Callable[..., Any]:
    try:
        found = load_target(check_reference(reference, folder))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{what}: {reference} is {found!r}, which cannot be called")
    made: Callable[..., Any] = found
    return made


class _Advance:
    """Counts results and shows each."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.count = 0
        self._show = show

    def __call__(self) -> None:
        self.count += 1
        self._show(self.count)


def _counted(results: Iterator[Any], advance: _Advance) -> Iterator[Any]:
    for result in results:
        advance()
        yield result


def _progress(total: int) -> AbstractContextManager[_Advance]:
    """A bar on a terminal that can show one, else a line for each tenth of the requests; on stderr."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return _bar(total)
    return _lines(total)


@contextmanager
def _bar(total: int) -> Iterator[_Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total)
        yield _Advance(lambda count: progress.update(task, completed=count))


@contextmanager
def _lines(total: int) -> Iterator[_Advance]:
    step = max(1, total // 10)

    def show(count: int) -> None:
        if count % step == 0 or count == total:
            print(f"{count} of {total} requests", file=sys.stderr, flush=True)

    yield _Advance(show)


_HEAD = (
    *("edge", "backend", "payloads", "bytes", "way"),
    *("put µs", "p99", "first", "get µs", "p99", "first", "GB/s"),
)


def table(stats: PipelineStats) -> str:
    """The edges as text: median payload, how it travelled, the times of put and get, and the rate.

    Of the times there are the median, the 99th percentile and, apart from them, that of the first payload.

    Args:
        stats: of a pipeline.

    Returns:
        Aligned lines without a line break at the end.
    """
    rows = [_HEAD, *(_row(edge) for edge in stats.edges)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    left = (0, 1, 4)
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def _row(edge: EdgeSummary) -> tuple[str, ...]:
    rate = edge.gb_per_s
    return (
        f"{edge.from_stage} -> {edge.to_stage}",
        edge.connector.removesuffix("Connector"),
        str(edge.payloads),
        "-" if edge.payload_bytes is None else f"{edge.payload_bytes:,}",
        _way(edge.ways),
        *_times(edge.put_us, edge.first_put_us),
        *_times(edge.get_us, edge.first_get_us),
        "-" if rate is None else f"{rate:.2f}",
    )


def _way(ways: Mapping[str, int]) -> str:
    if len(ways) <= 1:
        return next(iter(ways), "-")
    return ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))


def _times(spread: Spread, first: float | None) -> tuple[str, str, str]:
    return _micros(spread.median), _micros(spread.p99), _micros(first)


def _micros(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
