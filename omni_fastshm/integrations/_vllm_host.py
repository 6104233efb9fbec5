"""The only module that imports vllm-omni: what of it is used, found once, in whichever generation is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ._vllm_wire import Serializer

__all__ = [
    "FACTORY",
    "Host",
    "bindings",
    "factory",
    "find_host",
    "is_installed",
    "load_plugins",
    "loads_plugins_itself",
]

_CONNECTORS = "vllm_omni.distributed.omni_connectors"
FACTORY = f"{_CONNECTORS}.factory"


class Host(NamedTuple):
    """What our connectors take from the host.

    Attributes:
        base: its SharedMemoryConnector: clean-up of aborted requests goes by isinstance.
        keyed: readers find payloads by key alone (0.30); False: by metadata (December 2025).
        serializer: its wire.
    """

    base: type
    keyed: bool
    serializer: Serializer


def is_installed() -> bool:
    """Is there a vllm_omni to import? Imports nothing."""
    if "vllm_omni" in sys.modules:
        return True
    try:
        return importlib.util.find_spec("vllm_omni") is not None
    except (ImportError, ValueError):
        return False


def loads_plugins_itself() -> bool:
    """Has the installed vllm-omni plugins of its own, which it loads before it makes a connector? Imports nothing."""
    if "vllm_omni" in sys.modules:
        places = list(getattr(sys.modules["vllm_omni"], "__path__", ()))
    else:
        spec = importlib.util.find_spec("vllm_omni")
        places = list((spec.submodule_search_locations if spec else None) or ())
    return any((Path(place) / "plugins").is_dir() or (Path(place) / "plugins.py").is_file() for place in places)


@functools.cache
def find_host() -> Host | None:
    """The installed vllm-omni, or None. Imports it: 10 to 20 s where nothing else has done so.

    Raises:
        ImportError: it is installed and cannot be imported.
    """
    if not is_installed():
        return None
    module = importlib.import_module(f"{_CONNECTORS}.connectors.shm_connector")
    base = module.SharedMemoryConnector
    return Host(base, "get_key" in inspect.signature(base.get).parameters, _serializer())


def _serializer() -> Serializer:
    serializer = importlib.import_module(f"{_CONNECTORS}.utils.serialization").OmniSerializer
    # Its second step alone, where it has that: tensors are not written out and read back for the sake of a dict.
    second = getattr(getattr(serializer, "decoder", None), "_post_process", None)

    def revive(tree: Any) -> Any:
        return serializer.deserialize(serializer.serialize(tree)) if second is None else second(tree)

    return Serializer(serializer.serialize, serializer.deserialize, revive)


def factory() -> Any:
    """The host's OmniConnectorFactory."""
    return importlib.import_module(FACTORY).OmniConnectorFactory


def load_plugins() -> None:
    """As the engine core's process does, and then as all others do."""
    importlib.import_module("vllm.plugins").load_general_plugins()
    try:
        plugins = importlib.import_module("vllm_omni.plugins")
    except ModuleNotFoundError:  # that of December 2025
        return
    plugins.load_omni_general_plugins()


def bindings(cls: type) -> list[tuple[Any, str]]:
    """Where the name SharedMemoryConnector stands for `cls` in the modules of the host that are loaded."""
    name = "SharedMemoryConnector"
    return [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.partition(".")[0] == "vllm_omni" and getattr(module, "__dict__", {}).get(name) is cls
    ]
