"""Tensors and arrays over lent memory, to be produced in place."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from omni_fastshm.errors import ConfigError


def make_loan(shape: Sequence[int] | int, dtype: Any, lend: Callable[[int], Any]) -> Any:
    """An uninitialised tensor (for a ``torch.dtype``) or array over memory from `lend`.

    Args:
        shape: of the result.
        dtype: a ``torch.dtype``, or anything that ``numpy.dtype`` takes and that holds no Python objects.
        lend: gives a writable buffer of that many bytes, which the result keeps alive.

    Raises:
        ConfigError: `shape` or `dtype` cannot be used.
    """
    sizes = _sizes(shape)
    if type(dtype).__module__ == "torch":
        return _tensor(sizes, dtype, lend)
    import numpy as np

    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"allocate: {dtype!r} is neither a torch nor a NumPy dtype", op="allocate") from error
    if kind.hasobject:
        raise ConfigError(f"allocate: {kind} holds Python objects, which cannot be shared", op="allocate")
    nbytes = math.prod(sizes) * kind.itemsize
    return np.ndarray(sizes, kind, buffer=lend(nbytes)) if nbytes else np.empty(sizes, kind)


def _tensor(sizes: tuple[int, ...], dtype: Any, lend: Callable[[int], Any]) -> Any:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"allocate: {dtype!r} is not a dtype", op="allocate")
    count = math.prod(sizes)
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    memory = lend(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize).view(dtype).view(sizes)


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError as error:
        raise ConfigError(f"allocate: {shape!r} is not a shape", op="allocate") from error
    if isinstance(shape, bool) or any(n < 0 for n in sizes):
        raise ConfigError(f"allocate: {shape!r} is not a shape", op="allocate")
    return sizes
