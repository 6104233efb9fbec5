"""The argument `device` of `get`: one device for all tensors, or several by their path in the payload."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import check_device, describe

__all__ = ["ByPath", "OneDevice", "Path", "Placing", "check_placement", "path_text", "placing"]

Path = list[tuple[Any, bool]] | None
"""``(step, is it a key?)`` from the payload down; None where nobody asked for it."""

_REST = "*"


class Placing(Protocol):
    """Where the tensors of one payload go."""

    by_path: bool

    def target(self, path: Path) -> Any:
        """The device for the tensor there; None leaves it in host memory."""

    def move(self, tensor: Any, target: Any) -> Any:
        """The tensor on that device."""


class OneDevice:
    """All tensors go to one device."""

    by_path = False

    def __init__(self, device: Any) -> None:
        self.device = device

    def target(self, path: Path) -> Any:
        return self.device

    def move(self, tensor: Any, target: Any) -> Any:
        return tensor.to(target)


class ByPath:
    """Each tensor goes where the longest matching entry says; without one it stays in host memory."""

    by_path = True

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._rest = None if _is_host(entries.get(_REST)) else entries[_REST]
        named = [(key, None if _is_host(device) else device) for key, device in entries.items() if key != _REST]
        self._named = sorted(named, key=lambda each: -len(each[0]))

    def target(self, path: Path) -> Any:
        text = path_text(path or [])
        for key, device in self._named:
            if text.startswith(key) and text[len(key) : len(key) + 1] in ("", ".", "["):
                return device
        return self._rest

    def move(self, tensor: Any, target: Any) -> Any:
        return tensor.to(target)


def path_text(path: list[tuple[Any, bool]]) -> str:
    """A path as messages of the codec name it: ``engine_inputs.hidden[3]``; the payload itself is ``""``."""
    text = ""
    for step, is_key in path:
        if is_key and type(step) is str and step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text


def placing(device: Any) -> Placing | None:
    """What `device` means; None where all tensors stay in host memory.

    Args:
        device: as for `check_placement`, checked; or a `Placing`, which is given back.
    """
    if hasattr(device, "by_path"):
        return device  # type: ignore[no-any-return]
    if isinstance(device, Mapping):
        return ByPath(device) if any(not _is_host(each) for each in device.values()) else None
    return None if _is_host(device) else OneDevice(device)


def _is_host(device: Any) -> bool:
    return device is None or device == "cpu" or str(device) == "cpu"


def check_placement(device: Any) -> None:
    """Is this where tensors can arrive?

    Args:
        device: None, what ``torch.device`` takes, or a dict of these by path, as
            ``{"engine_inputs": "cuda:0", "*": "cpu"}``.

    Raises:
        ConfigError: torch does not know a device, or a path is no text.
    """
    if not isinstance(device, Mapping):
        check_device(device)
        return
    for path, each in device.items():
        if not isinstance(path, str) or not path:
            raise ConfigError(f"device: {describe(path)} is no path in a payload, such as 'engine_inputs.hidden[0]'")
        if isinstance(each, Mapping):
            raise ConfigError(f"device[{path!r}]: {describe(each)} is no device; write the whole path as one key")
        if isinstance(each, str):
            _checked(path, each)
        else:
            check_device(each)


@functools.lru_cache(maxsize=256)
def _checked(path: str, device: str) -> None:
    try:
        check_device(device)
    except ConfigError as error:
        raise ConfigError(f"device[{path!r}]: {str(error).removeprefix('device: ')}") from None
