"""Targets `frame`, `lease` and `race`: what `codec.decode` does with a frame that the codec did not write like that."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from fuzz import seeds, trees
from fuzz.chance import Chance
from fuzz.shared import ControlFile, own_namespace

from omni_fastshm.codec import decode
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

MOST = 1 << 20  # bytes of any frame made here, and of what is decoded from it
CORPUS = Path(__file__).parent / "corpus" / "frame.txt"


def parts(frame: bytes) -> tuple[int, bytes, bytes]:
    """Flags, header and data area of a frame."""
    (size,) = struct.unpack_from("<I", frame, 4)
    align = 64 if frame[3] & 0x40 else 8
    return frame[3], frame[16 : 16 + size], frame[-(-(16 + size) // align) * align :]


def build(flags: int, header: bytes, data: bytes) -> bytes:
    """A frame that is right at its outside."""
    align = 64 if flags & 0x40 else 8
    start = -(-(16 + len(header)) // align) * align if data else 16 + len(header)
    return (
        b"OFS"
        + bytes([flags])
        + struct.pack("<IQ", len(header), start + len(data))
        + header.ljust(start - 16, b"\0")
        + data
    )


class Maker:
    """Makes frames out of the seeds and the kept corpus."""

    def __init__(self) -> None:
        self.pool = [*seeds.frames(), *((frame, "exact") for frame in kept().values())]

    def make(self, chance: Chance) -> tuple[bytes, str]:
        """A frame and the profile to read it with."""
        frame, wire = chance.pick(self.pool)
        kind = chance.randrange(10)
        if kind == 0:
            return chance.changed(frame), wire
        if kind == 1:
            return frame[: chance.randrange(len(frame) + 1)], wire
        flags, header, data = parts(frame)
        if kind < 4:
            header = trees.encode(trees.made_up(chance))
            data = chance.pick((data, bytes(64), b""))
        elif kind == 4:
            header = chance.changed(header)
        else:
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, TypeError, RecursionError):
                header = trees.encode(trees.changed(msgspec.msgpack.decode(header), chance))
        if chance.one_in(10):
            data = chance.changed(data)
        made = bytearray(build(flags, header, data))
        if chance.one_in(10):
            at, width = chance.pick(((3, 1), (4, 4), (8, 8)))
            value = chance.near(int.from_bytes(made[at : at + width], "little"), width * 8)
            made[at : at + width] = value.to_bytes(width, "little")
        return bytes(made), chance.pick((wire,) * 9 + ("host",))


def options(chance: Chance) -> dict[str, Any]:
    """Ways to read a frame that do not change what is right."""
    return {
        "writable": chance.one_in(2),
        "copy": chance.pick((None, True, False)),
        "copy_below": chance.pick((0, 64, 4096)),
        "types": chance.pick(((), ("fuzz.seeds:Piece", "no.such:Class"))),
    }


class TooLarge(BaseException):
    """A result claims more bytes than there are; not an Exception, for `use` does not mind those."""


def touch(value: Any, left: int = 60) -> int:
    """Use what was decoded: memory that is not there would be noticed now and not in somebody's model."""
    if isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() > MOST:
            raise TooLarge(f"a tensor of {value.shape}")
        value.clone()
    elif isinstance(value, np.ndarray | np.generic):
        if value.nbytes > MOST:
            raise TooLarge(f"an array of {value.shape}, {value.dtype}")
        if value.nbytes:
            value.tobytes()
            repr(value) if value.size <= 64 else None
    elif isinstance(value, list | tuple | set | frozenset | dict):
        for inner in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            if left > 0:
                left = touch(inner, left - 1)
    else:
        repr(value)
    return left


def use(value: Any) -> None:
    """`touch`, without minding that made-up values may have no repr."""
    with contextlib.suppress(Exception):
        touch(value)


class Frame:
    """Frames as plain bytes and over memory with the interface of a lease."""

    def __init__(self) -> None:
        self._maker = Maker()
        self._cliff = Cliff(1 << 18)
        self._asked: list[str] = []

    def run(self, chance: Chance) -> str:
        frame, wire = self._maker.make(chance)
        kind = chance.randrange(3)
        if kind == 0:
            use(decode(frame, wire=wire, **options(chance)))
            return "read"
        memory = self._cliff.hold(frame)
        source = Plain(memory, self._asked) if kind == 1 else None
        use(decode(memory, source=source, wire=wire, **options(chance)))
        return "read"

    def describe(self, chance: Chance) -> str:
        frame, wire = self._maker.make(chance)
        return f"wire={wire} {frame.hex()}"

    def check(self) -> None:
        asked, self._asked[:] = list(self._asked), []
        assert not asked, f"asked for what lies outside: {asked}"

    def close(self) -> None:
        pass


class Cliff:
    """Memory with nothing behind it: whoever reads one byte too many dies.

    Args:
        room: the most it can hold.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def hold(self, frame: bytes) -> memoryview:
        """These bytes, up to the edge; longer ones lie in memory of their own."""
        if len(frame) > self._room:
            return memoryview(bytearray(frame))
        start = self._room - len(frame)
        self._memory[start : self._room] = frame
        return memoryview(self._memory)[start : self._room]


class Plain:
    """A lease over plain memory; its other segments have 4096 bytes.

    Args:
        memory: with the frame.
        asked: gets a line for each view that does not lie inside it.
    """

    def __init__(self, memory: memoryview, asked: list[str]) -> None:
        self._memory = memory
        self._asked = asked

    def view(self, offset: int, nbytes: int, readonly: bool) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self._memory):
            self._asked.append(f"[{offset}, +{nbytes}) of {len(self._memory)}")
        piece = self._memory[offset : offset + nbytes]
        return piece.toreadonly() if readonly else piece

    def external(self, segment: int, offset: int, nbytes: int, readonly: bool) -> memoryview:
        return memoryview(bytearray(4096))[offset : offset + nbytes]


class Lease:
    """Frames in a real block: put, overwritten in the segment's file, then got by a consumer."""

    SIZE = 16000

    def __init__(self) -> None:
        self._maker = Maker()
        self._producer = SharedMemoryConnector({**own_namespace(), "segment_bytes": 1 << 20, "shm_threshold_bytes": 0})
        self._consumers = {
            wire: SharedMemoryConnector({**own_namespace(), "wire": wire, "copy_below": 64})
            for wire in ("exact", "host")
        }

    def run(self, chance: Chance) -> str:
        frame, wire = self._maker.make(chance)
        payload: Any = bytes(self.SIZE)
        if chance.one_in(2):
            payload = {"lent": self._producer.allocate((5000,), np.uint8), "rest": payload}
        metadata = self._producer.put("a", "b", "r", payload, consumers=chance.pick((1, 1, 3)))[2]
        del payload
        self._overwrite(metadata["shm"], frame[: self.SIZE])
        got = self._consumers[wire].get("a", "b", "r", metadata, copy=chance.pick((None, True, False)))
        if got is None:
            return "none"
        use(got[0])
        return "read"

    def check(self) -> None:
        self._producer.cleanup("r")
        for consumer in self._consumers.values():
            assert not consumer.health()["leases"], "a lease is left"
        assert self._producer.health()["live_blocks"] <= 1, "blocks are left"

    def _overwrite(self, place: dict[str, Any], frame: bytes) -> None:
        with ControlFile(place["name"]) as control:
            number, offset = control.block(place["block"], "segment"), control.block(place["block"], "offset")
        descriptor = os.open(f"/dev/shm/{place['name'].removesuffix('.ctl')}.d{number}", os.O_RDWR)
        try:
            os.pwrite(descriptor, frame, offset)
        finally:
            os.close(descriptor)

    def describe(self, chance: Chance) -> str:
        return self._maker.make(chance)[0].hex()

    def close(self) -> None:
        for connector in (*self._consumers.values(), self._producer):
            connector.close()


class Race:
    """Another process changes the bytes all the time while they are read."""

    ROOM = 1 << 16

    def __init__(self) -> None:
        self._pool = [(frame, wire) for frame, wire in seeds.frames() if len(frame) <= self.ROOM]
        self._memory = mmap.mmap(-1, self.ROOM)
        self._size = mmap.mmap(-1, 8)
        self._asked: list[str] = []
        self._child = os.fork()
        if self._child == 0:
            self._scribble()

    def _scribble(self) -> None:
        chance = Chance(os.getpid())
        parent = os.getppid()
        while os.getppid() == parent:
            (size,) = struct.unpack("<Q", self._size[:8])
            clean = bytes(self._memory[:size])
            for _ in range(200 if size else 0):
                at = chance.randrange(size)
                self._memory[at] = chance.getrandbits(8)
                self._memory[at] = clean[at]
        os._exit(0)

    def run(self, chance: Chance) -> str:
        frame, wire = chance.pick(self._pool)
        self._memory[: len(frame)] = frame
        self._size[:8] = struct.pack("<Q", len(frame))
        memory = memoryview(self._memory)[: len(frame)]
        for _ in range(4):
            use(decode(memory, source=Plain(memory, self._asked), wire=wire, **options(chance)))
        return "read"

    def describe(self, chance: Chance) -> str:
        return chance.pick(self._pool)[0].hex()

    def check(self) -> None:
        assert not self._asked, f"asked for what lies outside: {self._asked}"

    def close(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)


def kept() -> dict[str, bytes]:
    """The kept frames, a name and hexadecimal in each line: all of them went wrong once."""
    pairs = (line.split() for line in CORPUS.read_text().splitlines())
    return {name: bytes.fromhex(frame) for name, frame in pairs}
