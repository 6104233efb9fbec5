"""One tensor, two processes: put here, get there."""

import multiprocessing
import sys

import torch

from omni_fastshm import SharedMemoryConnector


def talker(metadata: dict[str, object]) -> None:
    connector = SharedMemoryConnector({})  # one in each process
    got = connector.get("thinker", "talker", "request-1", metadata)
    assert got is not None, "somebody else took it, it was cancelled, or its sender closed"
    hidden, _ = got  # a view of shared memory: valid until it dies, whatever happens to the sender
    assert hidden.sum() == 1000, "the bytes changed on the way"
    print("ok")


if __name__ == "__main__":
    with SharedMemoryConnector({}) as connector:
        ok, size, metadata = connector.put("thinker", "talker", "request-1", torch.eye(1000, 3584))
        if "--break" in sys.argv:
            connector.close()  # too early: what nobody has taken yet is dropped
        # `metadata` is a small dict of text and numbers: it goes by whatever your pipeline sends messages with
        process = multiprocessing.get_context("spawn").Process(target=talker, args=(metadata,))
        process.start()
        process.join()
    sys.exit(process.exitcode)
