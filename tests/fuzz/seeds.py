"""Real payloads, one per kind of leaf, as the frames that the codec makes of them."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
import zoneinfo
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import iTXt
from PIL.TiffImagePlugin import IFDRational

from omni_fastshm._codec import TORCH_DTYPES
from omni_fastshm.codec import plan, register_type


@dataclasses.dataclass
class Piece:
    name: str
    data: Any = None


class Shape(msgspec.Struct):
    sizes: list[int]
    more: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Flags(enum.Flag):
    A = 1
    B = 2


class Custom:
    def __init__(self, state: Any) -> None:
        self.state = state


register_type(Custom, lambda made: made.state, Custom, name="fuzz:Custom")


def _tensors() -> list[Any]:
    found: list[Any] = []
    for name in TORCH_DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            found.append(torch.zeros(dtype.itemsize * 6, dtype=torch.uint8).view(dtype))
    return [
        found,
        torch.ones(3, 4),
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.arange(2000.0),
        {"a": torch.ones(64, 64)},
    ]


def _arrays() -> list[Any]:
    structured = np.zeros(3, [("a", "<i4"), ("b", ">f8", (2, 2)), ("c", "S3"), ("d", [("x", "u1"), ("y", "<M8[us]")])])
    padded = np.zeros(2, np.dtype({"names": ["p"], "formats": ["<u2"], "offsets": [6], "itemsize": 16}))
    kinds = ["?", "b", "<u2", ">u4", "<i8", "<f2", ">f4", "<f8", "<c8", "<c16", "g", "G", "S4", "<U3", ">U2", "V5",
             "<M8[ns]", "<m8[25s]"]  # fmt: skip
    arrays = [np.zeros((2, 3), kind) for kind in kinds]
    records = np.rec.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")])
    return [arrays, structured, padded, records, np.zeros((2, 0, 3)), np.arange(1000), structured.view((np.record,
            structured.dtype)),
            [np.float32(1), np.bool_(True), np.str_("ab"), np.bytes_(b"c\0"), np.datetime64(3, "D"), structured[0],
             np.longdouble(1), np.complex64(1j), np.void(b"abc"), records[0]]]  # fmt: skip


def _images() -> list[Any]:
    palette = Image.new("P", (3, 2))
    palette.putpalette([1, 2, 3] * 5)
    marked = Image.new("RGB", (2, 2))
    marked.info = {"dpi": (IFDRational(72, 1), IFDRational(1, 3)), "note": iTXt("text", "en", "t")}
    return [[Image.new(mode, (5, 3)) for mode in ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16",
             "HSV")],
            palette, marked, Image.new("L", (0, 3))]  # fmt: skip


def _standard() -> list[Any]:
    zone = datetime.timezone(datetime.timedelta(hours=1), "x")
    when = datetime.datetime(2024, 2, 29, 1, 2, 3, 4, zone, fold=1)
    return [
        range(3, 9, 2), ..., memoryview(b"abcd"), memoryview(bytearray(8)).cast("H", [2, 2]), uuid.UUID(int=5),
        decimal.Decimal("1.5e3"), fractions.Fraction(3, 4), when, when.replace(tzinfo=zoneinfo.ZoneInfo("UTC")),
        when.date(), when.timetz(), datetime.timedelta(1, 2, 3), zone, pathlib.PurePosixPath("/a/b"), pathlib.Path("c"),
        pathlib.PureWindowsPath("c:/d"), collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]),
        collections.Counter("abca"), collections.deque([1, 2], 3), types.SimpleNamespace(a=1), torch.Size([1, 2]),
        torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), np.dtype("<f4"), np.dtype([("a",
        "<i2")]),
    ]  # fmt: skip


def _plain() -> list[Any]:
    return [
        {"a": 1, "b": [None, True, False, -1, 2**40, 1.5, "text", b"raw"]}, ((1, (2, [3])), {4, "5"}, frozenset([6])),
        slice(1, None, 2), {(1, 2): None, None: 1, 2.5: {True: 1}}, [2**80, -(2**70), 2**64 - 1], 1j, "\ud800x",
        bytearray(b"abc"), msgspec.UNSET, msgspec.msgpack.Ext(-3, b"abc"), list(range(40)), [-200] * 20, [70000] * 16,
        [2**40] * 16, tuple([0.5] * 18), b"y" * 5000, "z" * 5000, bytearray(5000), "é" * 3000, {3: 4, -5: 6},
        [[[[[[]]]]]], "",
    ]  # fmt: skip


def _classes() -> list[Any]:
    return [Piece("n", torch.ones(2)), Shape([1, 2], {"x": 1}), Pair(1, np.ones(2)), Colour.BLUE, Flags.A | Flags.B,
            Custom([1, {"a": np.ones(3)}])]  # fmt: skip


def payloads() -> list[Any]:
    """One payload per kind, then all of a group together."""
    groups = [_tensors(), _arrays(), _images(), _standard(), _plain(), _classes()]
    return [one for group in groups for one in group] + groups[:4]


def frames() -> list[tuple[bytes, str]]:
    """The frames with the profile that reads them."""
    made = [(plan(one).to_bytes(), "exact") for one in payloads()]
    for one in payloads():
        try:
            made.append((plan(one, wire="host").to_bytes(), "host"))
        except TypeError:
            continue  # not carried in that profile
    return made
