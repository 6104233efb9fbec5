"""Chunks of speech while they are made: one event loop plays many requests at once, without a thread for each."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from typing import Any

import numpy as np

from omni_fastshm import OmniConnectorBase, SharedMemoryConnector

REQUESTS, CHUNKS, SAMPLES = 12, 8, 24_000
CARELESS = "--break" in sys.argv
NAMESPACE = os.environ.get("OMNI_FASTSHM_NAMESPACE", f"streaming-{os.getpid()}")  # the spawned process is told its name


def chunk(request: int, number: int) -> np.ndarray:
    """A second of sound that says where it belongs."""
    return np.full(SAMPLES, request * 1000 + number, dtype=np.float32)


def code2wav(settings: dict[str, Any]) -> None:
    """Makes the chunks of all requests in turn. Each has a name of its own: one name would replace what is untaken."""
    with SharedMemoryConnector(settings) as connector:
        for number in range(CHUNKS):
            for request in range(REQUESTS):
                connector.put("code2wav", "player", f"{request}/{number}", chunk(request, number))
        for request in range(REQUESTS):
            connector.put("code2wav", "player", f"{request}/{CHUNKS}", None)  # the end


async def play(connector: OmniConnectorBase, request: int) -> int:
    """Takes one request's chunks in order, as they come; returns how many."""
    for number in range(CHUNKS + 1):
        timeout = 0 if CARELESS else 50  # 0 looks, and does not wait
        got = await connector.aget("code2wav", "player", f"{request}/{number}", timeout=timeout)
        if got is None:
            raise LookupError(f"chunk {number} of request {request} did not come")
        sound, _ = got
        if sound is None:
            break
        assert np.array_equal(sound, chunk(request, number)), f"chunk {number} of request {request} is another one's"
    return number


async def main() -> int:
    """Play all requests at the same time."""
    settings = {"key_lookup": True, "namespace": NAMESPACE, "linger_s": 0 if CARELESS else 50}
    sender = multiprocessing.get_context("spawn").Process(target=code2wav, args=(settings,))
    sender.start()
    with SharedMemoryConnector(settings) as connector:
        try:
            played = await asyncio.gather(*(play(connector, request) for request in range(REQUESTS)))
        except LookupError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            sender.join()
    assert played == [CHUNKS] * REQUESTS
    print(f"{REQUESTS} requests of {CHUNKS} chunks each, in one loop")
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
