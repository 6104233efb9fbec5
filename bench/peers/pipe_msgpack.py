"""Msgpack through a pipe: `multiprocessing.Pipe` with the leanest message for tensors."""

from __future__ import annotations

from typing import Any

from bench.peers import _fifo, _notes

label = "msgpack through a pipe"
differs = "The reader sleeps in the kernel; bytes are copied into and out of it."
own_channel = True
loads = _notes.LOADS


def open(place: str, side: str, load: str, depth: int) -> _fifo.Fifo:
    return _fifo.Fifo(place, side)


def put(end: _fifo.Fifo, data: Any) -> None:
    end.connection.send_bytes(_notes.encode(data))


def get(end: _fifo.Fifo, note: None) -> Any:
    return _notes.decode(end.connection.recv_bytes())
