"""Producing in place: the model writes straight into shared memory, and `put` hands it over without a copy."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import numpy as np

from omni_fastshm import SharedMemoryConnector

SHAPE = (2000, 512)


def consumer(messages: Any) -> None:
    """Looks at what it was handed only when the sender is through with everything."""
    with SharedMemoryConnector({}) as connector:
        metadata = messages.get()
        messages.get()  # "done": whatever the sender does to its memory, it has done it
        got = connector.get("thinker", "talker", "request-1", metadata)
        assert got is not None
        payload, _ = got
        assert payload["scale"] == 0.5
        assert payload["hidden"].shape == SHAPE
        if not (payload["hidden"] == np.arange(SHAPE[1]) * 0.5).all():
            raise SystemExit("the bytes changed after they were sent")


def main() -> int:
    """Allocate, fill, send."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    process = context.Process(target=consumer, args=(messages,))
    process.start()
    with SharedMemoryConnector({}) as connector:
        hidden = connector.allocate(SHAPE, np.float32)  # uninitialised; torch.float32 would give a tensor
        before = connector.health()["used_bytes"]
        np.multiply(np.arange(SHAPE[1], dtype=np.float32), 0.5, out=hidden)  # as a model writes with out=
        ok, size, metadata = connector.put("thinker", "talker", "request-1", {"hidden": hidden, "scale": 0.5})
        assert ok
        grown = connector.health()["used_bytes"] - before
        assert grown < hidden.nbytes, "it was copied"
        if "--break" in sys.argv:
            hidden += 1  # not ours any more: the receiver's bytes change
        del hidden
        messages.put(metadata)
        messages.put("done")
        process.join()
    if process.exitcode == 0:
        print(f"{size:,} bytes handed over, {grown:,} bytes written for it")
        print("ok")
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
