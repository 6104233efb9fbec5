"""omni_fastshm without metadata, the consumer waiting in an asyncio event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.peers.ours_by_key import FROM, TO, WITHIN_S, Keyed, put

__all__ = ["get", "label", "open", "own_channel", "put", "role"]

label = "omni_fastshm, `await aget`, the event loop's start and stop with it"
role = "ours"
own_channel = True


class Looping(Keyed):
    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        super().close()
        self.loop.close()


def open(place: str, side: str, load: str, depth: int) -> Looping:
    return Looping(place)


def get(end: Looping, note: None) -> Any:
    found = end.loop.run_until_complete(end.connector.aget(FROM, TO, next(end.wanted), timeout=WITHIN_S))
    if found is None:
        raise TimeoutError(f"nothing came within {WITHIN_S} s")
    return found[0]
