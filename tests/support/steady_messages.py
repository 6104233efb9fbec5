"""Messages through the ring between two processes, between marks that a trace of system calls can be cut at.

``python tests/support/steady_messages.py NAMESPACE`` is run under strace by `tests/process/test_steady_state.py`. The
two take turns, a batch of puts and then a batch of gets, with a pipe between; marks and pipe stand around what is
counted. It prints how many messages were counted and the page faults of both processes meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from omni_fastshm import SharedMemoryConnector

BATCH = 20
# Until each page of the ring is touched, and more than there are request ids whose hashes the library remembers.
WARM = {"64 KiB": 12_000, "1 MiB": 200}
COUNTED = {"64 KiB": 1000, "1 MiB": 200}
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20}
MARK = "/omni-fastshm-mark"


@contextlib.contextmanager
def counting(on: bool, faults: list[int]) -> Iterator[None]:
    """Marks, and the page faults between them added to the last of `faults`."""
    if not on:
        yield
        return
    os.access(f"{MARK}/begin", os.F_OK)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    yield
    faults[-1] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.access(f"{MARK}/end", os.F_OK)


def batches() -> Iterator[tuple[str, bool, list[str]]]:
    """Size, counted or not, request ids; the same in both processes."""
    for size in SIZES:
        for batch in range((WARM[size] + COUNTED[size]) // BATCH):
            names = [f"{size[0]}-{batch}-{index}" for index in range(BATCH)]
            yield size, batch * BATCH >= WARM[size], names


def consume(pipe: Connection, namespace: str) -> None:
    gc.disable()
    faults: list[int] = [0]
    with SharedMemoryConnector({"namespace": namespace}) as connector:
        for _, on, names in batches():
            sent = pipe.recv()
            with counting(on, faults):
                for request, metadata in zip(names, sent, strict=True):
                    found = connector.get("thinker", "talker", request, metadata)
                    if found is None or found[0]["x"][-1] != 1:
                        raise RuntimeError(f"{request} did not come as it was sent")
            found = None
            pipe.send(None)
    pipe.send(faults[0])


def produce(pipe: Connection, namespace: str) -> int:
    gc.disable()
    faults: list[int] = [0]
    payloads = {name: {"step": 7, "x": np.ones(size // 4, dtype=np.float32)} for name, size in SIZES.items()}
    sent: list[Any] = [None] * BATCH
    with SharedMemoryConnector({"namespace": namespace}) as connector:
        for size, on, names in batches():
            data = payloads[size]
            with counting(on, faults):
                for index, request in enumerate(names):
                    sent[index] = connector.put("thinker", "talker", request, data)[2]
            pipe.send(sent)
            pipe.recv()
    return faults[0]


def main() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=consume, args=(theirs, sys.argv[1]))
    child.start()
    theirs.close()
    faults = produce(ours, sys.argv[1])
    print(json.dumps({"messages": sum(COUNTED.values()), "faults": [faults, ours.recv()]}))
    child.join()


if __name__ == "__main__":
    main()
