"""The host profile: what a reader of the host's own serializer sees."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import uuid
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from support.codec_tools import leased, round_trip, same

from omni_fastshm import CodecError, MetadataError
from omni_fastshm.codec import decode, plan


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


def host(value: Any) -> Any:
    return round_trip(value, wire="host")


class Mode(enum.Enum):
    FAST = "fast"
    PAIR = (1, 2)


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Params:
    a: int
    b: Any = None
    c: Any = msgspec.UNSET


class Payload(msgspec.Struct, omit_defaults=True):
    meta: dict[str, Any] = {}
    layers: dict[int, Any] | None = None
    flag: bool = False
    ids: list[int] = []


class Plain(msgspec.Struct):
    a: int = 1
    u: Any = msgspec.UNSET


class Tagged(msgspec.Struct, tag="t", rename="camel"):
    some_value: int


class Row(msgspec.Struct, array_like=True):
    a: int
    b: Any


SAME_AS_MSGSPEC: list[Any] = [
    None, True, 0, -(2**63), 2**64 - 1, 1.5, "é", "x" * 9000, b"ab", b"x" * 9000, bytearray(b"ab"),
    bytearray(9000), memoryview(b"ab"), [], (), (1, (2, [3, (4,)])), {1}, frozenset({2}), [(1, 2)], {"a": (1, {2})},
    {1: "a", "1": "b", None: "c", 2.5: "d", (1, (2, "x")): "e", True and "t": "f"}, {b"k": 1}, {False: 0},
    list(range(100)), tuple(range(100)), [0.5] * 30, tuple([0.5] * 30),
    Mode.FAST, Mode.PAIR, [Mode.FAST], {Mode.FAST: 1}, Point(1, 2), torch.Size([2, 3]),
    Params(1, [Mode.FAST]), Params(1, (2,), 3), Payload(), Payload({"a": 1}, {0: (1,)}, True, [1]), Payload(flag=False),
    Plain(), Plain(2, 3), Tagged(3), Row(1, (2,)), [Row(1, Row(2, 3))],
    collections.OrderedDict(a=(1,)), collections.defaultdict(list, {"a": {1}}), collections.Counter("aab"),
    uuid.uuid5(uuid.NAMESPACE_DNS, "x"), decimal.Decimal("1.50"), datetime.date(2024, 1, 2), datetime.time(1, 2, 3),
    datetime.timedelta(1, 2), datetime.datetime(2024, 1, 2, 3, 4, 5, 6),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.timezone.utc),
    {uuid.uuid5(uuid.NAMESPACE_DNS, "x"): 1}, {datetime.date(2024, 1, 2): 1},
]  # fmt: skip


@pytest.mark.parametrize("value", SAME_AS_MSGSPEC, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]!r}")
def test_the_same_as_msgspec_alone(value: Any) -> None:
    expected = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    assert same(host(value), expected)
    assert same(host({"x": [value]}), {"x": [expected]})


def test_shapes_named_by_the_host() -> None:
    assert host(slice(1, None, 2)) == [1, None, 2]
    assert host({"layers": {0: (1,), 24: [2]}}) == {"layers": {0: [1], 24: [2]}}
    assert list(host({"z": 1, "a": 2})) == ["z", "a"]
    for code in (-1, 1, 2, 3, 16, 100):
        assert same(host(msgspec.msgpack.Ext(code, b"data")), msgspec.msgpack.Ext(code, b"data"))
    assert host([1, (2, torch.ones(1))])[1][1].tolist() == [1]


def test_refused_in_this_profile() -> None:
    class Foo:
        pass

    class Text(str):
        pass

    for value in (
        2**64, -(2**63) - 1, 1j, np.float64(1), np.int64(1), np.array([None], dtype=object), Foo(), Text("a"), range(3),
        collections.deque(), "\ud800", {"\ud800": 1}, {frozenset({1}): 1}, {2**64: 1}, {Foo(): 1}, msgspec.UNSET,
        torch.float32,
    ):  # fmt: skip
        with pytest.raises(CodecError, match=r"^a\.b\b.* cannot be carried"):
            plan({"a": {"b": value}}, wire="host")


def test_keys_that_would_become_one_are_refused() -> None:
    key = uuid.uuid5(uuid.NAMESPACE_DNS, "x")
    for value in ({Mode.FAST: 1, "fast": 2}, {key: 1, str(key): 2}, {Mode.PAIR: 1, (1, 2): 2}):
        with pytest.raises(CodecError, match="two of its keys are the same"):
            plan(value, wire="host")


def test_tensors_and_arrays() -> None:
    tensors = [
        torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.5), torch.empty(0, 3), torch.arange(6).view(2, 3).t(),
        torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor([1 + 1j]).conj(), torch.ones(2, requires_grad=True),
    ]  # fmt: skip
    for tensor in tensors:
        got = host({"t": (tensor, tensor)})["t"]
        assert type(got) is list
        assert same(got[0], tensor)
        assert got[0].is_contiguous()
        assert not got[0].requires_grad
        if tensor.numel():
            assert got[0].data_ptr() != got[1].data_ptr()
    for array in (
        np.arange(3, dtype=">f4"),
        np.asfortranarray(np.eye(2, 3)),
        np.array("2020", "M8[D]"),
        np.array(["é"]),
    ):
        assert same(host([array])[0], array)
        assert host([array])[0].flags.c_contiguous


def test_images() -> None:
    got = host({"image": Image.new("RGB", (3, 2), (1, 2, 3))})["image"]
    assert (got.mode, got.size, got.getpixel((0, 0))) == ("RGB", (3, 2), (1, 2, 3))


def test_views_over_a_lease() -> None:
    payload = Payload({"t": torch.ones(5000)}, {0: torch.ones(5000)})
    frame = plan(payload, wire="host")
    from support.codec_tools import FakeLease

    lease = FakeLease(frame)
    got = decode(lease.frame, source=lease, wire="host")
    assert list(got) == ["meta", "layers"]
    assert lease.live == 2
    del got
    assert lease.live == 0


def test_both_sides_must_agree_on_the_profile() -> None:
    with pytest.raises(MetadataError, match="sent with wire='host' but is read with wire='exact'"):
        decode(plan([1], wire="host").to_bytes())
    with pytest.raises(MetadataError, match="sent with wire='exact' but is read with wire='host'"):
        decode(plan([1]).to_bytes(), wire="host")
    with pytest.raises(CodecError, match="wire is 'other'"):
        plan(1, wire="other")
    with pytest.raises(CodecError, match="wire is 'other'"):
        decode(plan(1).to_bytes(), wire="other")
    assert leased((1,))[0] == (1,)
