"""iceoryx2, the subscriber sleeps until it is notified."""

from __future__ import annotations

from bench.peers._iceoryx2 import Port, get, put

__all__ = ["differs", "get", "label", "open", "own_channel", "put", "requires"]

label = "iceoryx2, event"
differs = "The reader sleeps until the writer notifies it."
own_channel = True
requires = ("iceoryx2",)


def open(place: str, side: str, load: str, depth: int) -> Port:
    return Port(place, side, load, depth, listens=True)
