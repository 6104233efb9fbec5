"""Pickle protocol 5 for trees of tensors, buffers out of band.

Plain pickle takes a torch tensor apart through `torch.save`, in band; here tensors are reduced to their bytes by the
leanest of the ways tried.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()
    dispatch_table[torch.Tensor] = lambda tensor: _reduce(tensor)


def dumps(data: Any) -> memoryview:
    """One message, the tensors' bytes in it."""
    out = io.BytesIO()
    Pickler(out, 5).dump(data)
    return out.getbuffer()


def take_apart(data: Any) -> list[memoryview]:
    """What pickle says, then the tensors' bytes, not copied."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    Pickler(out, 5, buffer_callback=buffers.append).dump(data)
    return [out.getbuffer(), *(each.raw() for each in buffers)]


def _reduce(tensor: torch.Tensor) -> Any:
    # NumPy has no bfloat16.
    array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    buffer, code = pickle.PickleBuffer(array), CODES[tensor.dtype]
    if tensor.dim() == 1:
        return _flat, (buffer, code)
    return _shaped, (buffer, code, tuple(tensor.shape))


def _flat(buffer: Any, code: int) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=DTYPES[code])


def _shaped(buffer: Any, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=DTYPES[code]).view(shape)
