"""What the peers share that put a whole payload into one message: msgpack with tensors as extension values."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import torch

LOADS = ("S1", "S2", "S3")  # what fits the control plane's page, and a pipe
DTYPES = (torch.float32, torch.bfloat16)
FLAT = {dtype: code for code, dtype in enumerate(DTYPES)}
SHAPED = 64  # added to the code; then the number of dimensions and the shape come before the bytes


class Nothing:
    """An end without anything to keep."""

    def close(self) -> None:
        pass


def encode(data: Any) -> bytes:
    return ENCODER.encode(data)


def decode(message: Any) -> Any:
    """The payload; its tensors have memory of their own."""
    return DECODER.decode(message)


def _tensor_out(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
    code = FLAT[tensor.dtype]
    array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if tensor.dim() == 1:
        return msgspec.msgpack.Ext(code, memoryview(array).cast("B"))
    shape = struct.pack(f"<B{tensor.dim()}Q", tensor.dim(), *tensor.shape)
    return msgspec.msgpack.Ext(SHAPED + code, shape + array.tobytes())


def _tensor_in(code: int, data: memoryview) -> torch.Tensor:
    if code < SHAPED:
        return torch.frombuffer(bytearray(data), dtype=DTYPES[code])
    start = 1 + 8 * data[0]
    shape = struct.unpack_from(f"<{data[0]}Q", data, 1)
    return torch.frombuffer(bytearray(data[start:]), dtype=DTYPES[code - SHAPED]).view(shape)


ENCODER = msgspec.msgpack.Encoder(enc_hook=_tensor_out)
DECODER = msgspec.msgpack.Decoder(ext_hook=_tensor_in)
