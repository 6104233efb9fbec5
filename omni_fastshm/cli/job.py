"""The ``run`` section of a pipeline's file: what to send through the pipeline, and what to do with the results.

It can be checked without importing anything, as ``validate`` does, and loaded, as ``run`` does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_fastshm._pipeline_plan import check_reference
from omni_fastshm._stage_worker import describe, load_target, unfit_reason
from omni_fastshm.config_file import Entries, read_file
from omni_fastshm.errors import ConfigError, FastShmError
from omni_fastshm.settings import Setting, check_settings
from omni_fastshm.settings import describe as describe_value

__all__ = ["Job", "JobFailed", "RunSection", "load_job", "read_section"]

_SETTINGS: Mapping[str, Setting] = {
    "load": Setting("str", None, help="makes the requests"),
    "write": Setting("str", None, help="takes the results"),
    "inputs": Setting("str", None, help="folder of the input files, relative to the configuration"),
    "out": Setting("str", None, help="file for the results"),
    "requests": Setting("int", 8, minimum=1, help="how many"),
    "max_in_flight": Setting("int", 8, minimum=1, help="how many at a time"),
}
_CALLED = ("load", "write")


class JobFailed(FastShmError):
    """The user's ``run.load`` or ``run.write`` raised, or made no request."""


@dataclass(frozen=True)
class RunSection:
    """The section as far as it can be read without importing what it names.

    Args:
        values: every setting, also those that are not given.
        folder: what its paths are relative to.
        problems: what is wrong, each with its place.
    """

    values: Mapping[str, Any]
    folder: Path
    problems: tuple[str, ...]


def read_section(config: Path) -> RunSection | None:
    """Read and check the ``run`` section of a file.

    Args:
        config: the pipeline's file.

    Returns:
        The section; None where the file has none, or cannot be read.
    """
    content, _ = read_file(config)
    if not isinstance(content, Entries) or content.get("run") is None:
        return None
    section = content["run"]
    folder = (content.folders["run"] or config.parent).resolve()
    values, wrong = check_settings(_SETTINGS, section)
    for name in _CALLED:
        try:
            if values[name] is not None:
                check_reference(values[name], folder)
        except ConfigError as error:
            wrong.append((name, str(error)))
    if not isinstance(section, Entries):
        text = f"must be a mapping, not {describe_value(section)}"
        wrong = [("", f"run: {text}; write it as in run: {{load: file.py:function}}")]
    elif values["load"] is None and not any(name == "load" for name, _ in wrong):
        wrong.append(("", "run.load is missing; write `load: file.py:function` or `load: module:function`"))
    places = section.places if isinstance(section, Entries) else {}
    here = content.places["run"] or str(config)
    problems = [f"{places.get(name) or here}: {f'run.{name}: ' if name else ''}{text}" for name, text in wrong]
    return RunSection(values, folder, tuple(problems))


@dataclass(frozen=True)
class Job:
    """What to run besides the stages.

    Args:
        load: makes the requests from the inputs' folder and their number.
        write: takes the results; None when the configuration names nothing.
        inputs: the inputs' folder.
        out: the file for `write`; None chooses by the first result, see `out_name`.
        count: how many requests.
        max_in_flight: how many at a time.
        names: what messages call `load` and `write`.
    """

    load: Callable[[Path, int], Iterable[Any]]
    write: Callable[[Iterable[Any], Path], Any] | None
    inputs: Path
    out: Path | None
    count: int
    max_in_flight: int
    names: Mapping[str, str]

    def requests(self) -> Iterator[Any]:
        """What `load` makes, one by one.

        Raises:
            JobFailed: `load` raised, or made nothing.
        """
        made = 0
        try:
            for request in self.load(self.inputs, self.count):
                made += 1
                yield request
        except Exception as error:
            raise JobFailed(f"{self.names['load']}: {describe(error)}") from error
        if not made:
            raise JobFailed(f"{self.names['load']} made no request, so nothing was run")

    def finish(self, results: Iterator[Any]) -> Any:
        """Give the results to `write`.

        Returns:
            What it returned; None where there is none, or no result.

        Raises:
            JobFailed: `write` raised. An error of `results` itself goes through unchanged.
        """
        if self.write is None:
            return None
        watched = _Watched(results)
        first = list(itertools.islice(watched, 1))
        if not first:
            return None
        out = self.out or Path(out_name(first[0]))
        note = None
        try:
            note = self.write(itertools.chain(first, watched), out)
        except Exception as error:
            if watched.error is None:
                raise JobFailed(f"{self.names['write']}: {describe(error)}") from error
        if watched.error is not None:
            raise watched.error
        return note


_SIGNATURES = ((b"\x89PNG\r\n", ".png"), (b"\xff\xd8\xff", ".jpg"), (b"OggS", ".ogg"), (b"fLaC", ".flac"))


def out_name(result: Any) -> str:
    """What to call a file for such results: text, images, bytes by their first ones, plain data; the rest is taken for
    sound."""
    if isinstance(result, str):
        return "out.txt"
    if isinstance(result, (bytes, bytearray)):
        start = bytes(result[:12])
        if start[:4] == b"RIFF" and start[8:] == b"WAVE":
            return "out.wav"
        return "out" + next((suffix for signature, suffix in _SIGNATURES if start.startswith(signature)), ".bin")
    if type(result).__module__.partition(".")[0] == "PIL":
        return "out.png"
    return "out.json" if _is_plain(result) else "out.wav"


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


class _Watched:
    """An iterator that remembers its own error: what `write` makes of it says nothing about `write`."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.error: Exception | None = None
        self._items = items

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


def load_job(config: Path, *, requests: int | None = None, inputs: Path | None = None, out: Path | None = None) -> Job:
    """Load what the ``run`` section names.

    Args:
        config: the pipeline's file.
        requests: how many; None takes what the file says. So do the others.
        inputs: folder of the input files.
        out: file for the results.

    Returns:
        The job.

    Raises:
        ConfigError: a part is missing or wrong.
    """
    section = read_section(config)
    if section is None:
        raise ConfigError(
            f"{config} has no `run` section, so it is not known what to send through it; add\n"
            "  run:\n    load: your_file.py:your_function   # (inputs folder, count) -> iterable of payloads"
        )
    if section.problems:
        raise ConfigError("\n".join(section.problems))
    values, folder = section.values, section.folder
    if out is not None and values["write"] is None:
        raise ConfigError(f"--out: {config} names no run.write, so there is nothing that could write a file")
    names = {name: f"run.{name} ({values[name]})" for name in _CALLED}
    functions = {name: _function(names[name], values[name], folder) for name in _CALLED if values[name] is not None}
    job = Job(
        load=functions["load"],
        write=functions.get("write"),
        inputs=inputs or folder / (values["inputs"] or "inputs"),
        out=out or (Path(values["out"]) if values["out"] is not None else None),
        count=requests or values["requests"],
        max_in_flight=values["max_in_flight"],
        names=names,
    )
    # A folder that nobody asked for need not be there: `load` may make its requests from nothing.
    if (inputs or values["inputs"]) and not job.inputs.is_dir():
        raise ConfigError(f"there is no folder {job.inputs} with input files; name one with --inputs")
    return job


def _function(what: str, reference: str, folder: Path) -> Callable[..., Any]:
    try:
        found = load_target(check_reference(reference, folder))
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {describe(error)}") from error
    reason = unfit_reason(found)
    if reason:
        raise ConfigError(f"{what} cannot be called: {reason}")
    made: Callable[..., Any] = found
    return made
