"""omni_fastshm inside vllm-omni: a connector under the host's contract, registered under names of its own.

``name: FastSharedMemoryConnector`` in a deploy file is all a user writes; see ``docs/vllm-omni.md``.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from ._vllm_contract import Keyed, Plain, Told
from ._vllm_host import Host, bindings, factory, find_host, is_installed
from ._vllm_transport import MooncakeTransport, SharedMemoryTransport

__all__ = [
    "REPLACE_VARIABLE",
    "connector_class",
    "create_fast_mooncake_connector",
    "create_fast_shared_memory_connector",
    "register",
    "replace_default",
    "restore_default",
]

logger = logging.getLogger("omni_fastshm")

REPLACE_VARIABLE = "OMNI_FASTSHM_REPLACE_DEFAULT"
"""Set to 1, it makes `register` call `replace_default` in every process of the host."""

_SHARED, _MOONCAKE = "FastSharedMemoryConnector", "FastMooncakeConnector"
_TRANSPORTS = {_SHARED: SharedMemoryTransport, _MOONCAKE: MooncakeTransport}


@functools.cache
def connector_class(name: str, *, keyed: bool | None = None, host: Host | None = None) -> Any:
    """The class behind one of our names.

    Args:
        name: "FastSharedMemoryConnector" or "FastMooncakeConnector".
        keyed: which generation's contract; None takes the host's, without one that of 0.30.
        host: what to derive from; None makes a class of its own.

    Returns:
        A class that takes the host's settings, a dict, and keeps it as `config`.
    """
    if keyed is None:
        keyed = True if host is None else host.keyed
    if name == _SHARED:
        bases: tuple[type, ...] = (Keyed if keyed else Told, Plain if host is None else host.base)
    else:  # the host cleans up after aborted requests where a connector is a SharedMemoryConnector, also a replaced one
        bases = (connector_class(_SHARED, keyed=keyed, host=host),)
    body = {
        "__doc__": f"{name} of omni-fastshm under the contract of vllm-omni.",
        "__module__": __name__,
        "make_transport": _TRANSPORTS[name],
        "serializer": None if host is None else host.serializer,
    }
    return type(name, bases, body)


def create_fast_shared_memory_connector(config: dict[str, Any]) -> Any:
    """What the host's factory calls for FastSharedMemoryConnector.

    Args:
        config: the host's settings; those of `omni_fastshm.SharedMemoryConnector` that stand among them are used.

    Returns:
        The connector; the host closes it. Where vllm-omni is not installed it keeps the contract of 0.30 all the same.

    Raises:
        ConfigError: one of our settings is wrong.
    """
    return connector_class(_SHARED, host=find_host())(config)


def create_fast_mooncake_connector(config: dict[str, Any]) -> Any:
    """What the host's factory calls for FastMooncakeConnector: Mooncake's store, for stages on several nodes.

    Args:
        config: the host's settings; those of `omni_fastshm.MooncakeConnector` that stand among them are used.

    Returns:
        The connector; the host closes it.

    Raises:
        ConfigError: one of our settings is wrong, or Mooncake is not installed.
    """
    return connector_class(_MOONCAKE, host=find_host())(config)


_CREATORS = {_SHARED: create_fast_shared_memory_connector, _MOONCAKE: create_fast_mooncake_connector}


def register() -> None:
    """Make our names known to the host's factory; the entry point of both plugin groups.

    It may be called any number of times, and does nothing where vllm-omni is not installed: vllm loads it as well.
    """
    if not is_installed():
        return
    try:
        add_names(factory())
        if is_wanted(os.environ.get(REPLACE_VARIABLE)):
            replace_default()
    except Exception as error:  # a plugin that raises would take the host's process with it
        logger.warning(
            "vllm-omni is installed, but omni-fastshm cannot be registered there: %s: %s", type(error).__name__, error
        )


def add_names(known: Any) -> None:
    """Enter our names into the host's factory, where they are not known yet."""
    names = known.list_registered_connectors()
    for name, create in _CREATORS.items():
        if name not in names:
            known.register_connector(name, create)


def is_wanted(switch: str | None) -> bool:
    """Does this value of ``OMNI_FASTSHM_REPLACE_DEFAULT`` turn it on?"""
    return (switch or "").strip().lower() in ("1", "true", "yes", "on")


def replace_default() -> None:
    """Make the host's name SharedMemoryConnector stand for ours, wherever it is used, in this process.

    Processes that the host spawns do not inherit it: set ``OMNI_FASTSHM_REPLACE_DEFAULT=1`` for those.

    Raises:
        ImportError: vllm-omni is not installed.
    """
    host = find_host()
    if host is None:
        raise ImportError("vllm_omni is not installed: there is no default to replace")
    _bind(host.base, connector_class(_SHARED, host=host))


def restore_default() -> None:
    """Undo `replace_default` in this process; connectors that exist stay what they are."""
    host = find_host()
    if host is not None:
        _bind(connector_class(_SHARED, host=host), host.base)


def _bind(old: type, new: type) -> None:
    # The host's factory looks the name up when it is called, so that this is enough for it, too.
    for module, name in bindings(old):
        setattr(module, name, new)
