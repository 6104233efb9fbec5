"""Pickle 5 through a pipe: `multiprocessing.Pipe` with the leanest pickler for tensors."""

from __future__ import annotations

import pickle
from typing import Any

from bench.peers import _fifo, _pickle5
from bench.peers._notes import LOADS

label = "pickle 5 through a pipe"
differs = "The reader sleeps in the kernel; bytes are copied into and out of it."
own_channel = True
loads = LOADS


def open(place: str, side: str, load: str, depth: int) -> _fifo.Fifo:
    return _fifo.Fifo(place, side)


def put(end: _fifo.Fifo, data: Any) -> None:
    end.connection.send_bytes(_pickle5.dumps(data))


def get(end: _fifo.Fifo, note: None) -> Any:
    return pickle.loads(end.connection.recv_bytes())
