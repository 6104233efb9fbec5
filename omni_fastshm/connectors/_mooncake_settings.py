"""The settings of a MooncakeConnector, and the endpoint of the store that they name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import Setting, describe

from ._mooncake_net import is_own_address, own_address, split_address
from ._mooncake_session import Endpoint
from ._shared_settings import CODEC, LINGER, PUT_TIMEOUT

__all__ = ["SETTINGS", "endpoint_of"]

_log = logging.getLogger("omni_fastshm")

_MIN_SEGMENT = 16 << 20

SETTINGS: dict[str, Setting] = {
    "master": Setting("str", None, env=True, help="host:port of the Mooncake master; must be given"),
    "host": Setting(
        "str",
        None,
        env=True,
        help="address of this node that the others reach; default the one that leads to the master",
    ),
    "metadata_server": Setting(
        "str", "P2PHANDSHAKE", env=True, help="P2PHANDSHAKE, or http://host:8080/metadata; the same for all nodes"
    ),
    "segment": Setting(
        "size",
        512 << 20,
        env=True,
        help="memory that this node gives to the store; 0 (puts go to others) or from 16 MiB on",
    ),
    "localbuf": Setting("size", 256 << 20, env=True, help="memory for received payloads while views on them live"),
    "proto": Setting("choice", "tcp", choices=("tcp", "rdma"), env=True, help="how the bytes cross the network"),
    "rdma": Setting("str", "", env=True, help="RDMA devices, as mlx5_0,mlx5_1; empty lets Mooncake choose"),
    "get_timeout_s": Setting(
        "seconds", 30.0, minimum=1, help="how long one transfer may take; whole seconds; the process's first one counts"
    ),
    "setup_timeout_s": Setting("seconds", 10.0, help="how long to wait for the master when the connector is built"),
    "put_timeout_s": PUT_TIMEOUT,
    "hard_pin": Setting("bool", True, help="untaken payloads are never evicted: a full store makes put wait"),
    "max_bytes": Setting(
        "bytes",
        None,
        minimum=4096,
        help="most bytes of this connector's untaken payloads; default, with hard_pin: what is left of `segment`",
    ),
    "shm_threshold_bytes": Setting(
        "bytes", 65536, help="payloads from this serialized size on go to the store, smaller ones into the metadata"
    ),
    "namespace": Setting(
        "str", None, env=True, help="which connectors see each other; default $OMNI_FASTSHM_NAMESPACE, else 'default'"
    ),
    "key_lookup": Setting("bool", False, help="payloads can be got by (edge, request id) alone; all go to the store"),
    "linger_s": LINGER,
    **CODEC,
}


def endpoint_of(settings: Mapping[str, Any]) -> Endpoint:
    """Which client of the store they mean.

    Args:
        settings: as parsed by `SETTINGS`.

    Raises:
        ConfigError: `master` is missing, or a size cannot be used.
    """
    master, segment = settings["master"], settings["segment"]
    if master and not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):[0-9]{1,5}", master):
        raise ConfigError(f"MooncakeConnector: master: {describe(master)} is not of the form host:port")
    if not master:
        raise ConfigError(
            "MooncakeConnector: master: must be given, as host:port (`omni-fastshm mooncake up` prints it)"
        )
    if 0 < segment < _MIN_SEGMENT:
        raise ConfigError(
            f"MooncakeConnector: segment: {segment} is too small: the least is {_MIN_SEGMENT}, or 0 for none"
        )
    if settings["localbuf"] == 0:
        raise ConfigError("MooncakeConnector: localbuf: 0 leaves no memory to receive in")
    host = (settings["host"] or "").strip() or own_address(master)
    address = split_address(host)  # Mooncake takes a port as well, as a part of the node's name
    if not is_own_address(host if address is None else address[0]):
        _log.warning("host %r is no address of this machine: other nodes may not reach what is put here", host)
    if settings["proto"] == "rdma" and not os.path.isdir("/sys/class/infiniband"):
        _log.warning("proto is rdma, but this machine has no RDMA device: Mooncake may go over TCP without a word")
    return Endpoint(
        host, settings["metadata_server"], master, segment, settings["localbuf"], settings["proto"], settings["rdma"]
    )
