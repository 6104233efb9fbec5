"""Any tree of the carried types survives a round trip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.codec_tools import leased, round_trip, same

from omni_fastshm import _codec

DTYPES = [getattr(torch, name) for name in _codec.TORCH_DTYPES if hasattr(torch, name)]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4) | st.just(40), max_size=4))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.tensor(list((draw(st.binary(min_size=1, max_size=8)) * count)[:count]), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).reshape(shape)  # viewed, not made: torch warns when some are made
    if shape and draw(st.booleans()):
        tensor = tensor.transpose(0, len(shape) - 1)
    return tensor


def arrays() -> st.SearchStrategy[Any]:
    plain = (
        npst.boolean_dtypes() | npst.integer_dtypes() | npst.unsigned_integer_dtypes() | npst.floating_dtypes()
        | npst.complex_number_dtypes() | npst.datetime64_dtypes() | npst.timedelta64_dtypes()
        | npst.byte_string_dtypes(max_len=3) | npst.unicode_string_dtypes(max_len=3)
    )  # fmt: skip
    dtype = plain | npst.array_dtypes(plain, max_size=3)
    shape = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    return dtype.flatmap(lambda d: npst.arrays(d, shape, fill=st.nothing()))


text = st.text() | st.text(st.characters(categories=["Cs", "Ll"]), max_size=4)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
leaves = (
    keys | st.floats() | st.complex_numbers() | st.integers(-(2**130), 2**130) | st.binary(max_size=40).map(bytearray)
    | st.slices(5) | st.sampled_from([b"x" * 5000, "é" * 3000, list(range(300)), (0.5,) * 40, range(3)])
    | tensors() | arrays() | npst.arrays("f8", ()).map(lambda array: array[()])
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(keys, inner, max_size=5)
        | st.sets(keys, max_size=4) | st.lists(st.integers(), min_size=16, max_size=20)
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.time_limit(180)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trees)
def test_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)
    got, lease = leased(value)
    assert same(got, value)
    del got
    assert lease.live == 0


@pytest.mark.time_limit(180)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(tensors() | arrays(), max_size=6))
def test_copies_and_views_agree(value: list[Any]) -> None:
    for options in ({"copy": True}, {"copy": False}, {"writable": False}, {"copy_below": 0}):
        got, lease = leased(value, **options)
        assert same(got, value)
        del got
        assert lease.live == 0
