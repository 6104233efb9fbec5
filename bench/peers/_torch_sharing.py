"""torch.multiprocessing's own way: tensors in shared memory, handles pickled by its reductions.

A payload's tensors are first copied into shared memory, as torch's data loader does, because sharing moves a
tensor's own memory and leaves both sides with the same bytes; the sender could not go on using its own.
"""

from __future__ import annotations

import pickle
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import multiprocessing  # tells the pickler about tensors


class Sharing:
    def __init__(self, strategy: str, depth: int) -> None:
        self.strategy = strategy
        # The sender keeps what the other side may not have opened yet.
        self.kept: deque[Any] = deque(maxlen=depth)

    def close(self) -> None:
        self.kept.clear()


def put(end: Sharing, data: Any) -> bytes:
    multiprocessing.set_sharing_strategy(end.strategy)
    shared = _shared(data)
    end.kept.append(shared)
    return bytes(ForkingPickler.dumps(shared))


def get(end: Sharing, note: bytes) -> Any:
    return pickle.loads(note)


def _shared(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        storage = torch.UntypedStorage._new_shared(data.nbytes)
        return torch.empty(0, dtype=data.dtype).set_(storage, 0, data.shape).copy_(data)
    if isinstance(data, dict):
        return {key: _shared(value) for key, value in data.items()}
    if isinstance(data, list) and not (data and isinstance(data[0], int)):
        return [_shared(value) for value in data]
    return data
