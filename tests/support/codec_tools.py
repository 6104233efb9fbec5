"""What the codec's tests share: strict equality, and a lease over plain memory that counts its views."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import torch

from omni_fastshm.codec import Plan, decode, plan


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor in row order, whatever its dtype."""
    plain = tensor.detach()
    if plain.dtype is torch.complex32 and not plain.is_conj():
        plain = torch.view_as_real(plain)  # torch warns when it makes a complex32 tensor of its own
    plain = plain.resolve_conj().resolve_neg()
    if not plain.is_contiguous() and plain.element_size() <= 2:
        plain = plain.view(torch.uint8 if plain.element_size() == 1 else torch.int16)  # torch cannot copy all others
    plain = plain.contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal in type and value at each depth; nan equals nan, 0.0 differs from -0.0, dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if type(a) is memoryview:
        return (a.format, a.shape, a.readonly, a.tobytes()) == (b.format, b.shape, b.readonly, b.tobytes())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if type(a) is slice:
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def round_trip(value: Any, **options: Any) -> Any:
    """Encode, check what the plan said about sizes, decode on own memory."""
    planned = plan(value, **{k: v for k, v in options.items() if k in ("wire", "allow_pickle")})
    frame = planned.to_bytes()
    assert len(frame) == planned.frame_size == planned.size
    return decode(frame, **options)


class _Bytes(ctypes.Array[ctypes.c_char]):
    _type_ = ctypes.c_char
    _length_ = 0


class FakeLease:
    """A frame in memory of its own, 64-byte aligned, behind the interface of a lease.

    Args:
        planned: what to write there.
    """

    def __init__(self, planned: Plan) -> None:
        self._memory = bytearray(planned.frame_size + 64)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._shift = -start % 64
        self.address = start + self._shift
        self.size = planned.frame_size
        self.live = 0
        self.asked: list[tuple[int, int, bool]] = []
        self.outside: dict[int, bytearray] = {}
        planned.pack_into(self.address)

    @property
    def frame(self) -> memoryview:
        return memoryview(self._memory)[self._shift : self._shift + self.size]

    def view(self, offset: int, nbytes: int, readonly: bool) -> Any:
        assert offset + nbytes <= self.size
        self.asked.append((offset, nbytes, readonly))
        return self._export(self._memory, self._shift + offset, nbytes, readonly)

    def external(self, segment: int, offset: int, nbytes: int, readonly: bool) -> Any:
        self.asked.append((offset, nbytes, readonly))
        return self._export(self.outside[segment], offset, nbytes, readonly)

    def _export(self, memory: bytearray, offset: int, nbytes: int, readonly: bool) -> Any:
        lease = self

        class View(_Bytes):
            _type_ = ctypes.c_char
            _length_ = nbytes

            def __del__(self) -> None:
                lease.live -= 1

        view = View.from_buffer(memory, offset)
        self.live += 1
        return memoryview(view).toreadonly() if readonly else view


def leased(value: Any, **options: Any) -> tuple[Any, FakeLease]:
    """The payload decoded over a fake lease, and that lease."""
    lease = FakeLease(plan(value))
    return decode(lease.frame, source=lease, **options), lease
