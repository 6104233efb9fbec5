"""The payload inside the note, by pickle: nothing but the control plane moves it."""

from __future__ import annotations

import pickle
from typing import Any

from bench.peers import _pickle5
from bench.peers._notes import LOADS, Nothing

label = "pickle 5 inside the note"
differs = "Carried by the measurement's own spinning page; for what fits a message."
loads = LOADS


def open(place: str, side: str, load: str, depth: int) -> Nothing:
    return Nothing()


def put(end: Nothing, data: Any) -> bytes:
    return bytes(_pickle5.dumps(data))


def get(end: Nothing, note: bytes) -> Any:
    return pickle.loads(note)
