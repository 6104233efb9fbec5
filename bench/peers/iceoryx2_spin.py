"""iceoryx2, the subscriber asks again and again."""

from __future__ import annotations

from bench.peers._iceoryx2 import Port, get, put

__all__ = ["differs", "get", "label", "open", "own_channel", "put", "requires"]

label = "iceoryx2, spinning"
differs = "The reader's core is busy while it waits."
own_channel = True
requires = ("iceoryx2",)


def open(place: str, side: str, load: str, depth: int) -> Port:
    return Port(place, side, load, depth, listens=False)
