"""One module per way to move a payload, all with the same four names, so that one loop measures them all.

A peer is a module of this folder with

``label``
    what the tables call it.
``open(place, side, load, depth)``
    one end of a channel for the load of that name: an object with ``close()``. `place` is a prefix for
    everything that the peer creates in /dev/shm, the same on both ends; `side` is ``"put"``, ``"get"`` or
    ``"both"``; `depth` is how many messages may be under way at once. The putting end is opened first. Whatever can
    be prepared once is prepared here, outside of the timing.
``put(end, data)``
    sends; returns the note that the control plane carries to the other end: best as bytes, else plain data, whose
    tuples arrive as lists (`bench/notes.py`).
``get(end, note)``
    returns the payload, ready for use. It stays valid until the caller drops it, and the caller drops it
    before `depth` more were put.

and, where the defaults of `Peer` do not fit, any of its other fields under the same name. To add one: write the file,
name it in `NAMES`. What it needs beyond this project's own dependencies it imports inside ``open`` and names in
``requires``, so that the others can be measured without it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from typing import Any, Literal, Protocol

# In the order of the tables' rows.
NAMES = (
    "ours",
    "ours_by_key",
    "ours_pipe",
    "memcpy",
    "bare_copy",
    "iceoryx2_spin",
    "iceoryx2_event",
    "zmq_ipc",
    "inline_msgpack",
    "inline_pickle",
    "pipe_msgpack",
    "pipe_pickle",
    "shared_memory_view",
    "shared_memory_pickle",
    "torch_file_descriptor",
    "torch_file_system",
    "ray_store",
    "new_segment",
)
# For measurements of their own; they are in no table of peers.
OTHERS = ("futex", "ours_awake", "ours_aget")


class End(Protocol):
    """One end of a peer's channel."""

    def close(self) -> None:
        """Give everything back, names in /dev/shm included. What `get` returned must be dropped before."""


@dataclass(frozen=True)
class Peer:
    """What a module of this folder says about itself.

    Args:
        label: what the tables call it.
        open: see above.
        put: see above.
        get: see above.
        differs: what a reader of its figures must know, as one sentence.
        own_channel: it carries its messages itself: `put` returns None, and ``get(end, None)`` waits.
        role: ours is compared with each rival; a limit is no transport.
        one_process: both ends work in one thread of one process.
        streams: several messages may be under way.
        loads: the loads that it is meant for, None for all.
        requires: what it imports beyond this project's dependencies.
    """

    label: str
    open: Callable[[str, str, str, int], End]
    put: Callable[[Any, Any], Any]
    get: Callable[[Any, Any], Any]
    differs: str = ""
    own_channel: bool = False
    role: Literal["ours", "rival", "limit"] = "rival"
    one_process: bool = True
    streams: bool = True
    loads: tuple[str, ...] | None = None
    requires: tuple[str, ...] = ()

    def takes(self, load: str) -> bool:
        return self.loads is None or load in self.loads

    @property
    def missing(self) -> str | None:
        """Which of its packages is not installed here."""
        return next((each for each in self.requires if importlib.util.find_spec(each) is None), None)


@functools.cache
def load_peer(name: str) -> Peer:
    """The peer of that name, one of `NAMES` or `OTHERS`."""
    module = import_module(f"bench.peers.{name}")
    given = {each.name: getattr(module, each.name, each.default) for each in fields(Peer)}
    absent = [field for field, value in given.items() if value is MISSING]
    if absent:
        raise TypeError(f"bench/peers/{name}.py lacks {', '.join(absent)}")
    return Peer(**given)
