"""Builds and runs the C harnesses: plain, under AddressSanitizer and UBSan, under ThreadSanitizer, on a model."""

from __future__ import annotations

import functools
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
COMPILER = "gcc"
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
VARIANTS = {
    "plain": [],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "tsan": ["-fsanitize=thread"],
    "model": [],
}
HARNESSES = ("layout", "ring", "block", "keys", "wait", "choice", "copy", "directory", "orderings", "stress")
CASES = [(h, v) for h in HARNESSES for v in ("plain", "asan", "tsan")] + [("model", "model")]
CORE = ("hash", "layout", "segment", "wait", "ring", "block", "keys", "directory", "choice", "copy")
ON_MODEL = ("layout", "wait", "block", "keys", "directory")


@dataclass
class Outcome:
    """How a harness ended; `ok` is all that counts, `output` is for people."""

    ok: bool
    output: str


def run(
    harness: str,
    variant: str,
    src: Path,
    out: Path,
    *,
    replaced: Mapping[str, Path] | None = None,
    seconds: float = 150.0,
) -> Outcome:
    """Build a harness against the core in `src` and run it.

    Args:
        harness: name of the C file without its end.
        variant: one of `VARIANTS`.
        src: the core's sources.
        out: where objects and programs go; objects are made once per folder.
        replaced: other files to use for parts of the core, by the part's file name.
        seconds: the harness may not take longer.
    """
    built = _build(harness, variant, src, out, replaced or {})
    if isinstance(built, Outcome):
        return built
    command = [str(built)]
    if variant == "tsan" and shutil.which("setarch"):
        # Where addresses are more random than ThreadSanitizer's shadow memory allows, it refuses to start.
        command = ["setarch", platform.machine(), "-R", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, errors="replace")
    except subprocess.TimeoutExpired as late:
        return Outcome(False, f"{harness} ({variant}) hangs after {seconds} s\n{late.stdout!r}\n{late.stderr!r}")
    return Outcome(
        done.returncode == 0, f"{harness} ({variant}) ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )


def _build(harness: str, variant: str, src: Path, out: Path, replaced: Mapping[str, Path]) -> Path | Outcome:
    model = harness == "model"
    include = [HERE / "model", _without_atomics(src, out)] if model else [src]
    parts = [replaced.get(f"ofs_{part}.c", include[-1] / f"ofs_{part}.c") for part in (ON_MODEL if model else CORE)]
    parts += [HERE / f"{harness}.c", *([HERE / "model" / "memory.c"] if model else [])]
    flags = (*FLAGS, *VARIANTS[variant], *(f"-I{path}" for path in (*include, HERE)))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda part: _object(part, flags, out), parts))
    for made in objects:
        if isinstance(made, Outcome):
            return made
    name = "-".join([harness, variant, *(path.parent.name for path in replaced.values())])
    linked = _call([COMPILER, *VARIANTS[variant], *map(str, objects), "-o", str(out / name), "-lpthread"])
    return out / name if linked.ok else linked


@functools.cache
def _without_atomics(src: Path, out: Path) -> Path:
    """A copy of the core where the real header is not: a quoted include looks beside the including file first."""
    copied = out / "model-src"
    copied.mkdir(parents=True, exist_ok=True)
    for file in [*src.glob("ofs_*.c"), *src.glob("ofs_*.h")]:
        if file.name != "ofs_atomic.h":
            shutil.copy(file, copied)
    return copied


@functools.cache
def _object(source: Path, flags: tuple[str, ...], out: Path) -> Path | Outcome:
    digest = hashlib.sha256(f"{source} {flags}".encode()).hexdigest()[:16]
    target = out / f"{source.stem}-{digest}.o"
    made = _call([COMPILER, *flags, "-c", str(source), "-o", str(target)])
    return target if made.ok else made


def _call(command: list[str]) -> Outcome:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return Outcome(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
