"""Tensors and arrays over memory that somebody else owns."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from omni_fastshm import CodecError, MetadataError
from omni_fastshm._codec import Window
from omni_fastshm.views import array_view, tensor_view


def test_a_tensor_is_a_view_and_holds_the_buffer() -> None:
    memory = bytearray(24)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16):
        tensor = tensor_view(memory, (24 // dtype.itemsize,), dtype)
        assert tensor.dtype is dtype
        with pytest.raises(BufferError):
            memory.append(0)
        del tensor
        memory.append(0)
        memory.pop()
    tensor = tensor_view(memory, (2, 3), torch.float32)
    tensor[1, 2] = 1.5
    assert memory[20:24] == np.float32(1.5).tobytes()
    part = tensor[1]
    del tensor
    with pytest.raises(BufferError):
        memory.append(0)
    assert part[2] == 1.5


def test_shapes_and_sizes_are_checked() -> None:
    memory = bytearray(24)
    assert tensor_view(memory, (), torch.float32).shape == ()
    assert tensor_view(memory, (0, 3), torch.float32).shape == (0, 3)
    assert tensor_view(memoryview(bytes(8)), (2,), torch.float32).tolist() == [0, 0]
    for shape in ((7,), (2, 4), (1 << 40, 1 << 40), (-1,), (-2, -3)):
        with pytest.raises(MetadataError):
            tensor_view(memory, shape, torch.float32)
    with pytest.raises(MetadataError, match="more than 64"):
        tensor_view(memory, (1,) * 65, torch.uint8)
    with pytest.raises(CodecError, match="dtype"):
        tensor_view(memory, (2,), "float32")
    memory.append(0)  # no failed attempt kept the buffer


def test_an_array_is_a_view_and_read_only_where_the_buffer_is() -> None:
    memory = bytearray(24)
    array = array_view(memory, (2, 3), "f4")
    array[1, 2] = 1.5
    assert memory[20:24] == np.float32(1.5).tobytes()
    assert not array_view(bytes(8), [2], np.float32).flags.writeable
    base = bytearray(8)
    before = sys.getrefcount(base)
    array = array_view(base, (2,), "f4")
    assert sys.getrefcount(base) == before + 1
    del array
    assert sys.getrefcount(base) == before


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is immortal from 3.12 on, nothing counts it")
def test_views_keep_no_reference_to_none() -> None:
    """Cython puts None into each buffer before it asks whose it is."""
    memory = Window(tensor_view(bytearray(8), (8,), torch.uint8).data_ptr(), 0, None)
    before = sys.getrefcount(None)
    for _ in range(1000):
        memoryview(memory).release()
    assert sys.getrefcount(None) - before < 500
