"""From a pipeline's configuration to open connectors, under the names that the ecosystem uses."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from .base import OmniConnectorBase
from .config import (
    DEFAULT_CONNECTOR,
    DEFAULT_SHM_THRESHOLD,
    ConnectorSpec,
    OmniTransferConfig,
    load_omni_transfer_config,
)
from .errors import ConfigError
from .factory import OmniConnectorFactory
from .settings import describe, stage_name

__all__ = [
    "build_stage_connectors",
    "create_connectors_from_config",
    "initialize_connectors_from_config",
    "initialize_orchestrator_connectors",
]

Edge = tuple[str, str]
Connectors = dict[Edge, OmniConnectorBase]
Source = str | os.PathLike[str] | Mapping[str, Any] | None

_THRESHOLD = "shm_threshold_bytes"

_log = logging.getLogger(__name__)


def create_connectors_from_config(connectors_config: Mapping[Edge, ConnectorSpec]) -> Connectors:
    """Build one connector for each edge.

    Args:
        connectors_config: the backend of each edge.

    Returns:
        The connectors, by edge. The caller closes them.

    Raises:
        ConfigError: one cannot be built; the message names the edge. Those built before it are closed again.
    """
    made: Connectors = {}
    try:
        for (start, end), spec in connectors_config.items():
            try:
                made[start, end] = OmniConnectorFactory.create_connector(spec)
            except ConfigError as error:
                raise ConfigError(f"edge {start} -> {end}: {error}", op="open") from error
    except BaseException:
        for connector in made.values():
            connector.close()
        raise
    return made


def build_stage_connectors(stage_id: str | int, connectors_config: Any) -> Connectors:
    """Build the connectors that one stage needs.

    Args:
        stage_id: the stage.
        connectors_config: what `get_connectors_config_for_stage` returned for it.

    Returns:
        The connectors by edge, both the incoming and the outgoing ones. The caller closes them.

    Raises:
        ConfigError: the configuration has another shape, or a connector cannot be built.
    """
    stage = stage_name(stage_id, "stage_id")
    if connectors_config is None:
        return {}
    if not isinstance(connectors_config, Mapping):
        shown = describe(connectors_config)
        raise ConfigError(f"stage {stage}: connectors_config must be a mapping, not {shown}")
    specs: dict[Edge, ConnectorSpec] = {}
    for key, value in connectors_config.items():
        edge = _edge_of(stage, key)
        spec = value.get("spec") if isinstance(value, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
            shape = "{'spec': {'name': …, 'extra': {…}}}"
            raise ConfigError(f"stage {stage}: {key} must be {shape}, not {describe(value)}")
        extra = spec.get("extra")
        specs[edge] = ConnectorSpec(spec["name"], {} if extra is None else extra)
    return create_connectors_from_config(specs)


def _edge_of(stage: str, key: Any) -> Edge:
    if isinstance(key, str):
        for prefix in ("from_stage_", "to_stage_"):
            other = key.removeprefix(prefix)
            if key.startswith(prefix) and other:
                return (other, stage) if prefix == "from_stage_" else (stage, other)
    raise ConfigError(f"stage {stage}: the key {describe(key)} is neither from_stage_ID nor to_stage_ID")


def initialize_connectors_from_config(
    config_path: Source = None, default_shm_threshold: int = DEFAULT_SHM_THRESHOLD
) -> tuple[OmniTransferConfig, Connectors]:
    """Read a pipeline's configuration and build a connector for each of its edges.

    Args:
        config_path: the file, or the configuration as a dict.
        default_shm_threshold: bytes from which on payloads go to shared memory, on edges whose settings do
            not say it.

    Returns:
        The configuration and the connectors by edge; both are empty where nothing is configured. The caller
        closes the connectors.

    Raises:
        ConfigError: the configuration is wrong or a connector cannot be built; nothing stays open.
    """
    config = load_omni_transfer_config(config_path, default_shm_threshold=default_shm_threshold)
    config = _with_threshold(config, config.default_connector.extra[_THRESHOLD], force=False)
    return config, create_connectors_from_config(config.connectors)


def initialize_orchestrator_connectors(
    config_path: Source = None,
    worker_backend: Any = None,
    shm_threshold_bytes: int | None = None,
) -> tuple[OmniTransferConfig, Connectors]:
    """Build the connectors that the process needs which hands requests from stage to stage.

    Args:
        config_path: the file, or the configuration as a dict.
        worker_backend: "ray" means that stages may run on other nodes: every payload of a
            SharedMemoryConnector then travels inside its metadata, whatever threshold the file gives.
        shm_threshold_bytes: bytes from which on payloads go to shared memory, on edges whose settings do not
            say it; None is 65536.

    Returns:
        The configuration and the connectors by edge. The caller closes the connectors.

    Raises:
        ConfigError: the configuration is wrong, a connector cannot be built, or "ray" is combined with an
            edge that has ``key_lookup``, whose payloads are found in shared memory only.
    """
    if worker_backend is not None and not isinstance(worker_backend, str):
        raise ConfigError(f"worker_backend: {describe(worker_backend)} is not text")
    threshold = DEFAULT_SHM_THRESHOLD if shm_threshold_bytes is None else shm_threshold_bytes
    if worker_backend != "ray":
        return initialize_connectors_from_config(config_path, threshold)
    config = load_omni_transfer_config(config_path, default_shm_threshold=sys.maxsize)
    config = _with_threshold(config, sys.maxsize, force=True)
    return config, create_connectors_from_config(config.connectors)


def _with_threshold(config: OmniTransferConfig, threshold: int, *, force: bool) -> OmniTransferConfig:
    """`config` with this threshold on the edges that have none; with `force` on all of them."""
    connectors = dict(config.connectors)
    for (start, end), spec in connectors.items():
        if not OmniConnectorFactory.same_backend(spec.name, DEFAULT_CONNECTOR):
            continue
        given = spec.extra.get(_THRESHOLD)
        if force and str(spec.extra.get("key_lookup")).strip().lower() == "true":
            raise ConfigError(f"edge {start} -> {end}: key_lookup cannot be combined with worker_backend 'ray'")
        if force and given is not None and given != threshold:
            _log.warning("edge %s -> %s: with ray all is inline; its %s is not used", start, end, _THRESHOLD)
        if given is None or force:
            connectors[start, end] = ConnectorSpec(spec.name, {**spec.extra, _THRESHOLD: threshold})
    return dataclasses.replace(config, connectors=connectors)
