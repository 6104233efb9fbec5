"""What a message costs as numbers grow: of messages, producers, payloads in flight, keys.

Each function measures one kind of growth and returns rows ``{"x": how many, "put": µs, "get": µs}``, medians. Payloads
are 4 KiB through the ring, so that bookkeeping is what is measured and not copying.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from omni_fastshm import SharedMemoryConnector

FROM, TO = "thinker", "talker"
SETTINGS = {"shm_threshold_bytes": 0}
WITHIN_S = 60.0
Row = dict[str, float]


def payload() -> dict[str, Any]:
    return {"step": 7, "x": np.ones(1024, dtype=np.float32)}


def requests() -> Iterator[str]:
    return map("chatcmpl-{:012d}".format, itertools.count())


def put(connector: SharedMemoryConnector, request: str, data: Any) -> tuple[int, Any]:
    """Nanoseconds of one put, and its metadata."""
    start = time.monotonic_ns()
    ok, _, metadata = connector.put(FROM, TO, request, data)
    spent = time.monotonic_ns() - start
    if not ok:
        raise RuntimeError(f"put was refused: {connector.health()}")
    return spent, metadata


def get(connector: SharedMemoryConnector, request: str, metadata: Any = None) -> int:
    """Nanoseconds of one get, what it brought dropped after."""
    start = time.monotonic_ns()
    found = connector.get(FROM, TO, request, metadata)
    spent = time.monotonic_ns() - start
    if found is None:
        raise RuntimeError(f"nothing came: {connector.health()}")
    return spent


def row(x: int, puts: Sequence[int], gets: Sequence[int]) -> Row:
    return {"x": x, "put": statistics.median(puts) / 1e3, "get": statistics.median(gets) / 1e3}


def by_messages(place: str, most: int) -> list[Row]:
    """One connector from its first message on; each row is what came since the one before."""
    rows, data = [], payload()
    puts: list[int] = []
    gets: list[int] = []
    with SharedMemoryConnector({"namespace": place, **SETTINGS}) as connector:
        due = 1
        for number, request in enumerate(itertools.islice(requests(), most), 1):
            spent, metadata = put(connector, request, data)
            puts.append(spent)
            gets.append(get(connector, request, metadata))
            if number == due:
                rows.append(row(number, puts, gets))
                puts, gets, due = [], [], due * 10
    return rows


def by_in_flight(place: str, most: int, messages: int) -> list[Row]:
    """Payloads that lie there, put and not taken yet, while others are put and taken."""
    rows, data, names = [], payload(), requests()
    with SharedMemoryConnector({"namespace": place, **SETTINGS}) as connector:
        waiting = []
        for many in powers(4, most):
            while len(waiting) < many - 1:
                request = next(names)
                waiting.append((request, put(connector, request, data)[1]))
            rows.append(row(many, *_exchange(connector, names, data, messages)))
        for request, metadata in waiting:
            get(connector, request, metadata)
    return rows


def by_keys(place: str, most: int, messages: int) -> list[Row]:
    """Keys that can be got, while others are put and got by key."""
    rows, data, names = [], payload(), requests()
    with SharedMemoryConnector({"namespace": place, "key_lookup": True}) as connector:
        waiting: list[str] = []
        for many in powers(10, most):
            while len(waiting) < many - 1:
                waiting.append(next(names))
                put(connector, waiting[-1], data)
            rows.append(row(many, *_exchange(connector, names, data, messages, keyed=True)))
        for request in waiting:
            get(connector, request)
    return rows


def _exchange(
    connector: SharedMemoryConnector, names: Iterator[str], data: Any, messages: int, keyed: bool = False
) -> tuple[list[int], list[int]]:
    puts, gets = [], []
    for request in itertools.islice(names, messages):
        spent, metadata = put(connector, request, data)
        puts.append(spent)
        gets.append(get(connector, request, None if keyed else metadata))
    return puts, gets


def by_producers(place: str, most: int, messages: int, keyed: bool) -> list[Row]:
    """Processes that put into one consumer's edge. They take turns, so that they do not fight for the cores."""
    rows, settings = [], {"namespace": place, "key_lookup": keyed, **SETTINGS}
    with ExitStack() as stack:
        consumer = stack.enter_context(SharedMemoryConnector(settings))
        producers: list[Connection] = []
        for many in powers(2, most):
            while len(producers) < many:
                producers.append(stack.enter_context(_Child(settings, len(producers))).commands)
            puts: list[int] = []
            gets: list[int] = []
            for turn in range(2):  # in the first, each producer makes its segments, and the consumer maps them
                puts, gets = [], []
                for commands in producers:
                    commands.send(max(messages // many, 10))
                    sent = _answer(commands)
                    puts += [spent for spent, _, _ in sent]
                    gets += [get(consumer, request, None if keyed else metadata) for _, request, metadata in sent]
                del turn
            rows.append(row(many, puts, gets))
    return rows


class _Child:
    """A producing process; it ends with the block."""

    def __init__(self, settings: dict[str, Any], number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.two_process", "torch"])
        self.commands, theirs = context.Pipe()
        self.process = context.Process(target=_produce, args=(theirs, settings, number), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: Any) -> None:
        self.commands.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self.commands.close()


def _produce(commands: Connection, settings: dict[str, Any], number: int) -> None:
    data, turn = payload(), 0
    with SharedMemoryConnector(settings) as connector:
        while (count := commands.recv()) is not None:
            turn += 1
            sent = []
            for message in range(count):
                request = f"chatcmpl-{number}-{turn}-{message}"
                spent, metadata = put(connector, request, data)
                sent.append((spent, request, metadata))
            commands.send(sent)


def _answer(commands: Connection) -> Any:
    if not commands.poll(WITHIN_S):
        raise TimeoutError(f"a producer did not answer within {WITHIN_S} s")
    return commands.recv()


def powers(base: int, most: int) -> list[int]:
    """1, base, base squared … up to `most`."""
    return list(itertools.takewhile(lambda each: each <= most, (base**exponent for exponent in itertools.count())))


def measure(place: str, quick: bool) -> dict[str, list[Row]]:
    """All kinds.

    Args:
        place: prefix of the namespaces.
        quick: only show that it works.
    """
    few = 20 if quick else 2000
    return {
        "messages": by_messages(f"{place}-m", 1000 if quick else 1_000_000),
        "in flight": by_in_flight(f"{place}-f", 64 if quick else 4096, few),
        "keys": by_keys(f"{place}-k", 100 if quick else 100_000, few),
        "producers": by_producers(f"{place}-p", 2 if quick else 16, few, keyed=False),
        "producers, by key": by_producers(f"{place}-q", 2 if quick else 16, few, keyed=True),
    }


def main() -> None:
    import json

    print(json.dumps(measure(f"bench{os.getpid()}-growth", quick=False), indent=1))


if __name__ == "__main__":
    main()
