"""A payload as one block of bytes: its tensors side by side, then a msgpack message that says where they are.

What a user of a transport for raw bytes writes by hand. Of the ways tried (pickle 5 out of band with several
reducers, msgpack with a list of tensors) the leanest for one tensor and for sixty-four.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

ALIGNMENT = 64
TENSOR = 1
DTYPES = (torch.float32, torch.bfloat16)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
PREFIX = struct.Struct("<QQ")  # where the message is, and how long
PLACES = [struct.Struct(f"<BBQ{dims}Q") for dims in range(5)]  # dtype, apart or not, where, shape


class Frame:
    """A payload taken apart.

    Args:
        data: the payload; it must stay as it is until it was packed.
        apart_from: tensors of this many bytes on are not packed but listed in `apart`, None for none.
    """

    def __init__(self, data: Any, apart_from: int | None = None) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.apart: list[torch.Tensor] = []
        self._limit = math.inf if apart_from is None else apart_from
        self._end = ALIGNMENT
        self.message = msgspec.msgpack.Encoder(enc_hook=self._tensor).encode(data)
        self.size = self._end + len(self.message)

    def _tensor(self, tensor: torch.Tensor) -> msgspec.msgpack.Ext:
        nbytes = tensor.nbytes
        shape = tensor.shape
        if nbytes >= self._limit:
            where, apart = len(self.apart), 1
            self.apart.append(tensor)
        else:
            where, apart = self._end, 0
            self.pieces.append((where, tensor.data_ptr(), nbytes))
            self._end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        place = PLACES[len(shape)].pack(CODES[tensor.dtype], apart, where, *shape)
        return msgspec.msgpack.Ext(TENSOR, place)

    def pack_into(self, address: int) -> None:
        """Write `size` bytes there."""
        copy = ctypes.memmove
        for where, source, nbytes in self.pieces:
            copy(address + where, source, nbytes)
        copy(address + self._end, self.message, len(self.message))
        copy(address, PREFIX.pack(self._end, len(self.message)), PREFIX.size)


def unpack(buffer: Any, apart: Sequence[Any] = ()) -> Any:
    """The payload; its tensors are views of `buffer`, which they keep, and of the buffers in `apart`."""

    def tensor(_: int, place: memoryview) -> torch.Tensor:
        code, elsewhere, where, *shape = PLACES[(len(place) - 10) // 8].unpack(place)
        flat = (
            torch.frombuffer(apart[where], dtype=DTYPES[code])
            if elsewhere
            else torch.frombuffer(buffer, dtype=DTYPES[code], count=math.prod(shape), offset=where)
        )
        return flat if len(shape) == 1 else flat.view(shape)

    where, size = PREFIX.unpack_from(buffer)
    return msgspec.msgpack.Decoder(ext_hook=tensor).decode(memoryview(buffer)[where : where + size])


def address_of(buffer: Any) -> int:
    """Of a writable buffer's first byte; the caller keeps the buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
