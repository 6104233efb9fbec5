"""Memory to produce a payload in place: what `allocate` takes, and tensors and arrays over lent memory."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

from omni_fastshm.errors import ConfigError, SegmentError
from omni_fastshm.settings import describe
from omni_fastshm.views import array_view, tensor_view


def make_loan(shape: Any, dtype: Any, lend: Callable[[int], Any]) -> Any:
    """An uninitialised tensor (for a ``torch.dtype``) or array over memory from `lend`.

    Args:
        shape: of the result.
        dtype: a ``torch.dtype``, or anything that ``numpy.dtype`` takes and that holds no Python objects.
        lend: gives a writable buffer of that many bytes, which the result keeps alive; not asked for 0 bytes.

    Raises:
        ConfigError: `shape` or `dtype` cannot be used.
    """
    sizes = check_shape(shape)
    of_torch = is_torch_dtype(dtype)
    kind = dtype if of_torch else check_numpy_dtype(dtype)
    nbytes = math.prod(sizes) * kind.itemsize
    if nbytes == 0:
        return plain(sizes, kind)
    return (tensor_view if of_torch else array_view)(lend(nbytes), sizes, kind)


def own_memory(shape: Any, dtype: Any) -> Any:
    """The same in memory of its own, for connectors that lend none.

    Raises:
        ConfigError: `shape` or `dtype` cannot be used.
        SegmentError: there is not so much memory.
    """
    sizes = check_shape(shape)
    kind = dtype if is_torch_dtype(dtype) else check_numpy_dtype(dtype)
    try:
        return plain(sizes, kind)
    except (MemoryError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise SegmentError(f"no memory for {describe(sizes)} of {dtype}: {error}", op="allocate") from None


def plain(sizes: tuple[int, ...], kind: Any) -> Any:
    """The same in memory of its own, for a shape and dtype that were checked."""
    if is_torch_dtype(kind):
        import torch

        return torch.empty(sizes, dtype=kind)
    import numpy as np

    return np.empty(sizes, dtype=kind)


def is_torch_dtype(dtype: Any) -> bool:
    """Does this ask for a tensor? Whoever has a ``torch.dtype`` has imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def check_shape(shape: Any) -> tuple[int, ...]:
    """The sizes that `shape` stands for: a whole number, or whole numbers, none of them negative.

    Raises:
        ConfigError: it is something else.
    """
    given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    try:
        sizes = tuple(operator.index(size) for size in given)
    except TypeError:
        raise ConfigError(f"shape: {describe(shape)} is neither a whole number nor a list of them") from None
    if any(isinstance(size, bool) for size in given) or any(size < 0 for size in sizes):
        raise ConfigError(f"shape: {describe(shape)} has a size that is not a number of at least 0")
    return sizes


def check_numpy_dtype(dtype: Any) -> Any:
    """The ``numpy.dtype`` that `dtype` stands for.

    Raises:
        ConfigError: NumPy does not know it, or it holds Python objects, which cannot be shared.
    """
    import numpy as np

    try:
        made = np.dtype(dtype)
        problem = "it holds references to Python objects, not data" if made.hasobject else ""
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"dtype: {describe(dtype)} cannot be used: {problem}")
    return made
