"""The payload inside the note, by msgpack: nothing but the control plane moves it."""

from __future__ import annotations

from typing import Any

from bench.peers import _framing
from bench.peers._notes import LOADS, Nothing

label = "msgpack inside the note"
differs = "Carried by the measurement's own spinning page; for what fits a message."
loads = LOADS


def open(place: str, side: str, load: str, depth: int) -> Nothing:
    return Nothing()


def put(end: Nothing, data: Any) -> bytearray:
    frame = _framing.Frame(data)
    message = bytearray(frame.size)
    frame.pack_into(_framing.address_of(message))
    return message


def get(end: Nothing, note: bytearray) -> Any:
    return _framing.unpack(note)
