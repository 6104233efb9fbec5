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
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from omni_fastshm._figures import EdgeSummary, Spread
from omni_fastshm._stage_worker import describe
from omni_fastshm.cli.job import JobFailed, load_job
from omni_fastshm.config import load_omni_transfer_config
from omni_fastshm.errors import ConfigError, FastShmError
from omni_fastshm.pipeline import Pipeline, PipelineStats

__all__ = ["add_arguments", "main"]

_EXAMPLE = """example:
  omni-fastshm run examples/qwen2_5_omni.yaml --requests 2 --out answer.wav

After an error, --verbose shows the tracebacks. docs/pipeline.md tells what the file's `run` section has to say.
"""


_TOLD = 20  # failed requests, one by one


def _head(text: str) -> str:
    """What failed, without the traceback of the stage."""
    return text.partition("\n\nTraceback in the stage's process:")[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the pipeline's YAML or JSON file")
    parser.add_argument("--requests", type=_positive, metavar="N", help="how many requests (8)")
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="folder of the input files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results (by what they are: out.txt, …)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of an error")


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
        0, 1 after an error or when a request failed, 130 after Ctrl-C.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("omni-fastshm run: interrupted; all stages are stopped", file=sys.stderr)
        return 130
    except Exception as error:
        text = str(error) if isinstance(error, FastShmError) else describe(error)
        head, in_stage = _head(text), _head(text) != text
        if arguments.verbose:
            traceback.print_exc()
        elif in_stage or isinstance(error, JobFailed) or not isinstance(error, FastShmError):
            head += " (--verbose for the traceback)"
        print(f"omni-fastshm run: {head}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    config = load_omni_transfer_config(options.config)
    job = load_job(options.config, requests=options.requests, inputs=options.inputs, out=options.out)
    if job.write and job.out:
        _check_file("--out", job.out)
    if options.json:
        _check_file("--json", options.json)
    pipeline = Pipeline.from_config(config, max_in_flight=job.max_in_flight)
    # The first request is read before anything starts: most mistakes in the inputs show there.
    requests = job.requests()
    first = list(itertools.islice(requests, 1))
    begun = time.perf_counter()
    with pipeline:
        started = time.perf_counter()
        with _progress(job.count) as advance:
            failures = _Failures(verbose=options.verbose)
            answers = pipeline.run(itertools.chain(first, requests), on_error="return")
            results = _good(answers, advance, failures)
            note = job.finish(results)
            for _ in results:  # a writer that stops early must not leave requests unread, nor hide the failure of one
                pass
        worked = time.perf_counter() - started
    stats = pipeline.stats()
    print(table(stats))
    failed = f", {failures.count} of them failed" if failures.count else ""
    print(f"{advance.count} requests{failed} in {worked:.2f} s, after {started - begun:.2f} s of start-up")
    if note:
        print(note)
    if options.json:
        figures = {"config": str(options.config), "seconds": worked, "start_up_s": started - begun}
        options.json.write_text(json.dumps({**figures, **stats.as_dict()}, indent=2) + "\n")
    failures.conclude(advance.count)
    return 1 if failures.count else 0


def _check_file(option: str, file: Path) -> None:
    """An output file that cannot be written would be noticed only after all the work."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option}: {file} cannot be written: there is no folder {folder}")
    if file.is_dir():
        raise ConfigError(f"{option}: {file} is a folder; name a file in it")


class _Advance:
    """Counts results and shows each."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.count = 0
        self._show = show

    def __call__(self) -> None:
        self.count += 1
        self._show(self.count)


class _Failures:
    """Tells of requests that failed, each when its turn comes, so that the others can go on."""

    def __init__(self, *, verbose: bool) -> None:
        self.count = 0
        self._verbose = verbose

    def tell(self, error: Exception) -> None:
        self.count += 1
        if self.count > _TOLD:
            return
        text = str(error) if isinstance(error, FastShmError) else describe(error)
        print(f"omni-fastshm run: {text if self._verbose else _head(text)}", file=sys.stderr, flush=True)

    def conclude(self, count: int) -> None:
        if not self.count:
            return
        rest = f", of which the first {_TOLD} are told" if self.count > _TOLD else ""
        hint = "" if self._verbose else " (--verbose for the tracebacks)"
        print(f"omni-fastshm run: {self.count} of {count} requests failed{rest}{hint}", file=sys.stderr)


def _good(answers: Iterator[Any], advance: _Advance, failures: _Failures) -> Iterator[Any]:
    """The results, without the requests that failed."""
    for answer in answers:
        advance()
        if isinstance(answer, Exception):
            failures.tell(answer)
        else:
            yield answer


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
    *("put µs", "put p99", "put first", "get µs", "get p99", "get first", "GB/s"),
)
_LEGEND = (
    "bytes: median size. put, get: median time in µs, with the 99th percentile (of fewer than 100 payloads that is\n"
    "the slowest) and, apart from both, the first payload's time, which also makes the shared memory.\n"
    "GB/s: median size over median put plus median get."
)


def table(stats: PipelineStats) -> str:
    """The edges as text, with a legend below: sizes, how they travelled, the times of put and get, and the rate.

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
    return "\n".join([lines[0], rule, *lines[1:], "", _LEGEND])


def _row(edge: EdgeSummary) -> tuple[str, ...]:
    rate = edge.gb_per_s
    return (
        f"{edge.from_stage} -> {edge.to_stage}",
        edge.connector.removesuffix("Connector"),
        str(edge.payloads),
        "-" if edge.payload_bytes is None else f"{edge.payload_bytes:,}",
        _way(edge.ways),
        *_times(edge, edge.put_us, edge.first_put_us),
        *_times(edge, edge.get_us, edge.first_get_us),
        "-" if rate is None else _rate(rate),
    )


def _rate(value: float) -> str:
    """At least two digits that count: small payloads over a network come to thousandths."""
    return f"{value:.{max(2, 1 - math.floor(math.log10(value)))}f}"


def _way(ways: Mapping[str, int]) -> str:
    if len(ways) <= 1:
        return next(iter(ways), "-")
    return ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))


def _times(edge: EdgeSummary, spread: Spread, first: float | None) -> tuple[str, str, str]:
    return _micros(spread.median), _micros(spread.p99), _micros(first)


def _micros(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
