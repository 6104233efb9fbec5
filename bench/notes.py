"""What crosses between the processes of a measurement, as bytes: each note in the cheapest form that carries it.

Bytes cross as they are, plain data as msgpack, and only what msgpack cannot carry as a pickle. A peer thus pays for its
own note and for nobody else's: one that moves a payload as a single message sends just that message, and metadata of a
few names and numbers costs what it costs its user to send them on.
"""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

BYTES, MSGPACK, PICKLE = range(3)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def pack(note: Any) -> tuple[int, bytes]:
    """A note's kind and its bytes; a tuple in it comes back as a list."""
    if type(note) is bytes:
        return BYTES, note
    try:
        return MSGPACK, _encode(note)
    except (TypeError, OverflowError):  # an object of some class, an int of more than 64 bits
        return PICKLE, pickle.dumps(note, 5)


def unpack(kind: int, message: memoryview | bytes) -> Any:
    """The note of that kind."""
    if kind == BYTES:
        return bytes(message)
    return _decode(message) if kind == MSGPACK else pickle.loads(message)
