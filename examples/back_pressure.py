"""A sender that is faster than its receiver: the ring fills, `put` waits for room, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import numpy as np

from omni_fastshm import SharedMemoryConnector

PAYLOADS = 40
RING = 4 << 20  # room for three payloads of 1 MiB


def receiver(inbox: Any) -> None:
    """Takes what was announced, in order, and checks it."""
    with SharedMemoryConnector({}) as connector:
        for expected in range(PAYLOADS):
            message = inbox.get()
            if message is None:
                raise SystemExit(f"{expected} of {PAYLOADS} payloads came")
            number, metadata = message
            got = connector.get("talker", "code2wav", number, metadata)
            if got is None or number != expected or not (got[0] == number).all():
                raise SystemExit(f"payload {expected} is not what came")


def main() -> int:
    """Send forty payloads through a ring for three."""
    careless = "--break" in sys.argv
    context = multiprocessing.get_context("spawn")
    inbox = context.Queue()
    process = context.Process(target=receiver, args=(inbox,))
    process.start()
    settings = {"segment_bytes": RING, "max_bytes": RING, "put_timeout_s": 0 if careless else 50}
    with SharedMemoryConnector(settings) as connector:
        for number in range(PAYLOADS):
            ok, _, metadata = connector.put("talker", "code2wav", number, np.full(1 << 20, number, dtype=np.uint8))
            if ok:
                inbox.put((number, metadata))
            elif not careless:  # nothing was sent, nothing is left behind: fail the request, or try again later
                raise SystemExit(f"no room for payload {number} within {settings['put_timeout_s']} s")
        inbox.put(None)
        process.join()
        figures = connector.health()
    if process.exitcode == 0:
        assert figures["capacity_bytes"] <= RING
        print(f"{figures['puts']} payloads, {figures['blocked_s']:.2f} s waited for room, {figures['refused']} refused")
        print("ok")
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
