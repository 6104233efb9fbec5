"""Builds and runs control.c: with libFuzzer where clang has it, else with gcc and a seeded source of inputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from fuzz.runner import Batch, Finding

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
CORE = ("layout", "wait", "block", "keys", "directory")
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wshadow",
    "-Werror",
    "-fno-omit-frame-pointer",
]
CHECKS = "address,undefined"
MISSING = "no libFuzzer: needs clang and its runtime (Debian: clang, libclang-rt-14-dev)"


def kept() -> list[bytes]:
    """The kept inputs, one in hexadecimal per line: together they reach all of the core that was ever reached."""
    return [bytes.fromhex(line) for line in (HERE / "corpus" / "control.txt").read_text().split()]


def unpack(folder: Path) -> list[str]:
    """The kept inputs as files, as both programs want them."""
    folder.mkdir()
    for number, content in enumerate(kept()):
        (folder / f"{number:03}").write_bytes(content)
    return sorted(map(str, folder.iterdir()))


def has_libfuzzer() -> bool:
    """Can a program be linked with libFuzzer here?"""
    if shutil.which("clang") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n ? 0 : 0; }\n")
        command = ["clang", f"-fsanitize=fuzzer,{CHECKS}", str(source), "-o", f"{folder}/empty"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build(folder: Path, *, libfuzzer: bool, src: Path = SRC) -> Path:
    """The program.

    Args:
        folder: where it goes.
        libfuzzer: with clang and libFuzzer, else with gcc.
        src: the core's sources.
    """
    program = folder / ("libfuzzer" if libfuzzer else "seeded")
    engine = (
        ["clang", "-DWITH_LIBFUZZER", f"-fsanitize=fuzzer,{CHECKS}"] if libfuzzer else ["gcc", f"-fsanitize={CHECKS}"]
    )
    parts = [str(src / f"ofs_{part}.c") for part in CORE]
    command = [
        *engine,
        *FLAGS,
        "-fno-sanitize-recover=all",
        f"-I{src}",
        *parts,
        str(HERE / "control.c"),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return program


def run(program: Path, folder: Path, batch: Batch, seconds: float) -> Batch:
    """Run the program for `batch.count` inputs or that many seconds.

    Args:
        program: as built.
        folder: for the corpus and for the input that made it crash.
        batch: filled in and returned.
        seconds: after that it ends by itself, or is ended when it hangs.
    """
    files = unpack(folder / "corpus")
    last = folder / "last"
    if program.name == "libfuzzer":
        command = [str(program), f"-runs={batch.count}", f"-max_total_time={max(1, int(seconds))}",
                   f"-seed={batch.seed}",
                   # Not its limit of resident memory: the kernel counts that of the process that started it as well.
                   "-max_len=256", "-timeout=20", "-rss_limit_mb=0", "-malloc_limit_mb=512",
                   f"-exact_artifact_path={last}",
                   str(folder / "corpus")]  # fmt: skip
    else:
        command = [str(program), str(batch.seed), str(batch.count), str(int(seconds)), str(last), *files]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + 60,
            check=False,
            env={**os.environ, "ASAN_OPTIONS": "handle_abort=1"},
        )
        output, wrong = done.stdout + done.stderr, f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        output, wrong = f"{late.stderr!r}", "hangs"
    batch.seconds = time.monotonic() - begun
    counts = re.findall(r"^(\d+) inputs|^Done (\d+) runs|^#(\d+)\t", output, re.M)
    batch.done = max((int(number) for found in counts for number in found if number), default=0)
    batch.answers["ran"] = batch.done
    if wrong:
        culprit = last.read_bytes().hex() if last.exists() else "unknown"
        what = f"{program.name} {wrong}"
        batch.findings.append(Finding("core", batch.seed, 0, what, f"input {culprit}\n{output[-3000:]}"))
    return batch


def run_core(batch: Batch, seconds: float) -> Batch:
    """Build in a folder of its own and run; where there is no libFuzzer, with gcc."""
    with tempfile.TemporaryDirectory(prefix="fuzz-core-") as folder:
        program = build(Path(folder), libfuzzer=has_libfuzzer())
        return run(program, Path(folder), batch, seconds)
