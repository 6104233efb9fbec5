"""Processes are killed at bad moments: what they had sent arrives, what they held comes back, nothing is left over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

import numpy as np

from omni_fastshm import SharedMemoryConnector

WAVE = np.arange(300_000, dtype=np.float32)
RING = 4 << 20


def doomed_sender(orphan_ttl_s: float, outbox: Any) -> None:
    """Sends one payload and dies without a chance to close."""
    connector = SharedMemoryConnector({"orphan_ttl_s": orphan_ttl_s})
    outbox.send(connector.put("talker", "code2wav", "request-1", {"wave": WAVE})[2])
    os.kill(os.getpid(), signal.SIGKILL)


def doomed_receiver(metadata: dict[str, Any]) -> None:
    """Dies with a view of the only block that the ring has room for."""
    got = SharedMemoryConnector({}).get("code2wav", "player", "big-1", metadata)
    assert got is not None
    os.kill(os.getpid(), signal.SIGKILL)


def killed(context: Any, target: Any, *words: Any) -> None:
    """Run a process that ends by SIGKILL."""
    process = context.Process(target=target, args=words)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"it was to be killed, not to end with {process.exitcode}"


def main() -> int:
    """Kill a sender, then a receiver."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    killed(context, doomed_sender, 0 if "--break" in sys.argv else 60, there)
    with SharedMemoryConnector({}) as connector:  # each start tidies up, but leaves payloads in their time
        got = connector.get("talker", "code2wav", "request-1", here.recv())
        if got is None:
            print("the payload died with its sender: it had no time to be fetched", file=sys.stderr)
            return 1
        assert np.array_equal(got[0]["wave"], WAVE)
        print("a killed sender's payload arrived")
    del got

    with SharedMemoryConnector({"segment_bytes": RING, "max_bytes": RING, "put_timeout_s": 50}) as connector:
        big = np.zeros(RING * 3 // 4, dtype=np.uint8)
        ok, _, metadata = connector.put("code2wav", "player", "big-1", big)
        assert ok
        killed(context, doomed_receiver, metadata)
        ok, _, metadata = connector.put("code2wav", "player", "big-2", big)  # only where the first one lies is room
        assert ok, "the dead receiver still holds the ring"
        assert connector.get("code2wav", "player", "big-2", metadata) is not None
        print("a killed receiver's room came back")
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
