"""CUDA through torch's own bindings. Nothing of it is loaded before a payload, or `device=`, asks for a CUDA device."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import AbstractContextManager
from typing import Any

from omni_fastshm._staging_runtime import DeviceRuntime, flat_bytes

__all__ = ["CudaRuntime"]

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices, whichever is current
_RUNTIME = re.compile(r"\S*/lib(?:cudart|amdhip64)[\w.-]*\.so[.\d]*$")


class CudaRuntime(DeviceRuntime):
    """All CUDA devices of this process (with torch for ROCm: all of its)."""

    device_type = "cuda"

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._side: dict[tuple[int, str], Any] = {}
        self._last_errors: list[Any] | None = None  # looked up when the first error has to be cleared

    def usable(self) -> bool:
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() or (cuda.is_available() and not cuda._is_in_bad_fork()))

    def in_use(self) -> bool:
        return bool(self._torch.cuda.is_initialized())

    def register(self, address: int, nbytes: int) -> int:
        return int(self._torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        return int(self._torch.cuda.cudart().cudaHostUnregister(address))

    def clear_error(self) -> None:
        # torch has no binding of cudaGetLastError, but it, or somebody, has the library loaded that keeps the error.
        if self._last_errors is None:
            self._last_errors = _last_errors() or [self._provoke]
        for get_last_error in self._last_errors:
            get_last_error()

    def _provoke(self) -> None:
        """With the runtime linked into torch: the next launch raises the error, which clears it."""
        try:
            self._torch.zeros(1, device="cuda")
        except RuntimeError:
            pass

    def describe_error(self, code: int) -> str:
        cudart = self._torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(cudart.cudaError(code))} ({code})"

    def owns(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda)

    def flat(self, tensor: Any) -> Any:
        return flat_bytes(tensor)

    def fetch(self, flat: Any) -> Any:
        return flat.cpu()

    def empty(self, nbytes: int, device: Any, stream: Any) -> Any:
        torch = self._torch
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))

    def key(self, device: Any) -> Any:
        index = device.get_device() if isinstance(device, self._torch.Tensor) else device.index
        return self._torch.cuda.current_device() if index is None else index

    def current_stream(self, device: Any) -> Any:
        return self._torch.cuda.current_stream(device)

    def side_stream(self, device: Any, direction: str) -> Any:
        stream = self._side.get((device, direction))
        if stream is None:
            # Of two threads that make one at the same moment, one wins: dict.setdefault is a single step.
            stream = self._side.setdefault((device, direction), self._torch.cuda.Stream(device))
        return stream

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def record(self, stream: Any, device: Any) -> Any:
        event = self._torch.cuda.Event(blocking=True)  # whoever waits sleeps
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Any, stream: Any) -> None:
        tensor.record_stream(stream)


def _last_errors() -> list[Any]:
    """cudaGetLastError of each CUDA runtime that this process has loaded; none where it is a part of something else."""
    with open("/proc/self/maps") as maps:
        paths = {found[0] for line in maps if (found := _RUNTIME.search(line.rstrip("\n")))}
    functions = []
    for path in sorted(paths):
        for name in ("cudaGetLastError", "hipGetLastError"):
            try:
                function = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), name)
            except (OSError, AttributeError):
                continue
            function.restype, function.argtypes = ctypes.c_int, []
            functions.append(function)
    return functions
