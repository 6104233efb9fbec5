"""Frames that are cut short, flipped or made up: an error with a sentence, never a crash, never a huge allocation."""

from __future__ import annotations

import contextlib
import decimal
import fractions
import mmap
import os
import random
import signal
import struct
import time
import tracemalloc
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from PIL.TiffImagePlugin import IFDRational
from support.codec_tools import FakeLease

from omni_fastshm import CodecError, MetadataError
from omni_fastshm._codec_forms import FORMS
from omni_fastshm.codec import decode, plan

Ext = msgspec.msgpack.Ext


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


def rich() -> Any:
    return {
        "t": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "a": np.arange(3, dtype=">f4"),
        "s": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]), "n": list(range(20)), "f": [0.5] * 20,
        "tt": ((1, {2}), slice(1)), "k": {(1, 2): None}, "i": 2**80, "c": 1j, "np": np.float32(1), "z": torch.Size([1]),
        "d": torch.float16, "im": Image.new("P", (2, 3)), "u": msgspec.UNSET, "x": Ext(3, b"abc"), "su": "\ud800",
        "neg": [-1, -200, -40000, -(2**40)], "big": b"x" * 5000, "e": torch.empty(0, 3),
        "ba": bytearray(b"a"),
    }  # fmt: skip


def frame_of(tree: Any, data: bytes = b"", *, flags: int = 1) -> bytes:
    """A frame around any msgpack tree, well-formed at its outside."""
    header = msgspec.msgpack.encode(tree) if not isinstance(tree, bytes) else tree
    start = -(-(16 + len(header)) // 8) * 8 if data else 16 + len(header)
    body = header.ljust(start - 16, b"\0") + data
    return b"OFS" + bytes([flags]) + struct.pack("<IQ", len(header), start + len(data)) + body


def tensor_ext(dtype: int, shape: tuple[int, ...], offset: int = 0, flags: int = 0, ndim: int | None = None) -> Ext:
    head = bytes([dtype, flags, len(shape) if ndim is None else ndim, 0])
    return Ext(1, head + struct.pack(f"<Q{len(shape)}q", offset, *shape))


def array_ext(dtype: bytes, shape: tuple[int, ...], offset: int = 0) -> Ext:
    head = bytes([0, len(shape)]) + struct.pack("<H", len(dtype))
    return Ext(2, head + struct.pack(f"<Q{len(shape)}q", offset, *shape) + dtype)


def test_the_header_is_msgpack_that_msgspec_reads() -> None:
    frame = plan({"a": [1, "x"], "t": torch.ones(2)}).to_bytes()
    size, total = struct.unpack("<IQ", frame[4:16])
    assert (frame[:4], total) == (b"OFS\x01", len(frame))
    tree = msgspec.msgpack.decode(frame[16 : 16 + size])
    assert tree["a"] == [1, "x"]
    assert tree["t"] == tensor_ext(7, (2,))
    assert decode(frame_of(tree, struct.pack("<2f", 3, 4)))["t"].tolist() == [3, 4]


def test_every_way_of_cutting_it_short() -> None:
    frame = plan(rich()).to_bytes()
    for size in range(len(frame)):
        with pytest.raises(MetadataError):
            decode(frame[:size])
    with pytest.raises(MetadataError):
        decode(frame + b"\0")


def test_a_header_that_ends_early() -> None:
    frame = bytearray(plan(rich()).to_bytes())
    (size,) = struct.unpack_from("<I", frame, 4)
    for shorter in range(size):
        struct.pack_into("<I", frame, 4, shorter)
        with pytest.raises((MetadataError, CodecError)):
            decode(frame)


@pytest.mark.parametrize("over_lease", [False, True])
def test_flipped_bytes_never_crash(over_lease: bool) -> None:
    planned = plan(rich())
    lease = FakeLease(planned)
    whole = bytes(lease.frame)
    (size,) = struct.unpack_from("<I", whole, 4)
    rng = random.Random(7)
    outcomes = {"read": 0, "refused": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of some made-up dtypes before it refuses them
        for position in range(16 + size):
            for value in {0, 0xFF, whole[position] ^ (1 << rng.randrange(8)), rng.randrange(256)}:
                lease.frame[:] = whole
                lease.frame[position] = value
                try:
                    decode(lease.frame, source=lease if over_lease else None)
                    outcomes["read"] += 1
                except (MetadataError, CodecError):
                    outcomes["refused"] += 1
                assert lease.live == 0
    assert min(outcomes.values()) > 100


def test_noise_is_refused() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        noise = rng.randbytes(rng.randrange(40))
        with pytest.raises((MetadataError, CodecError)):
            decode(noise)
        try:
            decode(frame_of(noise, rng.randbytes(64)))
        except (MetadataError, CodecError):
            pass


def standard(name: str, *parts: Any) -> list[Any]:
    """A type of the standard list, made of a tuple of parts."""
    return [Ext(16, b"\x09"), name, [Ext(16, b"\x00"), *parts]]


ENDLESS = standard("builtins:range", 0, 10**12, 1)  # a constructor that runs through it never comes back

LIES: dict[str, Any] = {
    "list": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "list of lists": b"\xdc\xff\xff" * 20,
    "str": b"\xdb\xff\xff\xff\xffabc",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "ext": b"\xc9\xff\xff\xff\xff\x01",
    "deep": b"\x91" * 5000 + b"\xc0",
    "deep maps": b"\x81\x01" * 5000 + b"\xc0",
    "deep keys": b"\x81" * 5000,
    "unused byte": b"\xc1",
    "trailing": b"\xc0\xc0",
    "nothing": b"",
    "tensor": tensor_ext(7, (1 << 40,)),
    "tensor wraps": tensor_ext(7, (1 << 32, 1 << 32)),
    "tensor wraps in bytes": tensor_ext(8, (1 << 61,)),
    "tensor is negative": tensor_ext(7, (-1,)),
    "tensor is negative twice": tensor_ext(7, (-2, -2)),
    "tensor offset": tensor_ext(7, (2,), offset=1 << 63),
    "tensor offset wraps": tensor_ext(7, (2,), offset=(1 << 64) - 8),
    "tensor behind the end": tensor_ext(7, (2,), offset=64),
    "tensor between": tensor_ext(7, (2,), offset=4),
    "tensor half outside": tensor_ext(7, (2,), offset=60),
    "tensor dtype": tensor_ext(63, (2,)),
    "tensor dtype far": tensor_ext(255, (2,)),
    "tensor dims": tensor_ext(7, (2,), ndim=3),
    "tensor many dims": tensor_ext(7, (1,) * 65),
    "tensor empty": Ext(1, b""),
    "tensor elsewhere": tensor_ext(7, (0, 2), flags=1),
    "tensors overlap": [tensor_ext(7, (4,)), tensor_ext(7, (4,), offset=8)],
    "tensors out of order": [tensor_ext(7, (4,), offset=16), tensor_ext(7, (4,))],
    "array": array_ext(b"<f4", (1 << 40,)),
    "array of objects": array_ext(b"|O", (2,)),
    "array of fields of objects": array_ext(
        b"{" + b'{"names":["a"],"formats":["O"],"offsets":[0],"titles":[null],"itemsize":8,"aligned":false}', (2,)
    ),
    "array of a field far outside": array_ext(
        b"{" + b'{"names":["a"],"formats":[{"base":"<f4","shape":[3]}],"offsets":[2147483640],"titles":[null],'
        b'"itemsize":9,"aligned":false}',
        (2,),
    ),
    "array of a field just outside": array_ext(
        b"{" + b'{"names":["a"],"formats":["<f8"],"offsets":[1],"titles":[null],"itemsize":8,"aligned":false}', (2,)
    ),
    "array of comma dtype": array_ext(b"i4,i4", (2,)),
    "array of no dtype": array_ext(b"xx", (2,)),
    "array of not text": array_ext(b"\xff\xfe", (2,)),
    "array of wide items": array_ext(b"V2000000000", (2,)),
    "array of broken fields": array_ext(b'{{"names":', (2,)),
    "array too many dims": array_ext(b"<f4", (1,) * 65),
    "numbers": Ext(4, struct.pack("<8sQQ", b"\x01", 0, 1 << 60)),
    "numbers wrap": Ext(4, struct.pack("<8sQQ", b"\x08", 0, 1 << 61)),
    "numbers width": Ext(4, struct.pack("<8sQQ", b"\x03", 0, 1)),
    "blob": Ext(3, struct.pack("<8sQQ", b"\x00", 0, 1 << 40)),
    "blob kind": Ext(3, struct.pack("<8sQQ", b"\x09", 0, 1)),
    "pickle": Ext(3, struct.pack("<8sQQ", b"\x03", 0, 8)),
    "scalar": Ext(8, b"\0\0\xff\xff<f4"),
    "scalar size": Ext(8, b"\0\0\x03\x00<f4abc"),
    "unknown ext": Ext(99, b"x"),
    "time stamp": Ext(-1, b"\0" * 4),
    "mark alone": Ext(16, b"\0"),
    "mark late": [1, Ext(16, b"\0")],
    "mark as key": b"\x81\xd4\x10\x00\x01",
    "unknown mark": [Ext(16, b"\x0b"), "a"],
    "class without name": [Ext(16, b"\x05")],
    "class name": [Ext(16, b"\x05"), 3, {}],
    "class unknown": [Ext(16, b"\x05"), "no.such:Class", {}],
    "class odd path": [Ext(16, b"\x05"), ":", {}],
    "class in builtins": [Ext(16, b"\x07"), "builtins:tuple", 1],
    "standard unknown": [Ext(16, b"\x09"), "no:such", 1],
    "standard without state": [Ext(16, b"\x09"), "builtins:range"],
    "standard wrong": [Ext(16, b"\x09"), "builtins:range", "x"],
    "torch name": [Ext(16, b"\x09"), "torch:dtype", "load"],
    "torch nothing": [Ext(16, b"\x09"), "torch:dtype", "nothing"],
    "factory": [Ext(16, b"\x09"), "collections:defaultdict", ["eval", {}]],
    "image": [Ext(16, b"\x09"), "PIL.Image:Image", ["RGB", [1 << 20, 1 << 20], None, {}, b""]],
    "image negative": [Ext(16, b"\x09"), "PIL.Image:Image", ["L", [-1, -1], None, {}, b"x"]],
    "image of a list": standard("PIL.Image:Image", "L", [1, 2], None, {}, [1, 2]),
    "image without pixels": standard("PIL.Image:Image", "L", [0, 1 << 30], None, {}, b""),
    "image without pixels, wide": standard("PIL.Image:Image", "L", [(1 << 31) - 1, 0], None, {}, b""),
    "image palette": standard("PIL.Image:Image", "P", [1, 1], ["RGB", 3_000_000_000], {}, b"1"),
    "image info": standard("PIL.Image:Image", "L", [1, 1], None, 5, b"1"),
    "endless deque": standard("collections:deque", ENDLESS, 5),
    "endless counter": [Ext(16, b"\x09"), "collections:Counter", ENDLESS],
    "endless size": [Ext(16, b"\x09"), "torch:Size", ENDLESS],
    "endless parts": [Ext(16, b"\x09"), "builtins:range", ENDLESS],
    "endless date": [Ext(16, b"\x09"), "datetime:datetime", ENDLESS],
    "endless shape": standard("builtins:memoryview", "B", ENDLESS, True, b"abc"),
    "endless items": standard("collections:defaultdict", "int", ENDLESS),
    "memoryview of a number": standard("builtins:memoryview", "B", [Ext(16, b"\0"), 1], False, 3_000_000_000),
    "fraction of a text": standard("fractions:Fraction", "1e200000000"),
    "fraction of two texts": standard("fractions:Fraction", "1", "1e200000000"),
    "rational of a text": standard("PIL.TiffImagePlugin:IFDRational", "1e200000000", 1),
    "rational of a decimal": standard(
        "PIL.TiffImagePlugin:IFDRational", [Ext(16, b"\x09"), "decimal:Decimal", "1e200000000"], 1
    ),
    "datetime of a pickle": standard("datetime:datetime", b"\x07\xe5\x01\xff\xff\xff\xff\xff\xff\xff", 0),
    "date of a pickle": standard("datetime:date", b"\x00\x00\x01\xff"),
    "time of a pickle": standard("datetime:time", b"\xff\xff\xff\xff\xff\xff", 0),
    "time zone of three": standard("datetime:timezone", 1, 2, 3),
    "uuid of a float": [Ext(16, b"\x09"), "uuid:UUID", 1.5],
    "decimal of a tuple": standard("decimal:Decimal", 0, [Ext(16, b"\0"), 1], 3),
    "torch name is no text": [Ext(16, b"\x09"), "torch:dtype", 5],
    "odd dict": [Ext(16, b"\x03"), 1],
    "odd dict twice": [Ext(16, b"\x03"), 1, 2, 1, 3],
    "odd dict unhashable": [Ext(16, b"\x03"), [], 2],
    "set unhashable": [Ext(16, b"\x01"), []],
    "slice": [Ext(16, b"\x04"), 1],
    "map twice": b"\x82\xa1a\x01\xa1a\x02",
    "list as key": b"\x81\x91\x01\x01",
    "not utf-8": b"\xa1\xff",
    "not utf-8 key": b"\x81\xa1\xff\x01",
}


@pytest.mark.parametrize("name", LIES)
def test_made_up_trees_are_refused_without_allocating(name: str) -> None:
    frame = frame_of(LIES[name], b"\0" * 64)
    lease = FakeLease(plan(0))
    tracemalloc.start()
    try:
        for source in (None, lease):
            with pytest.raises((MetadataError, CodecError)) as caught:
                decode(frame, source=source)
            assert len(str(caught.value)) > 20
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_names_from_the_wire_are_looked_up_and_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def imports_submodules(name: str) -> None:
        asked.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(torch, "__getattr__", imports_submodules)
    for name in ("onnx", "_inductor", "no such"):
        with pytest.raises(MetadataError):
            decode(frame_of([Ext(16, b"\x09"), "torch:dtype", name]))
    assert not asked


def test_want_of_memory_is_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage uses a payload up; whoever lacks memory now may get it later."""

    def starving(state: Any) -> None:
        raise MemoryError

    monkeypatch.setitem(FORMS, "decimal:Decimal", (str, starving))
    with pytest.raises(MemoryError):
        decode(plan(decimal.Decimal("1.5")).to_bytes())


def test_what_could_not_come_back_is_refused_where_it_is_sent() -> None:
    assert decode(plan(fractions.Fraction(np.int64(3), np.int64(4))).to_bytes()) == fractions.Fraction(3, 4)
    with pytest.raises(CodecError, match=r"x\[1\]: IFDRational cannot be carried"):
        plan({"x": [0, IFDRational(decimal.Decimal(1))]})


def test_the_prefix_is_checked() -> None:
    frame = plan([1]).to_bytes()
    for damaged, why in [
        (b"", "does not start like one"),
        (b"OFX" + frame[3:], "does not start like one"),
        (b"OFS\x02" + frame[4:], "format version 2, this build reads 1"),
        (frame[:4] + struct.pack("<I", 1 << 31) + frame[8:], "says"),
        (frame[:8] + struct.pack("<Q", 1 << 63) + frame[16:], "says"),
        (frame[:8] + struct.pack("<Q", 17) + frame[16:], "says"),
    ]:
        with pytest.raises(MetadataError, match=why):
            decode(damaged)
    for wrong in ("text", 3, None):
        with pytest.raises(TypeError):
            decode(wrong)


@pytest.mark.parametrize("size", [*range(0xFFFFFFE0, 0x1_0000_0000), 0x7FFFFFFF, 0x80000000, 55, 56])
def test_header_sizes_that_would_wrap(size: int) -> None:
    frame = bytearray(plan({"a": "x" * 40}).to_bytes())
    assert len(frame) < 71
    frame[4:8] = size.to_bytes(4, "little")
    with pytest.raises(MetadataError):
        decode(bytes(frame))


def test_lists_that_lie_inside_each_other_do_not_add_up() -> None:
    header = b"\xdd\x00\x0f\x00\x00" * 200  # 200 nested lists, each announcing as many items as bytes are left
    header += b"\xc0" * (0x0F0000 - len(header) + 5)
    frame = b"OFS\x01" + len(header).to_bytes(4, "little") + (16 + len(header)).to_bytes(8, "little") + header
    tracemalloc.start()
    try:
        with pytest.raises(MetadataError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


class Mapped:
    """Shared memory that others write to, behind the interface of a lease."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def view(self, offset: int, nbytes: int, readonly: bool) -> memoryview:
        return memoryview(self._memory)[offset : offset + nbytes]


@pytest.mark.parametrize(
    "payload", [list(range(64)), np.arange(8), {"k": torch.ones(2, 3)}], ids=["list", "array", "dict"]
)
def test_a_header_that_another_process_changes_is_read_once(payload: Any) -> None:
    clean = plan(payload).to_bytes()
    memory = mmap.mmap(-1, len(clean))
    memory[:] = clean
    child = os.fork()
    if child == 0:  # flips one byte of the header after the other, until it is ended
        end = 16 + int.from_bytes(clean[4:8], "little")
        while True:
            for at in range(16, end):
                memory[at] ^= 0x40
                memory[at] = clean[at]
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with contextlib.suppress(MetadataError, CodecError):
                decode(memory, source=Mapped(memory))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
