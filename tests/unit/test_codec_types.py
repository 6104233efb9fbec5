"""Types come back as they were sent, or are refused by name (exact profile)."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import pathlib
import types
import uuid
import warnings
import zoneinfo
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin, TiffImagePlugin
from support.codec_tools import leased, round_trip, same

from omni_fastshm import CodecError, _codec
from omni_fastshm.codec import decode, plan


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 127, 128, -32, -33, -129, 65536, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63),
    2**63, 2**64 - 1, 2**64, -(2**63) - 1, 2**200, -(2**200),
    0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1.7976931348623157e308,
    1 + 2j, complex(float("nan"), -0.0),
    "", "a", "é✓", "x" * 31, "x" * 32, "x" * 300, "x" * 70000, "é" * 40000, "\ud800 lone", "\0", "😀",
    b"", b"abc", b"x" * 300, b"x" * 100000, bytearray(b""), bytearray(b"abc"), bytearray(b"y" * 50000),
    memoryview(b"abc"), memoryview(bytearray(b"abc")), memoryview(b""),
    memoryview(np.arange(6, dtype="i4").reshape(2, 3)), memoryview(b"abcdef")[::2],
    [], (), {}, set(), frozenset(), [[]], ((),), [()], ([],), {"": {}},
    list(range(15)), list(range(16)), tuple(range(16)), list(range(-200, 200)), list(range(-40000, 40000, 7)),
    [2**31] * 20, [2**62] * 20, [-(2**63)] * 16, [2**63] * 20, [0.5] * 20, tuple([float("nan")] * 17),
    [1] * 20 + [True], [1] * 20 + [1.0], [1.0] * 20 + [None], [True] * 20, ["a"] * 20, [1] * 20 + [2**70],
    {1, 2, 3}, frozenset({"a", (1, 2)}), {frozenset({1}), frozenset({2})},
    {1: "a", "1": "b"}, {True: 1}, {None: 1}, {1.5: 1}, {(1, (2, "x")): 1}, {b"k": 1}, {frozenset({1}): 2},
    {2**70: 1}, {"\ud800": 1}, {"é": 1}, {-1: 0, 2**63: 1}, {1 + 2j: 1}, {"a": {1: {(): []}}},
    slice(None), slice(1, None, 2), slice("a", (1,), None), range(3), range(10, 0, -2), Ellipsis,
    msgspec.UNSET, msgspec.msgpack.Ext(1, b"x"), msgspec.msgpack.Ext(-7, b""), msgspec.msgpack.Ext(16, b"\0"),
]  # fmt: skip

STANDARD: list[Any] = [
    uuid.uuid5(uuid.NAMESPACE_DNS, "x"),
    decimal.Decimal("1.50"),
    decimal.Decimal("-0"),
    decimal.Decimal("1E+400"),
    fractions.Fraction(-1, 3),
    datetime.datetime(2024, 2, 29, 23, 59, 59, 999999),
    datetime.datetime(2024, 1, 1, fold=1, tzinfo=datetime.timezone.utc),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "here")),
    datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    datetime.date(1, 1, 1),
    datetime.time(1, 2, 3, 4, fold=1),
    datetime.timedelta(-1, 1, 1),
    datetime.timezone.utc,
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("c:\\x"),
    collections.OrderedDict([("b", 1), ("a", [1, (2,)])]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}),
    collections.Counter("abca"),
    collections.deque([1, (2,)], maxlen=5),
    types.SimpleNamespace(a=1, b=(2,)),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.strided,
    torch.channels_last,
    torch.device("cuda", 1),
    np.dtype("<f4"),
    np.dtype([("a", ">i2"), ("b", "<U3", (2,))]),
]


@pytest.mark.parametrize("value", PLAIN + STANDARD, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]!r}")
def test_comes_back_as_it_was_sent(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip([{"deep": (value,)}]), [{"deep": (value,)}])
    over_lease, lease = leased({"x": value})
    assert same(over_lease, {"x": value})
    del over_lease
    assert lease.live == 0


def test_keys_keep_type_and_order() -> None:
    value = {"z": 1, 3: 2, (1, "a"): 3, None: 4, 2.5: 5, b"b": 6, "a": 7, True: 8}
    assert same(round_trip(value), value)
    assert [type(key) for key in round_trip({True: 1})] == [bool]


def test_numbers_tuples_slices() -> None:  # R45
    value = {
        "i": np.int64(3), "f": np.float32(1.5), "b": np.bool_(True), "t": (1, (2, [3, (4,)])), "L": list(range(40)),
        "T": tuple(range(40)), "s": slice(1, None, 2), "z": torch.Size([2, 3]), "e": (),
    }  # fmt: skip
    assert same(round_trip(value), value)


def test_received_containers_are_new_objects() -> None:
    inner = [1, 2]
    value = {"a": inner, "b": inner}
    got = round_trip(value)
    got["a"].append(3)
    assert got["b"] == [1, 2]
    assert inner == [1, 2]


def test_defaultdict_keeps_its_factory_and_refuses_foreign_ones() -> None:
    got = round_trip(collections.defaultdict(list))
    got["new"].append(1)
    assert got == {"new": [1]}
    with pytest.raises(CodecError, match=r"x: defaultdict cannot be carried: .*default_factory"):
        plan({"x": collections.defaultdict(lambda: 0)})


# -- tensors

DTYPES = [getattr(torch, name) for name in _codec.TORCH_DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
SHAPES = [(), (1,), (3, 4), (0,), (0, 5), (5, 0, 2), (2, 1, 3), (1030,), (33, 65)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_every_dtype_and_shape(dtype: torch.dtype) -> None:  # R34
    for shape in SHAPES:
        count = int(np.prod(shape)) * dtype.itemsize
        raw = torch.arange(count, dtype=torch.int64).to(torch.uint8)
        if dtype is torch.bool:
            raw = raw % 2
        tensor = raw.view(dtype).reshape(shape)  # viewed, not made: torch warns when some are made
        for got in (round_trip(tensor), leased(tensor)[0]):
            assert same(got, tensor), shape
            assert got.is_contiguous()
            assert not got.requires_grad


def test_every_dtype_of_this_torch_is_known_or_refused_by_name() -> None:
    refused = []
    for name in dir(torch):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or dtype in DTYPES:
            continue
        refused.append(str(dtype))
    assert {d for d in refused if not d.startswith(("torch.q", "torch.bit"))} == set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but still there to be refused
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CodecError, match=r"a\.q: Tensor cannot be carried: its dtype is torch\.qint8"):
        plan({"a": {"q": quantized}})


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.uint16, torch.bool, torch.complex64, torch.int64],
    ids=str,
)
def test_header_is_small(dtype: torch.dtype) -> None:  # R34
    tensor = torch.ones(3, 4, dtype=dtype) if dtype.itemsize > 1 else torch.ones(3, 4).to(dtype)
    assert plan(tensor).size - 12 * dtype.itemsize < 200
    assert same(round_trip(tensor), tensor)


def test_strided_tensors_and_slices_of_large_storage() -> None:  # R37
    x = torch.arange(24.0).view(4, 6)
    for tensor in (
        x.t(), x[:, ::2], x[1:3, 2:5], x[0].expand(5, 6), x.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        x.flip(0), x[2], x[1:1], x[:, 3],
    ):  # fmt: skip
        assert same(round_trip(tensor), tensor)
    assert plan(torch.zeros(1 << 20)[:4]).size < 300


def test_zero_dimensions_stay() -> None:  # R39
    value = {
        "s": torch.tensor(3.5), "b": torch.tensor(1, dtype=torch.bfloat16), "n": np.array(7), "k": torch.ones(2),
    }  # fmt: skip
    got = round_trip(value)
    assert same(got, value)
    assert [tuple(item.shape) for item in got.values()] == [(), (), (), (2,)]


def test_conj_and_neg_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (z.conj(), z.conj().imag, z.conj()[::2], z.conj().reshape(1, 2).t()):
        got = round_trip(tensor)
        assert not got.is_conj()
        assert not got.is_neg()
        assert bits_of_value(got) == bits_of_value(tensor)


def test_half_complex_is_resolved_without_a_warning() -> None:
    parts = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0], [7.0, 8.0]], dtype=torch.float16)
    z = torch.view_as_complex(parts)
    for tensor, expected in [
        (z.conj(), parts * torch.tensor([1, -1])),
        (z[::2], parts[::2]),
        (z.reshape(2, 2).t().conj(), (parts * torch.tensor([1, -1])).reshape(2, 2, 2).transpose(0, 1)),
    ]:
        got = round_trip(tensor)
        assert got.dtype is torch.complex32
        assert got.shape == tensor.shape
        assert torch.equal(torch.view_as_real(got), expected.half())


def bits_of_value(tensor: torch.Tensor) -> list[Any]:
    wide = tensor.resolve_conj().resolve_neg()
    return (wide.to(torch.complex128) if wide.is_complex() else wide).tolist()


def test_gradients_are_left_behind() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    for tensor in (weight, weight * 2, weight[:2], torch.ones(2, requires_grad=True).expand(3, 2).t()):
        got = round_trip(tensor)
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        assert torch.equal(got, tensor)


def test_the_same_tensor_twice_arrives_as_two() -> None:
    tensor = torch.zeros(5000)
    for got in (round_trip([tensor, tensor]), leased([tensor, tensor])[0]):
        got[0].fill_(1)
        assert got[1].sum() == 0


def test_tensors_that_have_no_plain_bytes_are_refused() -> None:
    class Sub(torch.Tensor):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these are still called beta
        cases = {
            r"it is torch\.sparse_coo": torch.eye(2).to_sparse(),
            r"it is torch\.sparse_csr": torch.eye(2).to_sparse_csr(),
            "on the meta device": torch.empty(2, device="meta"),
            "is a subclass of torch.Tensor": torch.ones(2).as_subclass(Sub),
            "it is nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        }
    for why, tensor in cases.items():
        with pytest.raises(CodecError, match=rf"x\[1\]: \w+ cannot be carried: .*{why}"):
            plan({"x": [0, tensor]})


def test_a_default_device_does_not_change_where_results_are() -> None:
    with torch.device("meta"):
        got = round_trip([torch.ones(2, device="cpu"), torch.empty(0, device="cpu")])
    assert [item.device.type for item in got] == ["cpu", "cpu"]


def test_device_is_applied_to_tensors() -> None:
    frame = plan({"t": torch.ones(3), "a": np.ones(2)}).to_bytes()
    got = decode(frame, device="meta")
    assert got["t"].device.type == "meta"
    assert isinstance(got["a"], np.ndarray)
    assert decode(frame, device=torch.device("cpu"))["t"].tolist() == [1, 1, 1]
    with pytest.raises(CodecError, match="cannot be moved to nowhere"):
        decode(frame, device="nowhere")


# -- arrays

ARRAYS = [
    np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    np.array([1, 2], dtype="timedelta64[ms]"),
    np.arange(3, dtype=">f4"),
    np.array(["ab", "é"]),
    np.array([b"ab", b"c"]),
    np.rec.array([(1, 2.0)]),
    np.array([(1, (2, "é"))], dtype=[("a", "u1"), ("b", [("c", ">i8"), ("d", "<U2")])]),
    np.zeros(3, dtype=[("m", "<f4", (2, 3)), ("n", "?")]),
    np.zeros(2, dtype=np.dtype({"names": ["a", "b"], "formats": ["u1", "<f8"]}, align=True)),
    np.zeros(2, dtype=np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [4], "itemsize": 16})),
    np.zeros(2, dtype=[(("title", "a"), "<i4")]),
    np.array([True, False]),
    np.array([1.5], dtype=np.float16),
    np.array([1, 2], dtype=np.longdouble),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([b"\x01\x02"], dtype="V2"),
    np.array(7),
    np.array("2020-01-01", dtype="datetime64[D]"),
    np.zeros((0, 3)),
    np.zeros((2, 0), dtype=">i2"),
    np.zeros(3, dtype="V0"),
    np.zeros((1, 2, 3))[::-1],
    np.arange(12).reshape(3, 4).T,
    np.arange(12).reshape(3, 4)[:, ::-2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.broadcast_to(np.arange(3), (4, 3)),
    np.zeros(5000)[::2],
    np.zeros((1,) * 32),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_array_comes_back_equal(array: np.ndarray) -> None:  # R36, R37, R39
    for got in (round_trip(array), leased(array)[0]):
        assert same(got, array)
        assert got.flags.c_contiguous
        assert got.flags.writeable
        assert got.dtype.isalignedstruct == array.dtype.isalignedstruct
        assert got.dtype.type is array.dtype.type


def test_arrays_that_are_more_than_their_bytes_are_refused() -> None:  # R36
    class Sub(np.ndarray):
        pass

    cases = [
        ("holds Python objects", np.array([{"k": 1}, None], dtype=object)),
        ("holds Python objects", np.zeros(1, dtype=[("a", "O")])),
        ("keeps more than its items", np.ma.array([1, 2], mask=[0, 1])),
        ("keeps more than its items", np.zeros(2).view(Sub)),
    ]
    if hasattr(np.dtypes, "StringDType"):
        cases.append(("StringDType", np.array(["a"], dtype=np.dtypes.StringDType())))
    for why, array in cases:
        with pytest.raises(CodecError, match=rf"in\.a: \w+ cannot be carried: .*{why}"):
            plan({"in": {"a": array}})
    assert same(round_trip(np.array([{"k": 1}, None], dtype=object), allow_pickle=True).tolist(), [{"k": 1}, None])


SCALARS = [
    np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.float16(1.5), np.float32(-0.0), np.float64("nan"),
    np.longdouble(1) / 3, np.complex64(1 + 2j), np.clongdouble(1), np.str_("é"), np.bytes_(b"a\0b"),
    np.datetime64("2020-01-01T00:00", "m"), np.datetime64("NaT"), np.timedelta64(3, "D"), np.void(b"abc"),
    np.array([(1, 2.0)], dtype="i4,f8")[0], np.rec.array([(1, 2.0)])[0],
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: type(scalar).__name__)
def test_numpy_scalars_stay_scalars(scalar: Any) -> None:  # R45
    assert same(round_trip({"x": [scalar]}), {"x": [scalar]})


def test_a_longdouble_of_another_precision_is_not_reinterpreted() -> None:
    frame = plan(np.array([1], dtype=np.longdouble)).to_bytes()
    digits = str(np.finfo(np.longdouble).nmant).encode()
    with pytest.raises(CodecError, match="another machine's precision"):
        decode(frame.replace(b"@" + digits, b"@" + str(int(digits) + 1).encode()))


# -- images


def test_palette_alpha_and_size_of_images() -> None:  # R47
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 1])
    got = round_trip(image)
    assert [got.convert("RGB").getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (0, 255, 0)]
    for other in (Image.new("RGBA", (5, 3), (1, 2, 3, 4)), Image.new("LA", (3, 5), (7, 8)), image):
        assert round_trip(other) == other
        assert round_trip(other).size == other.size


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "La", "RGBa", "RGBX", "I;16",
     "I;16B", "I;16L"],
)  # fmt: skip
def test_image_of_every_mode(mode: str) -> None:
    blank = Image.new(mode, (5, 3))
    noise = bytes((37 * i + 11) % 251 for i in range(len(blank.tobytes())))
    image = Image.frombytes(mode, (5, 3), noise)
    got = round_trip({"image": image})["image"]
    assert (got.mode, got.size) == (mode, (5, 3))
    assert got.tobytes() == image.tobytes()


def test_images_keep_palette_alpha_transparency_and_info() -> None:
    image = Image.new("P", (2, 2))
    image.putpalette(bytes(range(16)), "RGBA")
    image.info = {"transparency": 1, "dpi": (72, 72.5), "icc_profile": b"x" * 5000, "gamma": 0.5}
    got = round_trip(image)
    assert got == image
    assert got.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    noted = Image.new("L", (1, 1))
    noted.info = {"c": PngImagePlugin.iTXt("t", "de", "k"), "r": TiffImagePlugin.IFDRational(1, 3)}
    info = round_trip(noted).info
    assert (info["c"], info["c"].lang, info["c"].tkey, type(info["c"])) == ("t", "de", "k", PngImagePlugin.iTXt)
    assert info["r"] == TiffImagePlugin.IFDRational(1, 3)
    noted.info["x"] = object()
    with pytest.raises(CodecError, match=r"\.x: object cannot be carried"):
        plan(noted)


def test_an_opened_image_file_arrives_as_a_plain_image(tmp_path: pathlib.Path) -> None:
    Image.new("RGB", (4, 3), (9, 8, 7)).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        got = round_trip(image)
    assert type(got) is Image.Image
    assert got.size == (4, 3)
    assert got.getpixel((0, 0)) == (9, 8, 7)


def test_images_without_pixels() -> None:
    assert round_trip(Image.new("RGB", (0, 3))).size == (0, 3)


# -- refusals


class Text(str):
    pass


class Foo:
    pass


def test_the_path_to_the_culprit_is_named() -> None:
    with pytest.raises(CodecError, match=r"^engine_inputs\.x\[3\]: Foo cannot be carried: .*register_type") as caught:
        plan({"engine_inputs": {"x": [1, 2, 3, Foo()]}})
    assert isinstance(caught.value, TypeError)
    for value, path in [
        ({(1, 2): {"a b": Foo()}}, r"\[\(1, 2\)\]\['a b'\]: Foo"),
        (([0], {Foo()}), r"\[1\]\[0\]: Foo"),
        ({Foo(): 1}, r"\[<.*Foo object.*>\]: Foo"),
        (Foo(), "payload: Foo"),
        ({"a": Text("x")}, "a: Text cannot be carried: .*is a subclass of str"),
        ({Text("x"): 1}, r"\['x'\]: Text cannot be carried"),
        ([print], r"\[0\]: builtin_function_or_method"),
        ([int], r"\[0\]: type"),
        ([(i for i in ())], r"\[0\]: generator"),
    ]:
        with pytest.raises(CodecError, match=f"^{path}"):
            plan(value)


def test_depth_and_cycles() -> None:
    def nest(depth: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(depth - 1):
            value = [value]
        return value

    assert same(round_trip(nest(_codec.MAX_DEPTH)), nest(_codec.MAX_DEPTH))
    ring: list[Any] = [1]
    ring.append(ring)
    loop: dict[str, Any] = {}
    loop["x"] = ({"y": loop},)
    for value in (nest(_codec.MAX_DEPTH + 1), nest(100_000), ring, loop):
        with pytest.raises(CodecError, match="deeper than 256 levels, or a container holds itself") as caught:
            plan(value)
        assert len(str(caught.value)) < 1000
        while isinstance(value, list) and value and value[-1] is not value:
            value = value.pop()  # type: ignore[assignment]  # a deep list must not be freed by recursion


def test_pickle_only_where_allowed() -> None:
    value = {"x": Foo()}
    frame = plan(value, allow_pickle=True).to_bytes()
    assert type(decode(frame, allow_pickle=True)["x"]) is Foo
    with pytest.raises(CodecError, match="set allow_pickle on the receiving side"):
        decode(frame)
    with pytest.raises(CodecError, match=r"x: generator cannot be carried: pickling it failed"):
        plan({"x": (i for i in ())}, allow_pickle=True)


def test_limit_of_the_header_does_not_limit_data(monkeypatch: pytest.MonkeyPatch) -> None:  # R41
    monkeypatch.setattr(_codec, "MAX_HEADER_BYTES", 4096)
    for value in (
        torch.arange(5120, dtype=torch.int64).to(torch.uint8), np.ones(5120, "u1"), b"x" * 5120, "y" * 5120,
        list(range(5120)), bytearray(5120),
    ):  # fmt: skip
        assert same(round_trip(value), value)
    with pytest.raises(CodecError, match="structure alone takes 5003 bytes, more than the limit of 4096"):
        plan([None] * 5000)


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_more_than_four_gibibytes() -> None:  # R41
    tensor = torch.zeros(2**32 + 16, dtype=torch.uint8)
    tensor[0], tensor[-1] = 1, 2
    got = decode(plan({"t": tensor}).to_bytes())["t"]
    assert (got.shape, got[0], got[-1]) == (tensor.shape, 1, 2)
