"""Ray's object store: `ray.put` here, `ray.get` in another driver of the same cluster."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import tempfile
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch

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


def put(end: Store, data: Any) -> tuple[Any, ...]:
    import ray

    reference = ray.put(data)
    end.kept.append(reference)
    # What cloudpickle does with a reference, without its keeping the object for ever.
    same, owner, status = ray._private.worker.global_worker.core_worker.serialize_object_ref(reference)
    return same.binary(), same.call_site(), owner, status


def get(end: Store, note: tuple[Any, ...]) -> Any:
    import ray
    from ray._private.serialization import _object_ref_deserializer

    return ray.get(_object_ref_deserializer(*note, None))


def _join(address: Path, starts: bool) -> None:
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return
    if starts:
        where, token = None, secrets.token_hex(32)
    else:
        where, token = address.read_text().split()
    # Before the import, which reads them; without the last it calls home.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_USAGE_STATS_ENABLED="0")
    import ray

    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # its own processes shall not share the producer's core
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if starts:
        ray.init(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False, **quiet)
        address.touch(0o600)
        address.write_text(f"{ray.get_runtime_context().gcs_address} {token}")
        atexit.register(_leave, address)
    else:
        ray.init(address=where, **quiet)
        atexit.register(ray.shutdown)
    os.sched_setaffinity(0, pinned)
    # By itself it carries a tensor by torch's own pickling: in band, copied twice more.
    ray.util.register_serializer(torch.Tensor, serializer=_array, deserializer=_tensor)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def _array(tensor: torch.Tensor) -> tuple[Any, bool]:
    bfloat = tensor.dtype is torch.bfloat16
    return (tensor.view(torch.int16) if bfloat else tensor).numpy(), bfloat


def _tensor(sent: tuple[Any, bool]) -> torch.Tensor:
    array, bfloat = sent
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat else tensor


def _leave(address: Path) -> None:
    import ray

    ray.shutdown()
    address.unlink(missing_ok=True)
