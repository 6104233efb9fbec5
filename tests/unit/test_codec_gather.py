"""`Plan.gather`: the same frame as `to_bytes`, as parts, with large leaves left where they lie."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import torch

from omni_fastshm import codec
from omni_fastshm.errors import CodecError


def joined(plan: codec.Plan, direct_from: int) -> bytes:
    addresses, sizes, memory = plan.gather(direct_from)
    assert all(sizes)
    assert sum(sizes) % 64 == 0
    text = b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, sizes, strict=True))
    del memory
    return text


@pytest.mark.parametrize("direct_from", [1, 100, 4097, 1 << 40])
def test_the_parts_are_the_frame(direct_from: int) -> None:
    rng = random.Random(direct_from)
    for n in range(150):
        tree = {
            "n": n,
            "list": [np.arange(rng.randrange(20_000), dtype=np.uint8) for _ in range(rng.randrange(6))],
            "tensor": torch.arange(rng.randrange(9000)),
            "text": "x" * rng.randrange(5000),
            "nothing": torch.empty(0),
        }
        plan = codec.plan(tree)
        frame = plan.to_bytes()
        text = joined(plan, direct_from)
        assert text[: len(frame)] == frame
        assert len(text) - len(frame) < 64
        assert not any(text[len(frame) :])


def test_large_leaves_are_named_where_they_lie() -> None:
    tensor, array, small = torch.arange(5000), np.arange(5000), np.arange(3)
    addresses, sizes, memory = codec.plan([tensor, array, small]).gather(4097)
    places = dict(zip(addresses, sizes, strict=True))
    assert places[tensor.data_ptr()] == 40_000
    assert places[array.ctypes.data] == 40_000
    assert small.ctypes.data not in places
    assert len(memory) < 1000, "bytes of a large leaf were copied"


def test_with_a_limit_above_all_there_is_one_part() -> None:
    plan = codec.plan([torch.arange(5000)] * 3)
    addresses, sizes, memory = plan.gather(plan.frame_size + 1)
    assert len(addresses) == 1
    assert len(memory) == sizes[0]


def test_a_loan_cannot_be_gathered() -> None:
    class Loans:
        def claim(self, address: int, nbytes: int) -> tuple[int, int]:
            return 1, 0

    plan = codec.plan(torch.arange(5000), loans=Loans())
    with pytest.raises(CodecError, match="gathered"):
        plan.gather(1)
