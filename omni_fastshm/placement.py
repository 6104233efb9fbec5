"""The argument `device` of `get`: one device for all tensors, or several by their path in the payload."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import check_device, describe

__all__ = ["ByPath", "OneDevice", "Path", "Placing", "check_placement", "path_text", "placing"]

Path = list[tuple[Any, bool]] | None
"""``(step, is it a key?)`` from the payload down; None where nobody asked for it."""

_REST = "*"
_SHOWN = 8
_MOST_TOLD = 1024
_told: set[str] = set()  # paths that led to nothing, of which the log has been told

_log = logging.getLogger("omni_fastshm")


class Placing(Protocol):
    """Where the tensors of one payload go."""

    def target(self, path: Path) -> Any:
        """The device for the tensor there; None leaves it in host memory."""

    def done(self) -> None:
        """All tensors of the payload were asked about."""

    def move(self, tensor: Any, target: Any) -> Any:
        """The tensor on that device."""


class OneDevice:
    """All tensors go to one device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def target(self, path: Path) -> Any:
        return self.device

    def done(self) -> None:
        pass

    def move(self, tensor: Any, target: Any) -> Any:
        return tensor.to(target)


class ByPath:
    """Each tensor goes where the longest matching entry says; without one it stays in host memory."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._rest = None if _is_host(entries.get(_REST)) else entries[_REST]
        named = [(key, None if _is_host(device) else device) for key, device in entries.items() if key != _REST]
        self._named = sorted(named, key=lambda each: -len(each[0]))
        self._unused = {key for key, _ in named}
        self._there: list[str] = []  # the first tensors, for the message

    def target(self, path: Path) -> Any:
        text = path_text(path or [])
        if len(self._there) < _SHOWN:
            self._there.append(text or "the payload itself")
        fits = [(key, device) for key, device in self._named if _is_under(text, key)]
        self._unused.difference_update(key for key, _ in fits)
        return fits[0][1] if fits else self._rest

    def done(self) -> None:
        # A warning, not an error: one map may serve payloads of several kinds.
        for key in sorted(self._unused - _told) if self._there else ():
            if len(_told) < _MOST_TOLD:
                _told.add(key)
            _log.warning("device: no tensor is at %r; there are %s; said once", key, self._shown())

    def _shown(self) -> str:
        return ", ".join(self._there) + (", …" if len(self._there) == _SHOWN else "")

    def move(self, tensor: Any, target: Any) -> Any:
        return tensor.to(target)


def _is_under(text: str, key: str) -> bool:
    return text.startswith(key) and text[len(key) : len(key) + 1] in ("", ".", "[")


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
    if hasattr(device, "target"):
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
            _checked_once(path, each)
        else:
            _checked(path, each)


def _checked(path: str, device: Any) -> None:
    try:
        check_device(device)
    except ConfigError as error:
        raise ConfigError(f"device[{path!r}]: {str(error).removeprefix('device: ')}") from None


_checked_once = functools.lru_cache(maxsize=256)(_checked)
