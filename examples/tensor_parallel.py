"""One payload for all ranks of a tensor-parallel stage: put once with `consumers`, taken once by each rank."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import numpy as np

from omni_fastshm import SharedMemoryConnector

RANKS = 3
HIDDEN = np.arange(600 * 1536, dtype=np.float64).reshape(600, 1536)


def rank_process(rank: int, inbox: Any, answers: Any) -> None:
    """Takes the whole payload without a copy and works on its own columns."""
    with SharedMemoryConnector({}) as connector:
        got = connector.get("thinker", "talker", "request-1", inbox.get())
        if got is None:
            answers.put((rank, None))
            return
        payload, _ = got
        hidden = payload["hidden"]  # read-only, for the other ranks look at the same bytes
        share = np.array_split(hidden, RANKS, axis=1)[rank]
        answers.put((rank, float(share.sum())))


def main() -> int:
    """Fan one payload out and add up what came back."""
    context = multiprocessing.get_context("spawn")
    inboxes, answers = [context.Queue() for _ in range(RANKS)], context.Queue()
    ranks = [context.Process(target=rank_process, args=(n, inboxes[n], answers)) for n in range(RANKS)]
    for process in ranks:
        process.start()
    with SharedMemoryConnector({}) as connector:
        consumers = 1 if "--break" in sys.argv else RANKS
        _, size, metadata = connector.put("thinker", "talker", "request-1", {"hidden": HIDDEN}, consumers=consumers)
        for inbox in inboxes:
            inbox.put(metadata)  # the same small dict for each
        sums = dict(answers.get(timeout=50) for _ in ranks)
        for process in ranks:
            process.join()
        untaken = connector.health()["live_blocks"]
    if None in sums.values():
        print(f"ranks that got nothing: {[rank for rank, value in sums.items() if value is None]}", file=sys.stderr)
        return 1
    assert sum(sums.values()) == HIDDEN.sum()
    assert untaken == 0, "the last rank's view is gone, and with it the block"
    print(f"{RANKS} ranks, {size:,} bytes put once")
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
