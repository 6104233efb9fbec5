"""What the processes do that are killed: put, get, look at views and let go of them, cancel, close, sweep.

A worker is forked from the referee, which holds no connector. It takes commands from a pipe of its own and reports
through the one pipe that all share, each report with a single write of less than PIPE_BUF bytes: there whole or not at
all, in the order in which things happened. `phases` is a page of anonymous shared memory with one byte per worker; the
referee looks there where in its work a process is, to kill it there.
"""

from __future__ import annotations

import faulthandler
import logging
import marshal
import mmap
import os
import random
import select
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torture import content

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.directory import leave_directory, open_directory
from omni_fastshm.errors import SegmentError

T = TypeVar("T")

PIPE_BUF = 4096
PHASES = ("idle", "start", "fill", "put", "get", "look", "release", "cleanup", "close", "sweep")
IDLE, START, FILL, PUT, GET, LOOK, RELEASE, CLEANUP, CLOSE, SWEEP = range(len(PHASES))
HELD = 6  # payloads that a process holds on to, at most
IDLE_S = 0.02
THRESHOLD = 512

Times = tuple[int, int, int]


@dataclass(frozen=True)
class Spec:
    """One worker's life."""

    slot: int
    serial: int
    seed: int
    role: str  # "producer", "consumer", "both", "janitor"
    keyed: bool
    settings: dict[str, Any]


class QueueClock:
    """How long this thread was ready to run while others had the processor, in nanoseconds."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._fd = -1

    def read(self) -> int:
        return 0 if self._fd < 0 else int(os.pread(self._fd, 64, 0).split()[1])


def frame(message: tuple[Any, ...]) -> bytes:
    body = marshal.dumps(message)
    return len(body).to_bytes(4, "little") + body


def unframe(buffer: bytearray) -> list[tuple[Any, ...]]:
    """Take all whole messages out of `buffer`."""
    messages, at = [], 0
    while len(buffer) - at >= 4:
        size = int.from_bytes(buffer[at : at + 4], "little")
        if len(buffer) - at - 4 < size:
            break
        messages.append(marshal.loads(buffer[at + 4 : at + 4 + size]))
        at += 4 + size
    del buffer[:at]
    return messages


class _Warnings(logging.Handler):
    """The library's warnings go to the referee, which counts them by kind."""

    def __init__(self, report: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:1000]
        if record.exc_info and record.exc_info[0] is not None:
            self._report("error", "logged: " + text + "\n" + traceback.format_exc()[-2500:])
        else:
            self._report("warning", str(record.msg), text)


@dataclass
class Held:
    """A payload that this process still looks at; of each leaf, the first `skip` bytes were cut off."""

    uid: int
    rid: str
    sizes: tuple[int, ...]
    leaves: list[content.Bytes]
    skip: int

    def scribble(self) -> None:
        """Where it is this process's alone, it may write there."""
        for leaf in self.leaves:
            if leaf.flags.writeable:
                leaf[:] = 0


class Worker:
    """One process's work, until it is told to stop or killed."""

    def __init__(self, spec: Spec, commands: int, reports: int, phases: mmap.mmap) -> None:
        self.spec = spec
        self._commands = commands
        self._reports = reports
        self._phases = phases
        self._buffer = bytearray()
        self._rng = random.Random(spec.seed)
        self._queue = QueueClock()
        self._held: list[Held] = []
        self._connector: SharedMemoryConnector | None = None

    # ---- talking to the referee

    def report(self, kind: str, *values: Any) -> None:
        data = frame((kind, self.spec.serial, *values))
        assert len(data) <= PIPE_BUF, f"{kind} does not fit into one atomic write"
        os.write(self._reports, data)

    def phase(self, number: int) -> None:
        self._phases[self.spec.slot] = number

    def timed(self, phase: int, call: Callable[[], T]) -> tuple[T, Times]:
        """The result of `call`, with its start, its end, and how long it waited for a processor meanwhile."""
        queued = self._queue.read()
        self.phase(phase)
        start = time.monotonic_ns()
        try:
            result = call()
        finally:
            end = time.monotonic_ns()
            self.phase(IDLE)
        return result, (start, end, self._queue.read() - queued)

    # ---- the loop

    def run(self) -> None:
        logger = logging.getLogger("omni_fastshm")
        logger.addHandler(_Warnings(self.report))
        logger.propagate = False
        if self.spec.role == "janitor":
            self.report("up", 0)
        else:
            self._open()
        while True:
            for command, *values in self._next_commands():
                if command == "stop":
                    self._stop()
                    return
                try:
                    getattr(self, "_do_" + command)(*values)
                except Exception:
                    self.phase(IDLE)
                    self.report("error", f"{command} {values!r:.300}\n{traceback.format_exc()[-3000:]}")
                self.report("done")

    def _next_commands(self) -> list[tuple[Any, ...]]:
        while not select.select([self._commands], [], [], IDLE_S)[0]:
            self._let_go(1)  # nobody may wait for ever for what an idle process holds
        piece = os.read(self._commands, 1 << 16)
        if not piece:
            os._exit(0)  # the referee is gone
        self._buffer += piece
        return unframe(self._buffer)

    def _open(self) -> None:
        settings = {**self.spec.settings, "key_lookup": self.spec.keyed}
        self._connector, (start, end, queued) = self.timed(START, lambda: SharedMemoryConnector(settings))
        self.report("up", end - start - queued)

    def _close(self) -> None:
        self.report("close", time.monotonic_ns())
        _, times = self.timed(CLOSE, self.connector.close)
        self.report("close_end", times)

    def _stop(self) -> None:
        if self._connector is not None:
            self._close()
        self._let_go(len(self._held))  # views outlive the connector
        self.report("stopped")

    @property
    def connector(self) -> SharedMemoryConnector:
        assert self._connector is not None
        return self._connector

    # ---- commands

    def _do_put(self, uid: int, rid: str, edge_uid: int, sizes: tuple[int, ...], lend: int, takers: int) -> None:
        self.phase(FILL)
        leaves = [self._leaf(uid, index, size, bool(lend >> index & 1)) for index, size in enumerate(sizes)]
        data = content.tree(uid, sizes, leaves)
        self.report("put", uid, rid, takers, time.monotonic_ns())
        try:
            (_, _, metadata), times = self.timed(
                PUT, lambda: self.connector.put(*edge(edge_uid), rid, data, consumers=takers)
            )
        except Exception:
            self.report("put_end", uid, rid, takers, None, raised())
            raise
        self.report("put_end", uid, rid, takers, metadata, times)
        for index, each in enumerate(leaves):
            if not lend >> index & 1:
                each[:] = 255  # put has returned: what it was given may change

    def _leaf(self, uid: int, index: int, size: int, lend: bool) -> content.Bytes:
        filled = content.leaf(uid, index, size)
        if not lend:
            return filled
        try:
            place: content.Bytes = self.connector.allocate((size,), "uint8")
        except SegmentError:
            return filled  # no room for a loan: what is not one is copied
        place[:] = filled
        return place

    def _do_get(self, token: int, rid: str, edge_uid: int, metadata: dict[str, Any] | None, timeout: float) -> None:
        held = self._receive(token, rid, edge_uid, metadata, timeout)
        if held is not None:
            self._held.append(held)
        del held
        while len(self._held) > self._rng.randrange(HELD + 1):
            self._let_go(1)

    def _receive(
        self, token: int, rid: str, edge_uid: int, metadata: dict[str, Any] | None, timeout: float
    ) -> Held | None:
        self.report("get", token, time.monotonic_ns())
        try:
            got, times = self.timed(GET, lambda: self.connector.get(*edge(edge_uid), rid, metadata, timeout=timeout))
        except Exception:
            self.report("get_end", token, None, "", raised())
            raise
        if got is None:
            self.report("get_end", token, None, "", times)
            return None
        data = got[0]
        self.phase(LOOK)
        brought = content.uid_of(data)
        problem = "no frame of ours" if brought < 0 else content.wrong(brought, data["sizes"], data["leaves"])
        self.report("get_end", token, brought, problem, times)
        self.phase(IDLE)
        return None if problem else self._slices(brought, rid, data)

    def _slices(self, uid: int, rid: str, data: dict[str, Any]) -> Held:
        """What this process looks at from now on: all of it, or slices."""
        skip = self._rng.choice((0, 0, 1, 24)) if min(data["sizes"]) > 24 else 0
        return Held(uid, rid, data["sizes"], [leaf[skip:] for leaf in data["leaves"]], skip)

    def _let_go(self, count: int) -> None:
        """Look once more at some of what is held, and drop it, in random order."""
        for _ in range(min(count, len(self._held))):
            held = self._held.pop(self._rng.randrange(len(self._held)))
            self.phase(LOOK)
            problem = content.wrong(held.uid, held.sizes, held.leaves, held.skip)
            if problem:
                self.report("changed", held.uid, held.rid, problem)
            if self._rng.random() < 0.5:
                held.scribble()
            self.phase(RELEASE)
            del held
            self.phase(IDLE)

    def _do_cleanup(self, rid: str) -> None:
        self.report("cleanup", rid, time.monotonic_ns())
        _, times = self.timed(CLEANUP, lambda: self.connector.cleanup(rid))
        self.report("cleanup_end", rid, times)

    def _do_reopen(self) -> None:
        """Close while views are held and payloads wait, and begin anew."""
        self._close()
        self._open()

    def _do_sweep(self, namespace: str) -> None:
        swept, times = self.timed(SWEEP, lambda: janitor.sweep(namespace))
        self.report("swept", len(swept.removed), times)

    def _do_release(self) -> None:
        self._let_go(len(self._held))

    def _do_fill(self, size: int) -> None:
        """All room is there again: a payload that needs the whole of it goes through."""
        if self.spec.role == "consumer":
            return
        ok, _, metadata = self.connector.put("s0", "t0", "fill", np.zeros(size, np.uint8))
        if not ok or self.connector.get("s0", "t0", "fill", metadata) is None:
            self.report("error", f"no room for {size} bytes in an idle ring: {self.connector.health()}")

    def _do_vitals(self) -> None:
        """What a process that lives long must not collect: descriptors, mappings, memory."""
        with open("/proc/self/maps") as file:
            maps = sum("omnifs." in line for line in file)
        with open("/proc/self/status") as file:
            anonymous = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
        directory = open_directory(self.spec.settings["namespace"], make=False)
        producers = 0 if directory is None else len(directory.endpoints())
        if directory is not None:
            leave_directory(directory)
        health = self.connector.health()
        kept = {name: health[name] for name in ("leases", "live_blocks", "blocked_s", "puts", "gets", "refused")}
        self.report(
            "vitals",
            {"descriptors": len(os.listdir("/proc/self/fd")), "maps": maps, "rss_anon_kib": anonymous}
            | {"producers": producers}
            | kept,
        )


def edge(uid: int) -> tuple[str, str]:
    """The edge that a payload travels on."""
    return f"s{uid % 3}", f"t{uid % 4}"


def raised() -> Times:
    """For a call that raised, and is reported as such: its end, as if it had taken no time."""
    now = time.monotonic_ns()
    return now, now, 0


def be_worker(spec: Spec, commands: int, reports: int, phases: mmap.mmap) -> None:
    """Run a worker in a freshly forked process, and end it; never returns."""
    code = 1
    faulthandler.enable()  # the referee asks for the stacks of those that are stuck
    worker = Worker(spec, commands, reports, phases)
    try:
        worker.run()
        code = 0
    except BaseException:
        worker.report("error", traceback.format_exc()[-3500:])
    finally:
        os._exit(code)
