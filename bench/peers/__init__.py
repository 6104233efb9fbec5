"""One module per way to move a payload, all with the same four names, so that one loop measures them all.

A peer is a module of this folder with

``label``
    what the tables call it.
``open(place, side, load)``
    one end of a channel for the load of that name: an object with ``close()``. `place` is a prefix for
    everything that the peer creates in /dev/shm, the same on both ends; `side` is ``"put"``, ``"get"`` or
    ``"both"``. The putting end is opened first. Whatever can be prepared once is prepared here, outside of
    the timing.
``put(end, data)``
    sends; returns the note (any small picklable object) that the control plane carries to the other end.
``get(end, note)``
    returns the payload, ready for use. It stays valid until the caller drops it; the next `put` comes after
    that.

To add one: write the file, name it in `NAMES`. What it needs beyond this project's own dependencies it
imports inside ``open``, so that the others can be measured without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

# In the order of the tables' columns.
NAMES = ("ours", "memcpy", "shared_memory_pickle", "new_segment")


class End(Protocol):
    """One end of a peer's channel."""

    def close(self) -> None:
        """Give everything back, names in /dev/shm included. What `get` returned must be dropped before."""


class Peer(Protocol):
    """The four names; a module of this folder satisfies it."""

    label: str

    def open(self, place: str, side: str, load: str) -> End: ...
    def put(self, end: Any, data: Any) -> Any: ...
    def get(self, end: Any, note: Any) -> Any: ...


def load_peer(name: str) -> Peer:
    """The peer of that name, one of `NAMES`."""
    return cast("Peer", import_module(f"bench.peers.{name}"))
