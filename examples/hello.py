"""One tensor, two processes: put here, get there."""

import multiprocessing
import sys

import torch

from omni_fastshm import SharedMemoryConnector


def talker(metadata: dict[str, object]) -> None:
    with SharedMemoryConnector({}) as connector:
        got = connector.get("thinker", "talker", "request-1", metadata)
        assert got is not None, "nothing came"
        hidden, size = got
        assert hidden.sum() == 1000, "the bytes changed on the way"
        print(f"talker: {tuple(hidden.shape)}, {size:,} bytes, a view of shared memory")


if __name__ == "__main__":
    with SharedMemoryConnector({}) as connector:
        hidden = torch.eye(1000, 3584, dtype=torch.bfloat16)
        ok, size, metadata = connector.put("thinker", "talker", "request-1", hidden)
        if "--break" in sys.argv:
            connector.close()  # too early: what nobody has taken yet is dropped
        process = multiprocessing.get_context("spawn").Process(target=talker, args=(metadata,))
        process.start()
        process.join()
    print("ok" if process.exitcode == 0 else "failed")
    sys.exit(process.exitcode)
