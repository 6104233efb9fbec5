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
    """Lets the import of the host's factory go its way, once, and enters our names after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != FACTORY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_enter(module: ModuleType) -> None:
            load(module)
            _enter(module)

        spec.loader.exec_module = load_and_enter  # type: ignore[method-assign]
        return spec


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
