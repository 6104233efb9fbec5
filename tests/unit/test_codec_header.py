"""The header is MessagePack, each value in its shortest form: compared with what msgspec makes of the same tree."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.child import Children

from omni_fastshm import CodecError, _codec
from omni_fastshm.codec import decode, plan, register_type


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


def header(value: Any) -> bytes:
    frame = plan(value).to_bytes()
    (size,) = struct.unpack_from("<I", frame, 4)
    return frame[16 : 16 + size]


EDGES = [0, 1, 31, 32, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]


@pytest.mark.parametrize("number", [*EDGES, *(-edge for edge in EDGES), -(2**63), 2**63, 2**64 - 1])
def test_integers(number: int) -> None:
    assert header(number) == msgspec.msgpack.encode(number)


@pytest.mark.parametrize("number", [0.0, -0.0, 1.5, 1e300, float("inf"), 5e-324])
def test_floats(number: float) -> None:
    assert header(number) == msgspec.msgpack.encode(number)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 255, 256, 4096])
def test_text_and_bytes(size: int) -> None:
    for value in ("a" * size, ("é" * size)[: size // 2], b"\x00" * size):
        assert header(value) == msgspec.msgpack.encode(value)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_containers(count: int) -> None:
    for value in ([None] * count, {str(i): False for i in range(count)}):
        assert header(value) == msgspec.msgpack.encode(value)
        assert decode(plan(value).to_bytes()) == value


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 8, 15, 16, 17, 255, 256, 65536])
def test_extension_values(size: int) -> None:
    sent = msgspec.msgpack.Ext(7, b"x" * size)
    assert header(sent) == msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"\x07" + b"x" * size))
    assert decode(plan(sent).to_bytes()) == sent


text = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary(max_size=300)
    | text,
    lambda inner: st.lists(inner, max_size=15) | st.dictionaries(text, inner),
    max_leaves=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(plain)
def test_any_plain_tree(value: Any) -> None:
    assert header(value) == msgspec.msgpack.encode(value)


class Meddler:
    """Changes what holds it while it is taken apart."""

    def __init__(self, change: Any) -> None:
        self.change = change


register_type(Meddler, lambda meddler: meddler.change(), lambda state: None, name="test_codec_header.Meddler")


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("change", ["grow", "shrink"])
def test_a_list_that_changes_while_it_is_walked(where: str, change: str) -> None:
    held: list[Any] = [None, None, None]
    held[0 if where == "first" else -1] = Meddler(lambda: held.append(1) if change == "grow" else held.pop(1))
    with pytest.raises(CodecError, match=r"outer: list cannot be carried: it changed while"):
        plan({"outer": held})


def test_a_set_that_changes_while_it_is_walked() -> None:
    held: set[Any] = set()
    held.add(Meddler(lambda: held.add(1)))
    with pytest.raises(CodecError, match=r"outer.*changed"):
        plan({"outer": held})


@pytest.mark.parametrize("name", [name for name in _codec.TORCH_DTYPES if hasattr(torch, name)])
def test_dtypes_that_dlpack_has_one_name_for_stay_apart(name: str) -> None:
    """DLPack calls an int7 an int8, say: what torch calls it counts."""
    dtype = getattr(torch, name)
    sent = torch.ones(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    got = decode(plan({"x": sent}).to_bytes())["x"]
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.view(torch.uint8).tolist() == sent.view(torch.uint8).tolist()


CROSSING = """
import torch
if not table:
    torch.Tensor.__dlpack_c_exchange_api__ = None  # as with a torch that has none
calls = []
real = torch._C._from_dlpack
torch._C._from_dlpack = lambda capsule: calls.append(capsule) or real(capsule)
from omni_fastshm import _codec
from omni_fastshm.codec import decode, plan
sent = [torch.arange(24, dtype=torch.float32).reshape(2, 3, 4), torch.ones(5, dtype=torch.int8), torch.tensor(7)]
if hasattr(torch, "int7"):
    sent.append(torch.ones(5, dtype=torch.uint8).view(torch.int7))
frame = plan(sent).to_bytes()
first = decode(frame)
calls.clear()
got = decode(plan(sent).to_bytes())
def shown(tensors):
    return [(str(t.dtype), tuple(t.shape), t.view(torch.uint8).tolist() if t.ndim else t.item()) for t in tensors]
result = len(calls), shown(got), shown(sent)
"""


@pytest.mark.parametrize("table", [True, False])
def test_tensors_cross_with_and_without_the_table_of_c_functions(children: Children, table: bool) -> None:
    """A torch before 2.10 has no such table; then capsules do the same."""
    calls, got, sent = children.start(warnings_are_errors=False).run(f"table = {table}\n{CROSSING}")
    assert got == sent
    assert calls == (0 if table and hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else len(sent))
