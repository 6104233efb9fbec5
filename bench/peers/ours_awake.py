"""omni_fastshm without metadata, the consumer spinning for as long as it ever waits here."""

from __future__ import annotations

from bench.peers.ours_by_key import Keyed, get, put

__all__ = ["get", "label", "open", "own_channel", "put", "role"]

label = "omni_fastshm, get by key, busy_wait_us covers the wait"
role = "ours"
own_channel = True

BUSY_WAIT_US = 50_000


def open(place: str, side: str, load: str, depth: int) -> Keyed:
    return Keyed(place, busy_wait_us=BUSY_WAIT_US)
