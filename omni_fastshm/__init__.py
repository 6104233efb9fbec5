"""omni_fastshm moves tensors between the stages of an omni-modal inference pipeline.

The names below are the promised ones. They are loaded when first used, so that importing the package costs next to
nothing and pulls in neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError("omni_fastshm runs on Linux only: it needs futexes, file locks of Linux and /dev/shm.")

from omni_fastshm.base import OmniConnectorBase
from omni_fastshm.errors import (
    CodecError,
    ConfigError,
    ConnectorClosed,
    FastShmError,
    ForkedConnector,
    LiveViews,
    MetadataError,
    MissingPayload,
    SegmentError,
    StageFailed,
    UsageError,
)

if TYPE_CHECKING:
    from omni_fastshm.adapter import recv_via_connector, try_recv_via_connector, try_send_via_connector
    from omni_fastshm.codec import register_type
    from omni_fastshm.config import (
        ConnectorSpec,
        OmniTransferConfig,
        get_connectors_config_for_stage,
        load_omni_transfer_config,
    )
    from omni_fastshm.connectors.in_process import InProcessConnector
    from omni_fastshm.connectors.mooncake import MooncakeConnector
    from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
    from omni_fastshm.factory import OmniConnectorFactory
    from omni_fastshm.initialization import (
        build_stage_connectors,
        initialize_connectors_from_config,
        initialize_orchestrator_connectors,
    )
    from omni_fastshm.observers import Transfer, add_observer, remove_observer
    from omni_fastshm.pipeline import Pipeline

__version__ = "0.1.0"

_LAZY = {
    "ConnectorSpec": "config",
    "InProcessConnector": "connectors.in_process",
    "MooncakeConnector": "connectors.mooncake",
    "OmniConnectorFactory": "factory",
    "OmniTransferConfig": "config",
    "Pipeline": "pipeline",
    "SharedMemoryConnector": "connectors.shared_memory",
    "Transfer": "observers",
    "add_observer": "observers",
    "build_stage_connectors": "initialization",
    "get_connectors_config_for_stage": "config",
    "initialize_connectors_from_config": "initialization",
    "initialize_orchestrator_connectors": "initialization",
    "load_omni_transfer_config": "config",
    "recv_via_connector": "adapter",
    "register_type": "codec",
    "remove_observer": "observers",
    "try_recv_via_connector": "adapter",
    "try_send_via_connector": "adapter",
}

__all__ = [
    "CodecError",
    "ConfigError",
    "ConnectorClosed",
    "ConnectorSpec",
    "FastShmError",
    "ForkedConnector",
    "InProcessConnector",
    "LiveViews",
    "MetadataError",
    "MissingPayload",
    "MooncakeConnector",
    "OmniConnectorBase",
    "OmniConnectorFactory",
    "OmniTransferConfig",
    "Pipeline",
    "SegmentError",
    "SharedMemoryConnector",
    "StageFailed",
    "Transfer",
    "UsageError",
    "add_observer",
    "build_stage_connectors",
    "get_connectors_config_for_stage",
    "initialize_connectors_from_config",
    "initialize_orchestrator_connectors",
    "load_omni_transfer_config",
    "recv_via_connector",
    "register_type",
    "remove_observer",
    "try_recv_via_connector",
    "try_send_via_connector",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
