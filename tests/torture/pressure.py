"""A full ring: who waits is served in order, nothing is dropped, memory keeps its limit, the dead hold nobody up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support import leftovers
from torture import content
from torture.forked import Forked
from torture.mount import Mount
from torture.worker import QueueClock

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

KIB = 1 << 10
BLOCK = 128 * KIB  # what one payload takes of the ring, nearly
BLOCKS, WAITERS, EDGES = 8, 24, 4
CONTROL = 256 * KIB
WAIT_S = 20.0
LATE_S = 1.0
SLICE_MS = 50.0  # a waiting put looks so often whether the readers still live


@dataclass
class Result:
    """Both scenes together."""

    waits: int = 0
    blocked_s: float = 0.0
    names_bytes_max: int = 0
    deaths: int = 0
    given_back_ms: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON."""
        shown = sorted(self.given_back_ms) or [0.0]
        rank = {"p50": shown[len(shown) // 2], "p99": shown[len(shown) * 99 // 100], "max": shown[-1]}
        return {
            "waits": self.waits,
            "blocked_s": round(self.blocked_s, 2),
            "names_bytes_max": self.names_bytes_max,
            "deaths": self.deaths,
            "given_back_ms": {name: round(ms, 1) for name, ms in rank.items()},
            "given_back_liveness_checks_max": round(shown[-1] / SLICE_MS, 2),
            "faults": len(self.faults),
            "seconds": round(self.seconds, 1),
        }


class Lines:
    """JSON lines from a pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = b""

    def next(self, timeout_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("nothing came through the pipe")
            piece = os.read(self.fd, 1 << 16)
            if not piece:
                raise EOFError("the other side has ended")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def say(fd: int, *values: Any) -> None:
    """One line; short enough to be written in one piece."""
    os.write(fd, json.dumps(values).encode() + b"\n")


@contextlib.contextmanager
def pipes(count: int) -> Iterator[list[tuple[int, int]]]:
    """So many pipes, closed at the end."""
    made = [os.pipe() for _ in range(count)]
    try:
        yield made
    finally:
        for fd in (fd for pipe in made for fd in pipe):
            with contextlib.suppress(OSError):
                os.close(fd)


# ---- many waiters, one slow reader


def queue(namespace: str, rounds: int, places: int, released: int) -> dict[str, Any]:
    """The producing process: fills the ring, then lets threads wait for room, one behind the other."""
    connector = SharedMemoryConnector(
        {
            "namespace": namespace,
            "segment_bytes": BLOCKS * BLOCK,
            "max_bytes": BLOCKS * BLOCK,
            "put_timeout_s": WAIT_S,
        }
    )
    mount = Mount(namespace)
    numbers = iter(range(1 << 30))
    size = BLOCK - 4 * KIB
    failed: list[str] = []

    def put(number: int) -> None:
        data = content.tree(number, (size,), [content.leaf(number, 0, size)])
        ok, _, metadata = connector.put("a", f"e{number % EDGES}", str(number), data)
        if ok:
            say(places, number, metadata)
        else:
            failed.append(f"put of {number} was refused")

    for _ in range(rounds):
        for _ in range(BLOCKS):
            put(next(numbers))
        threads = [threading.Thread(target=put, args=(next(numbers),)) for _ in range(WAITERS)]
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            while len(connector._producer.queue) < waiting and thread.is_alive():  # type: ignore[union-attr]
                select.select([], [], [], 0.001)
        say(places, -1, None)  # all wait: now the reader may begin
        for thread in threads:
            thread.join()
            mount.look()
        os.read(released, 1)  # the ring is empty again
    health = connector.health()
    connector.close()
    return {"blocked_s": health["blocked_s"], "refused": failed, "names_bytes_max": mount.names_max}


def read_slowly(namespace: str, rounds: int, places: int, released: int) -> dict[str, Any]:
    """The reading process: frees one block at a time, and the next only when the room has gone to somebody."""
    connector = SharedMemoryConnector({"namespace": namespace})
    lines = Lines(places)
    order: list[int] = []
    wrong: list[str] = []

    def take(number: int, metadata: dict[str, Any]) -> None:
        got = connector.get("a", f"e{number % EDGES}", str(number), metadata)
        if got is None or content.uid_of(got[0]) != number:
            wrong.append(f"{number} was dropped")
        elif problem := content.wrong(number, got[0]["sizes"], got[0]["leaves"]):
            wrong.append(problem)

    for _ in range(rounds):
        there = [lines.next() for _ in range(BLOCKS)]
        assert lines.next()[0] == -1
        for _ in range(WAITERS):
            select.select([], [], [], 0.002)
            take(*there.pop(0))
            there.append(lines.next())  # whoever got the room of the one that was let go
            order.append(there[-1][0])
        for each in there:
            take(*each)
        os.write(released, b".")
    leases = connector.health()["leases"]
    connector.close()
    return {"order": order, "wrong": wrong, "leases": leases}


def serve_in_order(result: Result, namespace: str, rounds: int) -> None:
    """Threads that wait for room get it first come, first served; per edge the order of payloads is kept."""
    with pipes(2) as ((read, write), (empty, emptied)):
        reader = Forked(lambda: read_slowly(namespace, rounds, read, emptied), write, empty)
        maker = Forked(lambda: queue(namespace, rounds, write, empty), read, emptied)
        for fd in (read, write, empty, emptied):
            os.close(fd)
        made, seen = maker.answer(), reader.answer()
    if made is None or seen is None:
        result.faults.append("a process of the waiting scene ended badly")
        return
    result.waits += len(seen["order"])
    result.blocked_s = made["blocked_s"]
    result.names_bytes_max = made["names_bytes_max"]
    result.faults += made["refused"] + seen["wrong"]
    if seen["order"] != sorted(seen["order"]) or len(seen["order"]) != rounds * WAITERS:
        result.faults.append(f"served out of order: {seen['order'][:60]}")
    if made["blocked_s"] <= 0:
        result.faults.append("nobody waited, says health()")
    if made["names_bytes_max"] > BLOCKS * BLOCK + CONTROL:
        result.faults.append(f"{made['names_bytes_max']} bytes on the mount")
    if seen["leases"]:
        result.faults.append(f"{seen['leases']} leases left")


# ---- a reader that dies with all there is


def put_again_and_again(namespace: str, commands: int, answers: int) -> dict[str, Any]:
    """The producing process: one payload fills its ring, so each put waits for whoever holds the last one."""
    connector = SharedMemoryConnector(
        {"namespace": namespace, "segment_bytes": BLOCK, "max_bytes": BLOCK, "put_timeout_s": WAIT_S}
    )
    clock = QueueClock()
    data = np.zeros(BLOCK - 4 * KIB, np.uint8)
    while os.read(commands, 1):
        queued = clock.read()
        ok, _, metadata = connector.put("a", "b", "r", data)
        say(answers, ok, metadata, time.monotonic_ns(), clock.read() - queued)
    connector.close()
    return {}


def hold(namespace: str, metadata: dict[str, Any], holding: int) -> None:
    """A reader's process: take it, and never let go."""
    connector = SharedMemoryConnector({"namespace": namespace})
    view = connector.get("a", "b", "r", metadata)
    os.write(holding, b"+" if view is not None else b"-")
    signal.pause()


def outlive_readers(result: Result, namespace: str, deaths: int, rng: random.Random) -> None:
    """Kill whoever holds the only block while a put waits for it; how long does the put wait on?"""
    with pipes(3) as ((commands, command), (answers, answer), (holding, held)):
        maker = Forked(lambda: put_again_and_again(namespace, commands, answer), command, answers, holding, held)
        os.close(answer)
        lines = Lines(answers)
        os.write(command, b".")
        metadata = lines.next()[1]
        for _ in range(deaths):
            if metadata is None:
                break
            reader = Forked(lambda place=metadata: hold(namespace, place, held), command, answers)  # type: ignore[misc]
            if os.read(holding, 1) != b"+":
                result.faults.append("the only payload was not there for its only reader")
            os.write(command, b".")
            select.select([], [], [], rng.random() * 0.07)  # it waits by now, somewhere in its slice
            killed = time.monotonic_ns()
            reader.kill()
            result.deaths += 1
            metadata = _measure(result, lines, killed, time.monotonic_ns())
        os.close(command)
        if maker.answer() is None:
            result.faults.append("the waiting producer ended badly")


def _measure(result: Result, lines: Lines, killed_ns: int, dead_ns: int) -> dict[str, Any] | None:
    """Between the two moments the reader died: on a busy machine that takes its time, too."""
    ok, metadata, ended, queued = lines.next(2 * WAIT_S)
    waited_s = (ended - dead_ns - queued) / 1e9
    result.given_back_ms.append(max(waited_s * 1e3, 0.0))
    if not ok or waited_s > LATE_S:
        result.faults.append(f"a put waited {waited_s:.2f} s for a dead reader")
    if ended < killed_ns:
        result.faults.append("a put got room that a living reader held")
    return metadata if ok else None


def run(*, rounds: int, deaths: int, seed: int, namespace: str) -> Result:
    """Both scenes.

    Args:
        rounds: how often the ring is filled and threads queue up.
        deaths: how many readers are killed while a put waits for what they hold.
        seed: of the moments.
        namespace: base of the names.
    """
    result = Result()
    start = time.monotonic()
    serve_in_order(result, namespace + "-q", rounds)
    outlive_readers(result, namespace + "-d", deaths, random.Random(seed))
    for scene in ("-q", "-d"):
        result.faults += [f"left: {name}" for name in leftovers.names(namespace + scene)]
    result.seconds = time.monotonic() - start
    return result
