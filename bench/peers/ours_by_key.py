"""omni_fastshm without metadata: the consumer waits for the request id."""

from __future__ import annotations

import itertools
from typing import Any

from bench.peers.ours import FROM, TO, End, request_ids

label = "omni_fastshm, get by key"
differs = "The consumer waits in `get(timeout=…)`, by default spinning for 20 µs, then asleep; nothing is inline."
role = "ours"
own_channel = True

WITHIN_S = 60.0


class Keyed(End):
    """Request ids count on both sides."""

    def __init__(self, place: str, **settings: Any) -> None:
        super().__init__(place, key_lookup=True, **settings)
        self.wanted = itertools.cycle(request_ids())


def open(place: str, side: str, load: str, depth: int) -> Keyed:
    return Keyed(place)


def put(end: Keyed, data: Any) -> None:
    ok, _, _ = end.connector.put(FROM, TO, next(end.requests), data)
    if not ok:
        raise RuntimeError(f"put was refused: {end.connector.health()}")


def get(end: Keyed, note: None) -> Any:
    found = end.connector.get(FROM, TO, next(end.wanted), timeout=WITHIN_S)
    if found is None:
        raise TimeoutError(f"nothing came within {WITHIN_S} s")
    return found[0]
