"""Stage functions of the pipeline tests. Only NumPy is imported, and only where needed: a stage starts fast."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def same(value: Any) -> Any:
    return value


def add_one(value: int) -> int:
    return value + 1


def double(value: int) -> int:
    return value * 2


def grow(value: dict[str, Any]) -> dict[str, Any]:
    """Adds the stage's process to the trail, and one to every element, in place: the memory is the stage's own."""
    value["array"] += 1
    return {"array": value["array"], "trail": [*value["trail"], os.getpid()]}


def fail_on_five(value: int) -> int:
    if value == 5:
        raise ValueError("five is right out")
    return value


def fail_always(value: int) -> int:
    raise ValueError("nothing will do")


def leave_on_five(value: int) -> int:
    if value == 5:
        raise SystemExit(3)
    return value


def make_megabytes(value: int) -> bytes:
    return bytes(value << 20)


def make_uncarriable(value: int) -> Any:
    return {"fine": 1, "deep": [object()]} if value == 1 else value


def count_up(value: int) -> Iterator[int]:
    yield from range(value)


def count_and_fail(value: int) -> Iterator[int]:
    yield from range(value)
    raise ValueError("in the middle of a stream")


def process_of(value: Any) -> tuple[Any, int]:
    return value, os.getpid()


def identity_of(value: Any) -> tuple[int, int]:
    return id(value["object"]), value["id"]


def with_identity(value: Any) -> dict[str, Any]:
    made = [value]
    return {"object": made, "id": id(made)}


def wait_for_line(path: str) -> str:
    """Says on the first line of `path` that it waits, and returns what comes from ``path + '.go'``."""
    with open(path, "w") as told:
        told.write(f"{os.getpid()}\n")
    with open(f"{path}.go") as gate:
        return gate.readline()


def fork_a_sleeper(value: Any) -> int:
    """Starts a process that holds copies of all this one's pipes, and gives its id."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


class Gate:
    """Stands at a gate with what it was given, as `wait_for_line` does."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, value: Any) -> str:
        return wait_for_line(self.path)


class Counter:
    """Counts its calls; one instance for all of them."""

    def __init__(self, start: int = 0, diary: str | None = None) -> None:
        self.count = start
        self.diary = diary

    def __call__(self, value: Any) -> int:
        self.count += 1
        return self.count

    def close(self) -> None:
        if self.diary:
            Path(self.diary).write_text(f"closed after {self.count}")


class NeedsWhatIsMissing:
    def __init__(self) -> None:
        import no_such_module_anywhere  # type: ignore[import-not-found] # noqa: F401

    def __call__(self, value: Any) -> Any:
        return value


class NeverReady:
    def __init__(self) -> None:
        threading.Event().wait()

    def __call__(self, value: Any) -> Any:
        return value


class NotCallable:
    pass


async def asynchronous(value: Any) -> Any:
    return value


def load_numbers(inputs: Path, count: int) -> Iterator[int]:
    start = int((inputs / "start.txt").read_text())
    yield from range(start, start + count)


def write_numbers(results: Any, out: Path) -> str:
    numbers = list(results)
    out.write_text(" ".join(map(str, numbers)))
    return f"{len(numbers)} numbers in {out.name}"


def load_none(inputs: Path, count: int) -> list[int]:
    return []


def load_badly(inputs: Path, count: int) -> list[int]:
    raise KeyError("loader broken")


def load_one_and_fail(inputs: Path, count: int) -> Iterator[int]:
    yield 1
    raise KeyError("loader broken")


def load_uncarriable(inputs: Path, count: int) -> list[Any]:
    return [1, {"deep": [object()]}, 2]


def load_from_nothing(inputs: Path, count: int) -> Iterator[int]:
    yield from range(count)


def write_badly(results: Any, out: Path) -> None:
    raise KeyError("writer broken")


def write_renaming_errors(results: Any, out: Path) -> None:
    try:
        list(results)
    except Exception as error:
        raise RuntimeError("something was wrong") from error


def write_swallowing_errors(results: Any, out: Path) -> None:
    with contextlib.suppress(Exception):
        list(results)
