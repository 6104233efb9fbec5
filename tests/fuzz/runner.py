"""Runs inputs in child processes, so that a crash, a hang or a flood of memory is seen and named.

Each child is forked from a process that has imported everything. It notes the number of an input before it runs it,
in memory that both share; a child that dies or stands still thus leaves the number of the culprit behind, and with the
seed that is enough to make the input again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import mmap
import os
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from fuzz.chance import Chance
from support import leftovers

from omni_fastshm import errors

OURS = tuple(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FastShmError))
HEADROOM = 768 << 20  # of address space beyond what is mapped when a child starts
GROWTH = 64 << 20  # of resident memory that one input may cost; no input is longer than some KiB
FINDINGS = 20  # of one batch; after that it ends


class Target(Protocol):
    """What is fuzzed. Made in the child; `run` does one input and says how it was answered, `check` looks at what must
    be true after any input, `describe` says what an input is."""

    def run(self, chance: Chance) -> str: ...
    def check(self) -> None: ...
    def describe(self, chance: Chance) -> str: ...
    def close(self) -> None: ...


@dataclass
class Finding:
    """One input that was not answered as it should be."""

    target: str
    seed: int
    index: int
    what: str
    text: str

    @property
    def kind(self) -> str:
        """What findings with one cause have in common, as far as a traceback tells."""
        return self.what + "".join(
            re.findall(r"line \d+,? in \w+", self.text)[-1 if "Traceback" in self.text else 0 :][:1]
        )

    def __str__(self) -> str:
        again = f"--target {self.target} --seed {self.seed} --first {self.index} --inputs 1"
        return f"{self.what}: again by: python -m fuzz {again}\n{self.text}"


@dataclass
class Batch:
    """Consecutive inputs of one target, and what became of them."""

    target: str
    seed: int
    first: int
    count: int
    done: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    peak: int = 0
    slowest_s: float = 0.0
    slowest: int = -1
    seconds: float = 0.0

    def add(self, other: Batch) -> None:
        self.done += other.done
        self.answers.update(other.answers)
        self.sites.update(other.sites)
        self.findings += other.findings
        self.peak = max(self.peak, other.peak)
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest
        self.seconds += other.seconds


class Progress:
    """The number of the input under way, and how many there were, where a parent still finds them after a crash."""

    LAYOUT = struct.Struct("<qq")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.LAYOUT.size)
        self.note(-1, 0)

    def note(self, index: int, done: int) -> None:
        self.LAYOUT.pack_into(self._memory, 0, index, done)

    def read(self) -> tuple[int, int]:
        index, done = self.LAYOUT.unpack_from(self._memory, 0)
        return index, done


def run_batch(batch: Batch, make: Callable[[], Target], deadline: float, hang_s: float) -> Batch:
    """Run `batch` in a child, from `first` on, until it is through, or dies, or the time is over.

    Args:
        batch: what to run; filled in and returned. After a crash or a hang it ends early, with a finding.
        make: makes the target in the child.
        deadline: on the monotonic clock, when to stop.
        hang_s: how long one input may take.
    """
    progress = Progress()
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as answer:
        pid = os.fork()
        if pid == 0:
            _child(batch, make, deadline, progress, output.fileno(), answer.fileno())
        status = _watch(pid, progress, hang_s)
        index, done = progress.read()
        answer.seek(0)
        told = answer.read()
        if status == 0 and told:
            _fill(batch, json.loads(told))
        else:
            output.seek(0)
            text = output.read().decode(errors="replace")[-6000:]
            what = f"no answer for {hang_s:g} s" if status is None else f"died: {_reason(status)}"
            batch.done = done + 1
            batch.findings.append(Finding(batch.target, batch.seed, index, what, text))
    leftovers.remove(os.environ["OMNI_FASTSHM_NAMESPACE"])
    batch.seconds = time.monotonic() - begun
    return batch


def _fill(batch: Batch, told: dict[str, Any]) -> None:
    batch.done, batch.peak = told["done"], told["peak"]
    batch.slowest_s, batch.slowest = told["slowest_s"], told["slowest"]
    batch.answers, batch.sites = Counter(told["answers"]), Counter(told["sites"])
    batch.findings = [Finding(**one) for one in told["findings"]]


def _reason(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


def _watch(pid: int, progress: Progress, hang_s: float) -> int | None:
    """The child's exit code; None when it stood still, and was ended after it had written its stacks."""
    descriptor = os.pidfd_open(pid)
    last, since = progress.read(), time.monotonic()
    hangs = False
    try:
        while not select.select([descriptor], [], [], 0.2)[0]:
            now = progress.read()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > hang_s:
                if hangs:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
                hangs, since = True, time.monotonic() - hang_s + 3
    finally:
        os.close(descriptor)
        if sys.exc_info()[0] is not None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return None if hangs else os.waitstatus_to_exitcode(status)


def _child(
    batch: Batch, make: Callable[[], Target], deadline: float, progress: Progress, output: int, answer: int
) -> None:
    code = 99
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(2)
        warnings.simplefilter("ignore")  # NumPy warns of some made-up dtypes before it refuses them
        logging.disable(logging.CRITICAL)
        gc.freeze()
        target = make()
        _limit_memory()
        _run_inputs(batch, target, deadline, progress)
        target.close()
        told = {**vars(batch), "findings": [vars(finding) for finding in batch.findings]}
        os.write(answer, json.dumps(told).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM, mapped + HEADROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _run_inputs(batch: Batch, target: Target, deadline: float, progress: Progress) -> None:
    peak = _resident_peak()
    for index in range(batch.first, batch.first + batch.count):
        progress.note(index, batch.done)
        start = time.monotonic()
        if start > deadline or len(batch.findings) >= FINDINGS:
            break
        _run_one(batch, target, index)
        batch.done += 1
        took = time.monotonic() - start
        if took > batch.slowest_s:
            batch.slowest_s, batch.slowest = took, index
        if _resident_peak() > peak + GROWTH:
            batch.findings.append(Finding(batch.target, batch.seed, index, f"took more than {GROWTH >> 20} MiB", ""))
        peak = _resident_peak()
    batch.peak = peak


def _run_one(batch: Batch, target: Target, index: int) -> None:
    try:
        answer = _answer(batch, target, Chance(batch.seed, batch.target, index))
        target.check()  # not before the exception is gone, whose traceback holds on to everything
    except BaseException as error:
        text = "".join(traceback.format_exception(error))[-3000:]
        batch.findings.append(Finding(batch.target, batch.seed, index, f"raised {type(error).__name__}", text))
        answer = "not as it should be"
    batch.answers[answer] += 1


def _answer(batch: Batch, target: Target, chance: Chance) -> str:
    try:
        return target.run(chance)
    except OURS as error:
        if type(error) not in OURS:
            raise
        batch.sites[re.sub(r"\d+|'.*?'|\(.*?\)", "", str(error))[:60]] += 1
        return type(error).__name__


@contextlib.contextmanager
def namespace_of_its_own(name: str) -> Iterator[None]:
    """The namespace for all targets; whatever they leave there goes at the end."""
    before = os.environ.get("OMNI_FASTSHM_NAMESPACE")
    os.environ["OMNI_FASTSHM_NAMESPACE"] = name
    try:
        yield
    finally:
        leftovers.remove(name)
        if before is None:
            del os.environ["OMNI_FASTSHM_NAMESPACE"]
        else:
            os.environ["OMNI_FASTSHM_NAMESPACE"] = before
