"""Ray's object store: `ray.put` here, `ray.get` in another driver of the same cluster."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from bench import payloads

label = "Ray's object store"
differs = "Tensors are read-only views of the store; a cluster of its own runs on the same cores."
one_process = False
requires = ("ray",)

STORE_BYTES = 1024 * payloads.MIB


class Store:
    """A driver's connection; the cluster stays up for the loads to come."""

    def __init__(self, place: str, side: str, depth: int) -> None:
        self.kept: deque[Any] = deque(maxlen=depth)
        _join(Path(tempfile.gettempdir()) / f"{place}.ray", starts=side == "put")

    def close(self) -> None:
        self.kept.clear()


def open(place: str, side: str, load: str, depth: int) -> Store:
    return Store(place, side, depth)


def put(end: Store, data: Any) -> bytes:
    import ray
    from ray import cloudpickle

    reference = ray.put(data)
    end.kept.append(reference)
    return cloudpickle.dumps(reference)


def get(end: Store, note: bytes) -> Any:
    import ray
    from ray import cloudpickle

    return ray.get(cloudpickle.loads(note))


def _join(address: Path, starts: bool) -> None:
    import ray

    if ray.is_initialized():
        return
    # What these say goes to the terminal otherwise, and the cluster calls home.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if starts:
        ray.init(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False, **quiet)
        address.write_text(ray.get_runtime_context().gcs_address)
        atexit.register(_leave, address)
    else:
        ray.init(address=address.read_text(), **quiet)
        atexit.register(ray.shutdown)


def _leave(address: Path) -> None:
    import ray

    ray.shutdown()
    address.unlink(missing_ok=True)
