"""The payload inside the note, by msgpack: nothing but the control plane moves it."""

from __future__ import annotations

from typing import Any

from bench.peers import _notes

label = "msgpack inside the note"
differs = "Carried by the measurement's own spinning page; for what fits a message."
loads = _notes.LOADS


def open(place: str, side: str, load: str, depth: int) -> _notes.Nothing:
    return _notes.Nothing()


def put(end: _notes.Nothing, data: Any) -> bytes:
    return _notes.encode(data)


def get(end: _notes.Nothing, note: bytes) -> Any:
    return _notes.decode(note)
