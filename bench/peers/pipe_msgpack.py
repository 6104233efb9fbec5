"""Msgpack through a pipe: `multiprocessing.Pipe` with the leanest framing for tensors."""

from __future__ import annotations

from typing import Any

from bench.peers import _fifo, _framing

label = "msgpack through a pipe"
differs = "The reader sleeps in the kernel; bytes are copied into and out of it."
own_channel = True
loads = _fifo.LOADS


def open(place: str, side: str, load: str, depth: int) -> _fifo.Fifo:
    return _fifo.Fifo(place, side)


def put(end: _fifo.Fifo, data: Any) -> None:
    frame = _framing.Frame(data)
    message = bytearray(frame.size)
    frame.pack_into(_framing.address_of(message))
    end.connection.send_bytes(message)


def get(end: _fifo.Fifo, note: None) -> Any:
    return _framing.unpack(bytearray(end.connection.recv_bytes()))
