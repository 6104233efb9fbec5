"""Trees for a frame's header: real ones with something wrong in them, and made-up ones from the codec's own words."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from fuzz.chance import Chance

from omni_fastshm._codec_forms import FORMS

Ext = msgspec.msgpack.Ext
_encode = msgspec.msgpack.Encoder(enc_hook=repr).encode

NAMES = [
    *FORMS, "fuzz:Custom", "fuzz.seeds:Piece", "fuzz.seeds:Shape", "fuzz.seeds:Pair", "fuzz.seeds:Colour",
    "fuzz.seeds:Flags",
    "builtins:object", "builtins:tuple", "enum:Enum", "enum:Flag", "os:stat_result", "threading:Thread",
    "no.such:Class", ":",
    "fuzz.seeds:Custom", "collections:namedtuple", "msgspec:Struct", "torch:Tensor", "numpy:ndarray", "",
]  # fmt: skip
DTYPES = [
    b"<f4", b"<i8", b"|S0", b"|S3", b"<U2", b"|V0", b"|V5", b"|b1", b"<M8[ns]", b"<M8", b"<m8[99999999s]", b"<g@63",
    b"<f8@9",
    b"|O", b"O", b"T", b"i4,i4", b"(2,3)f4", b"(0,9)f4", b"V2000000000", b"(65535,65535)V9", b"f4@" + b"9" * 5000,
    b"", b"\xff",
    b'{{"base":"<f4","shape":[2,3]}', b'{{"base":"O","shape":[2]}', b'{{"base":"<f4","shape":[4294967296,4294967296]}',
    b'{{"names":["a"],"formats":["<i4"],"offsets":[0],"titles":[null],"itemsize":4,"aligned":false}',
    b'{{"names":["a","b"],"formats":["<i4","<U2"],"offsets":[-4,2],"titles":[null,"t"],"itemsize":12,"aligned":true}',
    b'{{"names":["a"],"formats":["O"],"offsets":[0],"titles":[null],"itemsize":8,"aligned":false}',
    b'{{"names":["a"],"formats":[{"base":"<f4","shape":[3]}],"offsets":[2147483640],"titles":[[]],"itemsize":9,"aligned":0}',
    b"{" + b"[" * 2000, b'{"T"',
]  # fmt: skip
LIES = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xde\x00\xff", b"\xdb\xff\xff\xff\xffab",
    b"\xda\x10\x00",
    b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc8\xff\xff\x02", b"\xc1", b"\x91" * 300,
    b"\x81\xa1a" * 270, b"\x81" * 300,
    b"\xdc\x00\x10" * 40, b"\xd4\x10\x00", b"\x92\xd4\x10\x09", b"\xca\x00\x00\x00\x00", b"\xd3\x80" + b"\0" * 7,
    b"\xcf" + b"\xff" * 8,
    b"\x82\xa1a\x01\xa1a\x02", b"\xa3\xff\xfe\xfd", b"", b"\xd6\xff\0\0\0\0", b"\xd7\xff" + b"\xff" * 8,
    b"\xc7\x0c\xff" + b"\x80" * 12,
]  # fmt: skip
WRAPS = [(2**61 + 1, 8), (8, 2**61 + 1), (2**62 + 1,), (2**61 + 1,), (2**60 + 1,), (2**32, 2**32), (2**32 + 1, 2**32),
         (3, 0x5555555555555556), (2**31, 2**31, 4), (0, 2**62, 2**62), (2**63 - 1, 2)]  # fmt: skip
"""Shapes with a product that is small when it is computed in 64 bits, as it is or in bytes."""
STATE_OF = {
    "builtins:memoryview": ("B", (4,), False, b"abcd"),
    "PIL.Image:Image": ("L", (2, 2), None, {}, b"1234"),
    "datetime:datetime": (2024, 2, 29, 1, 2, 3, 4, None, 0),
    "datetime:time": (1, 2, 3, 4, None, 0),
    "datetime:date": (2024, 2, 29),
    "collections:deque": ([1, 2], 3),
    "collections:defaultdict": ("list", {"a": [1]}),
    "fractions:Fraction": (3, 4),
    "PIL.TiffImagePlugin:IFDRational": (72, 1),
    "PIL.PngImagePlugin:iTXt": ("text", "en", "t"),
    "builtins:range": (1, 9, 2),
    "torch:Size": (1, 2),
    "torch:dtype": "float16",
    "numpy:dtype": b"<f4",
    "decimal:Decimal": "1.5",
}


class Raw(bytes):
    """Bytes that stand in a header as they are."""


def encode(tree: Any) -> bytes:
    """As the codec's own writer would, with dicts of any keys and pieces that are no msgpack at all."""
    if type(tree) is Raw:
        return bytes(tree)
    if type(tree) is list:
        return _head(len(tree), 0x90, 0xDC) + b"".join(map(encode, tree))
    if type(tree) is dict:
        return _head(len(tree), 0x80, 0xDE) + b"".join(encode(k) + encode(v) for k, v in tree.items())
    if type(tree) is tuple:
        return encode([mark(0), *tree])
    try:
        return _encode(tree)
    except (OverflowError, UnicodeEncodeError):
        return _encode(Ext(5, b"\x01" * 20) if type(tree) is int else Ext(7, b"\xed\xa0\x80"))


def _head(count: int, short: int, long: int) -> bytes:
    if count < 16:
        return bytes([short | count])
    return bytes([long]) + struct.pack(">H", count) if count < 1 << 16 else bytes([long + 1]) + struct.pack(">I", count)


def mark(kind: int) -> Ext:
    return Ext(16, bytes([kind]))


def made_up(chance: Chance, depth: int = 0) -> Any:
    """Any tree; most of it in words that the codec knows."""
    kind = chance.randrange(16 if depth < 4 else 8)
    if kind < 2:
        return chance.pick((None, True, 0, -1, 1.5, float("nan"), chance.signed(64), chance.number(64)))
    if kind == 2:
        return chance.text()
    if kind == 3:
        return chance.blob()
    if kind < 6:
        return leaf(chance)
    if kind == 6:
        return Ext(chance.pick((5, 6, 7, 8, 9, 10, 11, 16, 99, 127, -1, -128)), chance.blob(24))
    if kind == 7:
        return Raw(chance.pick(LIES))
    items = [made_up(chance, depth + 1) for _ in range(chance.pick((0, 1, 2, 2, 3, 17)))]
    if kind == 8:
        return items
    if kind == 9:
        return Raw(_head(len(items) // 2, 0x80, 0xDE) + b"".join(map(encode, items)))
    if kind == 10:
        return [mark(chance.randrange(13)), *items]
    if kind == 11:
        return [mark(chance.pick((5, 6, 7, 8, 10))), chance.pick(NAMES), *items[:1]]
    return [mark(9), chance.pick(NAMES), state(chance, depth)]


def state(chance: Chance, depth: int) -> Any:
    """What a class of the standard list is made of: nearly right, or something that its constructor would run along."""
    endless = [mark(9), "builtins:range", (0, 10**12, 1)]
    kind = chance.randrange(4)
    if kind == 0:
        return chance.pick((endless, (endless,), (endless, 5), ("int", endless)))
    if kind == 1:
        return made_up(chance, depth + 1)
    parts = list(chance.pick(list(STATE_OF.values())))
    for _ in range(chance.randrange(3)):
        parts[chance.randrange(len(parts))] = chance.pick(
            (
                endless,
                chance.text(),
                chance.number(31),
                chance.signed(64),
                3_000_000_000,
                None,
                made_up(chance, depth + 2),
            )
        )
    return tuple(parts)


def _size(chance: Chance) -> int:
    return chance.pick((0, 1, 2, 3, chance.number(63), chance.signed(64)))


def leaf(chance: Chance) -> Ext:
    """A tensor, an array, a blob, numbers or a scalar, with a place in the data area that may be anything."""
    offset = chance.pick((0, 0, 8, 64, chance.number(64)))
    sizes = list(chance.pick(WRAPS))
    if not chance.one_in(4):
        sizes = [_size(chance) for _ in range(chance.pick((0, 1, 1, 2, 3, 65)))]
    shape = struct.pack(f"<{len(sizes)}q", *sizes)
    place = struct.pack("<Q", offset)
    flags = chance.pick((0, 0, 0, 1, 2, 4, 7, 255))
    ndim = chance.pick((len(sizes), len(sizes), len(sizes), chance.randrange(256)))
    kind = chance.randrange(5)
    if flags & 1 and kind < 2:
        place = struct.pack("<Q", chance.pick((0, 1, chance.number(64)))) + place
    if kind == 0:
        return Ext(1, bytes([chance.pick((7, 1, 9, chance.randrange(64), 255)), flags, ndim, 0]) + place + shape)
    dtype = chance.pick(DTYPES)
    if kind == 1:
        return Ext(2, bytes([flags, ndim]) + struct.pack("<H", len(dtype)) + place + shape + dtype)
    if kind == 2:
        return Ext(
            8,
            bytes([flags, 0])
            + struct.pack("<H", chance.pick((len(dtype), chance.randrange(65536))))
            + dtype
            + chance.blob(),
        )
    count = chance.pick((1, 4, 16, 2**61 + 1, 2**62 + 1, 2**63 + 2, chance.number(64)))
    first = chance.pick((0, 1, 2, 3, 4, 8, 9, chance.randrange(256)))
    return Ext(kind, bytes([first, chance.randrange(2)]) + bytes(6) + struct.pack("<QQ", offset, count))


def changed(tree: Any, chance: Chance) -> Any:
    """`tree` with one to three of its nodes changed; the containers are changed in place."""
    holder = [tree]
    for _ in range(chance.pick((1, 1, 2, 3))):
        places = list(_places(holder))
        container, key = chance.pick(places)
        node = container[key]
        kind = chance.randrange(7)
        if kind == 0:
            container[key] = made_up(chance)
        elif kind == 1:
            container[key] = _tweaked(node, chance)
        elif kind == 2 and len(places) > 1:
            other, at = chance.pick(places)
            container[key] = other[at] if not isinstance(other[at], list | dict) else Raw(encode(other[at]))
        elif kind == 3 and type(container) is list and container is not holder:
            container.insert(key, Raw(encode(node)))
        elif kind == 4 and container is not holder:
            del container[key]
        elif kind == 5:
            container[key] = Raw(
                chance.pick((b"\x91" * chance.pick((1, 20, 254, 300)), chance.pick(LIES))) + encode(node)
            )
        else:
            container[key] = _tweaked(node, chance)
    return holder[0]


def _places(node: Any) -> Any:
    todo = [node]
    while todo:
        container = todo.pop()
        for key, inner in enumerate(container) if type(container) is list else container.items():
            yield container, key
            if type(inner) in (list, dict):
                todo.append(inner)


def _tweaked(node: Any, chance: Chance) -> Any:
    if type(node) is Ext:
        return _tweaked_ext(node, chance)
    if type(node) is int:
        return chance.near(node & (1 << 64) - 1, 64)
    if type(node) is bytes:
        return chance.changed(node)
    if type(node) is str:
        return chance.pick((chance.text(), chance.pick(NAMES), node + "\0", node[1:]))
    return leaf(chance)


def _tweaked_ext(node: Ext, chance: Chance) -> Ext:
    data = bytearray(node.data)
    if chance.one_in(8):
        return Ext(chance.pick((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, -1, 77)), bytes(data))
    if node.code in (1, 2, 3, 4) and len(data) >= 12 and not chance.one_in(3):
        at = chance.pick((0, 1, 2, 3, *range(4, len(data) - 7, 8)))
        if at < 4:
            data[at] = chance.near(data[at], 8)
        else:
            data[at : at + 8] = chance.near(int.from_bytes(data[at : at + 8], "little"), 64).to_bytes(8, "little")
        return Ext(node.code, bytes(data))
    return Ext(node.code, chance.changed(bytes(data)))
