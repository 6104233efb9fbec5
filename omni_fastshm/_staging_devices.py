"""Which runtime has which tensors, and what the codec asks about tensors on devices."""

from __future__ import annotations

import sys
from typing import Any

from omni_fastshm._staging_cuda import CudaRuntime
from omni_fastshm._staging_runtime import DeviceRuntime
from omni_fastshm.placement import Placing, path_text, placing

__all__ = ["Devices", "devices"]


class Devices:
    """The runtimes of this process, by device type. torch is not imported before something of torch came along."""

    def __init__(self) -> None:
        self._runtimes: dict[str, DeviceRuntime] = {}

    def use(self, runtime: DeviceRuntime) -> None:
        """Let `runtime` serve its type of device."""
        self._runtimes[runtime.device_type] = runtime

    def drop(self, device_type: str) -> None:
        """Forget a runtime; CUDA's is made again when it is needed."""
        self._runtimes.pop(device_type, None)

    def runtime(self, device_type: str) -> DeviceRuntime | None:
        """The runtime for a type of device, or None: its tensors then go as torch itself copies them."""
        found = self._runtimes.get(device_type)
        if found is None and device_type == "cuda":
            found = self._runtimes.setdefault("cuda", CudaRuntime())
        return found

    def pinning(self) -> DeviceRuntime | None:
        """A runtime that can page-lock memory in this process, or None."""
        if not self._runtimes:
            try:
                self.runtime("cuda")
            except ImportError:  # torch
                return None
        return next((each for each in self._runtimes.values() if each.usable()), None)

    def in_use(self) -> bool:
        """Could a payload hold tensors of any runtime?"""
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        return bool(torch.cuda.is_initialized()) or any(each.in_use() for each in self._runtimes.values())

    # -- for the codec

    def flatten(self, tensor: Any) -> Any:
        """The tensor's bytes as a flat tensor on its device; None where no runtime has it."""
        runtime = self.runtime(tensor.device.type)
        return runtime.flat(tensor) if runtime is not None and runtime.owns(tensor) else None

    def fetch(self, flat: Any) -> Any:
        """These bytes on the host; waits for the device."""
        runtime = self.runtime(flat.device.type)
        assert runtime is not None, "flatten gave it"
        return runtime.fetch(flat)

    def path_text(self, path: list[tuple[Any, bool]]) -> str:
        """The path to a tensor, as messages name it."""
        return path_text(path) or "payload"

    def placing(self, device: Any) -> Placing | None:
        """Where tensors of one payload go; None leaves all of them in host memory."""
        return placing(device)


devices = Devices()
"""Of this process."""
