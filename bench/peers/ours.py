"""omni_fastshm itself, with its default settings; each message is a request of its own."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from omni_fastshm import SharedMemoryConnector

label = "omni_fastshm"
role = "ours"

FROM, TO = "thinker", "talker"
Note = tuple[str, dict[str, Any]]


# More than the hashes that the library remembers (`omni_fastshm.keys`), so that each message's id is new to it.
IDS = 20_000


@functools.cache
def request_ids() -> tuple[str, ...]:
    """What a user has at hand when he sends; the other peers send no ids at all."""
    return tuple(f"chatcmpl-{number:012d}" for number in range(IDS))


class End:
    """A connector and the request ids of its messages, the same on both ends."""

    def __init__(self, place: str, **settings: Any) -> None:
        self.connector = SharedMemoryConnector({"namespace": place, **settings})
        self.requests = itertools.cycle(request_ids())

    def close(self) -> None:
        self.connector.close()


def open(place: str, side: str, load: str, depth: int) -> End:
    return End(place)


def put(end: End, data: Any) -> Note:
    request = next(end.requests)
    ok, _, metadata = end.connector.put(FROM, TO, request, data)
    if not ok:
        raise RuntimeError(f"put was refused: {end.connector.health()}")
    return request, metadata


def get(end: End, note: Note) -> Any:
    request, metadata = note
    found = end.connector.get(FROM, TO, request, metadata)
    if found is None:
        raise RuntimeError(f"nothing came: {end.connector.health()}")
    return found[0]
