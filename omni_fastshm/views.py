"""Tensors and arrays over memory that somebody else owns.

A result holds the buffer it lies over and nothing else: when the last tensor, array, slice or reshape of it dies,
reference counting alone gives the buffer back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_fastshm._codec import tensor_view

__all__ = ["array_view", "tensor_view"]


def array_view(buffer: Any, shape: Sequence[int], dtype: Any) -> Any:
    """An array over the bytes of `buffer`, which it keeps alive; read-only where the buffer is.

    Args:
        buffer: anything with the buffer protocol, of at least the size needed.
        shape: sizes, none of them negative.
        dtype: anything that ``numpy.dtype`` takes and that holds no Python objects.

    Returns:
        The array; the buffer lives until the last array over it dies.
    """
    import numpy as np

    return np.ndarray(tuple(shape), np.dtype(dtype), buffer)
