"""Payload trees of Python objects: how many bytes they hold, and copies of them with other leaves.

Neither torch nor numpy is imported: where a module was never imported, no payload can hold its objects.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omni_fastshm.errors import CodecError, ConfigError
from omni_fastshm.placement import ByPath, OneDevice, Placing, path_text
from omni_fastshm.settings import describe

__all__ = ["buffer_bytes", "moved", "own_copy", "shared_copy"]


def buffer_bytes(tree: Any) -> int:
    """The bytes in all buffers of `tree`: tensors, arrays, bytes, bytearrays, memoryviews; each object once.

    Args:
        tree: any payload.

    Returns:
        The sum in bytes; nothing is copied.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    total = 0
    for leaf in _leaves(tree):
        if isinstance(leaf, (bytes, bytearray)):
            total += len(leaf)
        elif isinstance(leaf, memoryview):
            total += leaf.nbytes
        elif torch is not None and isinstance(leaf, torch.Tensor):
            total += _tensor_bytes(leaf)
        elif numpy is not None and isinstance(leaf, numpy.ndarray):
            total += int(leaf.nbytes)
    return total


def _tensor_bytes(tensor: Any) -> int:
    torch = sys.modules["torch"]
    if tensor.layout == torch.strided:
        return int(tensor.numel() * tensor.element_size())
    if tensor.layout == torch.sparse_coo:
        return _tensor_bytes(tensor._indices()) + _tensor_bytes(tensor._values())
    # The other layouts keep their values in tensors of their own accessors; the dense size is a bound.
    return int(tensor.numel() * tensor.element_size())


def moved(tree: Any, device: Any) -> Any:
    """A copy of the containers of `tree`, its tensors on `device`; all other leaves are the same objects.

    Args:
        tree: any payload.
        device: as for ``torch.Tensor.to``, or a dict of these by path (see `placement.ByPath`). A tensor that stands at
            several places goes where the first of them says.

    Returns:
        The new tree; a tensor that is on the device already is the same object.

    Raises:
        CodecError: a container cannot be copied, or a tensor not be moved.
        ConfigError: torch knows no such device.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return tree
    if isinstance(device, Mapping):
        return _moved(tree, ByPath(device), torch)
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"device: {describe(device)} is no device: {error}") from None
    return _moved(tree, OneDevice(target), torch)


def _moved(tree: Any, where: Placing, torch: Any) -> Any:
    targets: dict[int, Any] = {}
    places: dict[int, str] = {}
    waiting: list[tuple[Any, list[tuple[Any, bool]]]] = [(tree, [])]
    while waiting:
        item, path = waiting.pop()
        if isinstance(item, torch.Tensor):
            if id(item) not in targets:
                targets[id(item)], places[id(item)] = where.target(path), path_text(path) or "payload"
        elif not isinstance(item, (str, bytes)) and id(item) not in targets:
            targets[id(item)] = None  # a container that holds itself ends here
            steps = [(part, [*path, step]) for step, part in _steps(item)]
            waiting.extend(reversed(steps))

    def move(leaf: Any) -> Any:
        target = targets.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        if target is None:
            return leaf
        try:
            return leaf.to(target)
        except Exception as error:
            what = f"{places[id(leaf)]}: the tensor cannot be moved to {target}"
            raise CodecError(f"{what}: {type(error).__name__}: {error}") from error

    result = _rebuilt(tree, move)
    where.done()
    return result


def _steps(item: Any) -> list[tuple[tuple[Any, bool], Any]]:
    """What a container holds, with ``(step, is it a key?)`` to each; nothing for a leaf."""
    if isinstance(item, Mapping):
        return [((key, True), part) for key, part in item.items()]
    parts = _parts(item)
    if parts is None:
        return []
    if isinstance(item, (list, tuple, set, frozenset)):
        return [((index, False), part) for index, part in enumerate(parts)]
    names = [name for name in (_fields(item) or ()) if hasattr(item, name)]
    return [((name, True), part) for name, part in zip(names, parts, strict=True)]


def own_copy(tree: Any) -> Any:
    """A copy of `tree` that shares no memory with it; tensors come detached from any gradient.

    Args:
        tree: any payload.

    Returns:
        The copy.

    Raises:
        CodecError: something in it cannot be copied.
    """
    return _rebuilt(tree, _cloned)


def shared_copy(tree: Any) -> Any:
    """What one of several takers gets: arrays as read-only views, everything else as its own copy.

    Args:
        tree: any payload.

    Returns:
        The copy; the arrays in it look at the memory of those in `tree`.

    Raises:
        CodecError: something in it cannot be copied.
    """
    numpy = sys.modules.get("numpy")

    def share(leaf: Any) -> Any:
        if numpy is None or not isinstance(leaf, numpy.ndarray):
            return _cloned(leaf)
        view = leaf.view()
        view.flags.writeable = False
        return view

    return _rebuilt(tree, share)


_DEEP = object()
"""A leaf that copy.deepcopy shall copy."""


def _cloned(leaf: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        # Not copy.deepcopy: it refuses tensors with a gradient, and copies all storage under a small view.
        return leaf.detach().clone()
    if isinstance(leaf, memoryview):
        return memoryview(bytes(leaf) if leaf.readonly else bytearray(leaf)).cast("B")
    return _DEEP


def _rebuilt(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A deep copy of `tree` in which each leaf is what `change` makes of it."""
    changed = ((id(leaf), change(leaf)) for leaf in _leaves(tree))
    memo = {key: new for key, new in changed if new is not _DEEP}
    try:
        return copy.deepcopy(tree, memo)
    except MemoryError:
        raise
    except Exception as error:
        # deepcopy runs whatever the classes in the payload define, and those may raise anything.
        raise CodecError(f"cannot be copied: {error}") from error


def _leaves(tree: Any) -> Iterator[Any]:
    """Everything in `tree` that is no container, each object once; no recursion, so that any depth goes."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if item is None or isinstance(item, (str, int, float)) or id(item) in seen:
            continue
        seen.add(id(item))
        parts = _parts(item)
        if parts is None:
            yield item
        else:
            waiting.extend(parts)


def _parts(item: Any) -> list[Any] | None:
    """What a container holds; None for a leaf."""
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, type):
        return None
    names = _fields(item)
    return None if names is None else [getattr(item, name) for name in names if hasattr(item, name)]


def _fields(item: Any) -> list[str] | None:
    if dataclasses.is_dataclass(item):
        return [field.name for field in dataclasses.fields(item)]
    struct = getattr(type(item), "__struct_fields__", None)
    return list(struct) if isinstance(struct, tuple) else None
