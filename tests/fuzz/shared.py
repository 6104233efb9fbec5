"""A control segment or directory as a file whose fields can be read and written, by the names in the layout's table."""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Any

import numpy as np
from fuzz.chance import Chance

from omni_fastshm import inventory, janitor, segments, watching
from omni_fastshm._core import BLOCK_LIMIT, CONTROL_SIZE, layout
from omni_fastshm.cli import top

MOUNT = "/dev/shm"
ROWS: dict[str, list[tuple[str, int, int]]] = {}
for _structure, _name, _offset, _size in layout():
    ROWS.setdefault(_structure, []).append((_name, _offset, _size))
SIZES = {name: max(offset + size for _, offset, size in rows) for name, rows in ROWS.items()}
HEADER = SIZES["ofs_control"]
BLOCK = SIZES["ofs_block"]


def namespace() -> str:
    """Where this process's targets live; the runner removes what is left of it."""
    return os.environ["OMNI_FASTSHM_NAMESPACE"]


def own_namespace() -> dict[str, Any]:
    return {"namespace": namespace()}


def place(structure: str, name: str) -> tuple[int, int]:
    """Offset and size of a field."""
    return next((offset, size) for field, offset, size in ROWS[structure] if field == name)


class SharedFile:
    """One object on the mount, mapped for scribbling. What others map stays as it is when this ends."""

    def __init__(self, name: str) -> None:
        descriptor = os.open(f"{MOUNT}/{name}", os.O_RDWR)
        try:
            self.memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()

    def field(self, at: int, size: int) -> int:
        return int.from_bytes(self.memory[at : at + size], "little")

    def store(self, at: int, size: int, value: int) -> None:
        self.memory[at : at + size] = (value & ((1 << size * 8) - 1)).to_bytes(size, "little")

    def scribble(self, chance: Chance, structure: str, base: int) -> str:
        """Change one field of the structure at `base`; says which."""
        name, offset, size = chance.pick(ROWS[structure])
        width = size if size in (4, 8) else 8
        at = base + offset + (0 if size <= 8 else chance.randrange(size // width) * width)
        old = self.field(at, width)
        new = chance.near(old, width * 8)
        self.store(at, width, new)
        return f"{structure}.{name} at {at}: {old:#x} -> {new:#x}"


class ControlFile(SharedFile):
    """A producer's control segment."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.keys_at, self.blocks_at = HEADER, CONTROL_SIZE - BLOCK_LIMIT * BLOCK
        self.keyed = self.header("key_slots") != 0

    def header(self, name: str) -> int:
        return self.field(*place("ofs_control", name))

    def store_header(self, name: str, value: int) -> None:
        self.store(*place("ofs_control", name), value)

    def block(self, index: int, name: str) -> int:
        offset, size = place("ofs_block", name)
        return self.field(self.blocks_at + index * BLOCK + offset, size)

    def scribble_any(self, chance: Chance, blocks: int = 8) -> str:
        """Change one thing that others rely on: a field of the header, of a block in use, or the key table."""
        kind = chance.randrange(8)
        if kind < 4:
            return self.scribble(chance, "ofs_control", 0)
        if kind < 7:
            return self.scribble(chance, "ofs_block", self.blocks_at + chance.randrange(blocks) * BLOCK)
        return self._scribble_keys(chance)

    def _scribble_keys(self, chance: Chance) -> str:
        at = chance.randrange(self.keys_at, self.blocks_at, 8)
        if self.keyed and chance.one_in(2):
            table = np.frombuffer(self.memory[self.keys_at : self.blocks_at], np.uint64)
            used = table.nonzero()[0].tolist()
            at = self.keys_at + 8 * chance.pick(used) if used else at
        value = (self.field(at, 8) & ~0xFFFFFFFF) | chance.number(32)
        self.store(at, 8, value)
        return f"key entry at {at}: {value:#x}"


def look_around() -> None:
    """What an operator asks for: it reads everything and changes nothing."""
    inventory.take_snapshot(namespace()).as_dict()
    seen = watching.look(namespace())
    top.render(watching.compare(seen, watching.look(namespace())))
    janitor.preview(namespace())


def endpoint_name(endpoint: int) -> str:
    name: str = segments.control_name(namespace(), endpoint)
    return name
