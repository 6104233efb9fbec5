"""From a connector's name in a pipeline's file to a connector."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from .base import OmniConnectorBase
from .errors import ConfigError
from .settings import ONLY_IN_HOST, Setting, describe, is_import_path, nearest

__all__ = ["ConnectorSpec", "OmniConnectorFactory"]

Target = str | Callable[[Any], Any]


@dataclass(frozen=True)
class ConnectorSpec:
    """Which connector, with which settings.

    Args:
        name: a name that `OmniConnectorFactory` knows, or ``"module:Class"``.
        extra: its settings; the connector is built with this very dict.
    """

    name: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Backend:
    """A backend that comes with this package; `needs` and `install` are of what it imports from elsewhere."""

    target: str
    needs: str | None = None
    install: str | None = None


_MOONCAKE = _Backend(
    "omni_fastshm.connectors.mooncake:MooncakeConnector",
    "mooncake",
    "pip install 'omni-fastshm[mooncake]', in a checkout '.[mooncake]'",
)
_BUILT_IN: Mapping[str, _Backend] = {
    "SharedMemoryConnector": _Backend("omni_fastshm.connectors.shared_memory:SharedMemoryConnector"),
    "InProcessConnector": _Backend("omni_fastshm.connectors.in_process:InProcessConnector"),
    "MooncakeConnector": _MOONCAKE,
    "MooncakeStoreConnector": _MOONCAKE,
}
_IN_HOST: Mapping[str, str] = {
    "FastSharedMemoryConnector": "SharedMemoryConnector",
    "FastMooncakeConnector": "MooncakeConnector",
}
"""What vllm-omni's factory knows our connectors by: files made for it can be checked, planned and tried here."""


class OmniConnectorFactory:
    """Builds connectors by name; a backend's module is imported when its first connector is built."""

    _registered: dict[str, Target] = {}  # noqa: RUF012 - shared on purpose: names are known to the whole process
    _lock = Lock()

    @classmethod
    def register_connector(cls, name: str, target: Target, *, replace: bool = False) -> None:
        """Make a connector of yours known under a name, in this process.

        A stage that is started as a new process does not inherit it; where that matters, write
        ``name: "module:Class"`` into the pipeline's file instead.

        Args:
            name: as written in the file.
            target: ``"module:Class"``, imported when the first one is built, or a callable that is given the
                settings (a dict) and returns a connector.
            replace: True takes over a name that is known already, also a built-in one.

        Raises:
            ConfigError: the name is taken, or name or target cannot be used.
        """
        if not isinstance(name, str) or not name or ":" in name:
            raise ConfigError(f"a connector's name must be text without a colon, not {describe(name)}")
        if not callable(target) and not is_import_path(target):
            raise ConfigError(
                f"connector {name!r}: the target must be 'module:Class' or a callable, not {describe(target)}"
            )
        with cls._lock:
            if not replace and (name in cls._registered or name in _BUILT_IN):
                raise ConfigError(f"connector {name!r} is known already; replace=True takes its place")
            cls._registered[name] = target

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """All names that `create_connector` knows, sorted."""
        return sorted({*_BUILT_IN, *cls._registered})

    @classmethod
    def create_connector(cls, spec: ConnectorSpec) -> OmniConnectorBase:
        """Build a connector.

        Args:
            spec: its name and settings.

        Returns:
            The connector; the caller closes it.

        Raises:
            ConfigError: the name is unknown, the backend's package is missing, or a setting is wrong.
        """
        problem = cls.name_problem(spec.name)
        if problem:
            raise ConfigError(problem)
        spec = cls.spec_here(spec)
        name, extra = spec.name, spec.extra
        build = cls._resolve(name)
        connector = build({} if extra is None else extra)
        if not callable(getattr(connector, "put", None)) or not callable(getattr(connector, "get", None)):
            raise ConfigError(f"connector {name!r}: {describe(connector)} has no put and get")
        return connector  # type: ignore[no-any-return]

    @classmethod
    def name_problem(cls, name: Any) -> str | None:
        """What is wrong with a connector's name; None where it is known. Imports nothing."""
        if not isinstance(name, str):
            return f"a connector's name must be text, not {describe(name)}"
        known = cls.list_registered_connectors()
        if name in known or name in _IN_HOST or is_import_path(name):
            return None
        return (
            f"there is no connector {name!r}{nearest(name, [*known, *_IN_HOST]) or '.'} Known: {', '.join(known)}. "
            "A connector of your own is named 'module:Class', or made known with register_connector"
        )

    @classmethod
    def name_here(cls, name: str) -> str | None:
        """What a name of ours inside vllm-omni stands for in this package; None for every other name."""
        return None if name in cls._registered else _IN_HOST.get(name)

    @classmethod
    def spec_here(cls, spec: ConnectorSpec) -> ConnectorSpec:
        """A connector under the name that it has in this package.

        Args:
            spec: its name and settings.

        Returns:
            The same, without what only vllm-omni reads of its settings; `spec` itself where it has such a name already.
        """
        here = cls.name_here(spec.name)
        if here is None:
            return spec
        table = cls.settings_of(here) or {}
        return ConnectorSpec(here, {key: value for key, value in spec.extra.items() if key in table})

    @classmethod
    def missing_backend(cls, name: str) -> str | None:
        """What has to be installed before this connector can be built; None where nothing is missing."""
        backend = cls._built_in(name)
        if backend is None or backend.needs is None:
            return None
        if _spec_exists(backend.needs):
            return None
        return f"{name} needs the package {backend.needs!r}, which is not installed: {backend.install}"

    @classmethod
    def settings_of(cls, name: str) -> Mapping[str, Setting] | None:
        """The settings of a built-in connector; None where they are not known before it is built."""
        backend = cls._built_in(name)
        if backend is None:
            return None
        try:
            module = importlib.import_module(backend.target.partition(":")[0])
        except ImportError:
            return None
        table: Mapping[str, Setting] | None = getattr(module, "SETTINGS", None)
        return {**table, **ONLY_IN_HOST} if table is not None and name in _IN_HOST else table

    @classmethod
    def same_backend(cls, one: str, other: str) -> bool:
        """Whether two names stand for the same backend, as an alias and its original do."""
        if one == other:
            return True
        if one in cls._registered or other in cls._registered:
            return False
        return (cls._built_in(one) or one) == (cls._built_in(other) or other)

    @classmethod
    def _built_in(cls, name: str) -> _Backend | None:
        return None if name in cls._registered else _BUILT_IN.get(_IN_HOST.get(name, name))

    @classmethod
    def _resolve(cls, name: str) -> Callable[[Any], Any]:
        target: Target = cls._registered.get(name) or (_BUILT_IN[name].target if name in _BUILT_IN else name)
        if not isinstance(target, str):
            return target
        missing = cls.missing_backend(name)
        if missing:
            raise ConfigError(missing)
        module_name, _, attribute = target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
        except ImportError as error:
            raise ConfigError(f"connector {name!r}: {module_name} cannot be imported: {error}") from error
        except AttributeError as error:
            raise ConfigError(f"connector {name!r}: {module_name} has no {attribute}") from error
        if not callable(found):
            raise ConfigError(f"connector {name!r}: {target} is {describe(found)}, which cannot be called")
        return found  # type: ignore[no-any-return]


def _spec_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
