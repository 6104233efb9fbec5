"""Names of what lies in the store, and the small record that leads from a request to its payload.

A payload has a key of its own for ever (`nonce`), so that no key is written twice: the store answers a put on an
existing key with success and keeps the old value. Three kinds of keys share the namespace's prefix::

    omnifs/NAMESPACE/p/REQUEST/FROM_to_TO/NONCE       the payload, one object
    omnifs/NAMESPACE/t/REQUEST/FROM_to_TO/NONCE/N     one token per taker but the last
    omnifs/NAMESPACE/k/REQUEST/FROM_to_TO             which payload is the newest; with key_lookup only
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import secrets
import struct
import zlib
from typing import NamedTuple
from urllib.parse import quote

__all__ = ["POINTER_BYTES", "Item", "Names", "read_pointer", "unit", "write_pointer"]

POINTER_BYTES = 64
_POINTER = struct.Struct("<4sIQQ16s")
_MAGIC = b"OFM1"
_NONCE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,200}", re.ASCII)  # what `_short` would leave as it is
_HEX = [f"{n:02x}" for n in range(256)]
_LONGEST = 200  # longer names become their hash: keys stay readable, and the master's table small


class Item(NamedTuple):
    """One payload in the store.

    Args:
        edge: from and to.
        request: its id.
        nonce: makes its key unlike any other.
        size: serialized bytes.
        takers: how many times it can be taken.
    """

    edge: tuple[str, str]
    request: str
    nonce: str
    size: int
    takers: int

    @property
    def stored(self) -> int:
        """Bytes that it takes in the store: whole units, so that every address there is aligned."""
        return -(-self.size // 64) * 64  # `unit`, without a call: each put asks several times


def unit(size: int) -> int:
    """`size` rounded up to what the store is given in: 64 bytes."""
    return -(-size // 64) * 64


class Names:
    """The keys of one namespace.

    Args:
        namespace: as checked by the settings.
    """

    def __init__(self, namespace: str) -> None:
        self._prefix = f"omnifs/{namespace}"
        self._numbers = itertools.count(secrets.randbits(64))
        self._start = -1, ""  # of nonces, by the upper bits of their number

    def new_nonce(self) -> str:
        """One that nobody else uses: counted on from a random number of 64 bits."""
        number = next(self._numbers)
        high, low = number >> 16, number & 0xFFFF
        begun, start = self._start
        if begun != high:  # formatting a number this long costs as much as all the rest of a key
            start = f"{high & 0xFFFFFFFFFFFF:012x}"
            self._start = high, start
        return f"{start}{_HEX[low >> 8]}{_HEX[low & 255]}"

    @staticmethod
    def is_nonce(text: object) -> bool:
        return isinstance(text, str) and _NONCE.fullmatch(text) is not None

    @property
    def probe(self) -> str:
        """A key that is never there."""
        return f"{self._prefix}/probe"

    def payload(self, item: Item) -> str:
        edge, request, nonce, _, _ = item  # each put and get comes by here
        name = request if request.isalnum() and request.isascii() and len(request) <= _LONGEST else _name(request)
        return f"{self._prefix}/p/{name}/{_edge_text(*edge)}/{nonce}"

    def tokens(self, item: Item) -> list[str]:
        if item.takers == 1:
            return []
        start = f"{self._prefix}/t/{_place(item.edge, item.request)}/{item.nonce}"
        return [f"{start}/{n}" for n in range(1, item.takers)]

    def pointer(self, edge: tuple[str, str], request: str) -> str:
        return f"{self._prefix}/k/{_place(edge, request)}"

    def request_patterns(self, request: str) -> tuple[str, str]:
        """Regular expressions for the tokens of a request, and for everything else of it."""
        prefix, name = _literal(self._prefix), _literal(_short(request))
        return f"^{prefix}/t/{name}/", f"^{prefix}/[pk]/{name}/"


def _place(edge: tuple[str, str], request: str) -> str:
    return f"{_name(request)}/{_edge_text(*edge)}"


def _name(request: str) -> str:
    return request if _PLAIN.fullmatch(request) else _short(request)


@functools.lru_cache(maxsize=1024)
def _edge_text(start: str, end: str) -> str:
    # An underscore in a stage's name is escaped, so that no two edges have one text.
    start, end = (_short(stage).replace("_", "%5F") for stage in (start, end))
    return f"{start}_to_{end}"


def _short(name: str) -> str:
    text = quote(name, safe="")
    if len(text) <= _LONGEST:
        return text
    # A "!" is never in quoted text: no short name can be made to look like a long one.
    return f"{text[:60]}!{hashlib.sha256(name.encode()).hexdigest()}"


def _literal(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9/_-]", lambda found: "\\" + found[0], text)


def write_pointer(item: Item) -> bytes:
    """The record that leads from edge and request to `item`."""
    body = _POINTER.pack(_MAGIC, item.takers, item.size, 0, item.nonce.encode())
    return (body + zlib.crc32(body).to_bytes(4, "little")).ljust(POINTER_BYTES, b"\0")


def read_pointer(raw: bytes, edge: tuple[str, str], request: str) -> Item | None:
    """What such a record says; None where it is damaged, as one that was replaced while it was read."""
    body, check = raw[: _POINTER.size], raw[_POINTER.size : _POINTER.size + 4]
    if len(raw) != POINTER_BYTES or zlib.crc32(body).to_bytes(4, "little") != check:
        return None
    magic, takers, size, _, nonce = _POINTER.unpack(body)
    if magic != _MAGIC or not Names.is_nonce(nonce.decode("ascii", "replace")):
        return None
    return Item(edge, request, nonce.decode(), size, takers)
