"""For the generation of December 2025, which makes connectors in processes that have not loaded any general plugin.

Its head and its asynchronous stages do. What vllm loads early in each of its processes are plugins for platforms: ours
stands for no platform, but has our names entered as soon as the host's factory is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._vllm_host import FACTORY, is_installed, loads_plugins_itself
from .vllm_omni import REPLACE_VARIABLE, add_names, is_wanted, replace_default

__all__ = ["platform"]

logger = logging.getLogger("omni_fastshm")

_DEFAULT = "SharedMemoryConnector"


def platform() -> None:
    """The entry point in ``vllm.platform_plugins``: never one; nothing where the host loads plugins itself."""
    try:
        if not is_installed() or loads_plugins_itself():
            return
        module = sys.modules.get(FACTORY)
        if module is not None:
            _enter(module)
        elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watcher())
    except Exception as error:  # vllm would pass over it in silence
        logger.warning("omni-fastshm cannot be registered with vllm-omni: %s: %s", type(error).__name__, error)


class _Watcher(importlib.abc.MetaPathFinder):
    """Lets the import of the host's factory go its way, and enters our names after it."""

    _looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != FACTORY or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Entering(spec.loader)
        return spec


class _Entering(importlib.abc.Loader):
    """Another loader, which is not changed, for it may have other modules to load; and our names after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _enter(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watcher)]


def _enter(module: ModuleType) -> None:
    factory = getattr(module, "OmniConnectorFactory", None)
    if factory is None:  # its import is under way, by somebody who came before us
        logger.warning("omni-fastshm came too late for vllm-omni's factory: its names are known only to its plugins")
        return
    add_names(factory)
    if is_wanted(os.environ.get(REPLACE_VARIABLE)):
        _replace_at_first_use(factory._registry)


def _replace_at_first_use(registry: dict[str, Any]) -> None:
    """`replace_default` imports more of the host than may be imported while the host is being imported itself."""
    theirs = registry[_DEFAULT]

    def create(config: dict[str, Any]) -> Any:
        registry[_DEFAULT] = theirs
        try:
            replace_default()
        except Exception as error:
            logger.warning("the default cannot be replaced: %s: %s", type(error).__name__, error)
        return theirs(config)

    registry[_DEFAULT] = create
