"""Target `names`: whatever stands on the mount under names that look like ours."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import numpy as np
from fuzz.chance import Chance
from fuzz.control import HOLE, Image, plant, settings, told
from fuzz.shared import MOUNT, look_around, namespace
from support import leftovers

from omni_fastshm import janitor, segments
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import FastShmError

EDGE = ("a", "b")
SUFFIXES = [
    "ctl", "ctl", "d0", "d0", "d1", "d01", "d-1", "dx", "d", "d\u00b2", "d\u0661", "d4294967296", "d" + "9" * 80,
    "d0.d0", "ctl.ctl", "CTL",
    "ctl\n", "d0\n", "d\udcff", "dir", "", "\udcff.dir",
]  # fmt: skip
KINDS = (
    "bytes",
    "empty",
    "image",
    "hole",
    "fifo",
    "folder",
    "dangling",
    "device",
    "link",
    "socket",
    "nobody",
    "stranger",
)


def put_there(chance: Chance, path: str, kind: str, image: Image) -> None:
    """An object of that kind at `path`, where nothing is."""
    name = os.path.basename(path)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(MOUNT, os.O_RDONLY)
            try:
                with contextlib.suppress(OSError):  # the path may be too long for a socket
                    made.bind(f"/proc/self/fd/{here}/{name}")
            finally:
                os.close(here)
    elif kind in ("dangling", "device", "link"):
        target = {
            "dangling": "nowhere",
            "device": "/dev/zero",
            "link": f"{MOUNT}/{segments.directory_name(namespace())}",
        }
        os.symlink(target[kind], path)
    elif kind == "hole":
        os.close(plant(name, HOLE, [(0, image.pieces[0][1])] if chance.one_in(2) else []))
    elif kind == "image":
        os.close(plant(name, image.size, image.pieces))
    else:
        os.close(plant(name, 0, []))
        with open(path, "wb") as file:
            file.write(chance.blob(200) if kind != "empty" else b"")
        if kind == "nobody":
            os.chmod(path, 0)
        elif kind == "stranger" and os.geteuid() == 0:
            os.chown(path, 12345, 12345)


class Names:
    """Objects of every kind under every name that could be taken for ours, with connectors at work beside them."""

    def __init__(self) -> None:
        self._image = Image(keyed=True)
        self._ends: list[SharedMemoryConnector] = []

    def _plan(self, chance: Chance, endpoints: list[str]) -> list[tuple[str, str]]:
        planned = []
        for _ in range(chance.pick((1, 1, 2, 4))):
            stem = chance.pick((*endpoints, f"{segments.owner_prefix()}{namespace()}.{chance.getrandbits(64):016x}."))
            name = segments.directory_name(namespace()) if chance.one_in(6) else stem + chance.pick(SUFFIXES)
            planned.append((name, chance.pick(KINDS)))
        return planned

    def run(self, chance: Chance) -> str:
        endpoints, metadata = [], []
        if not chance.one_in(3):
            self._ends.append(SharedMemoryConnector(settings()))
            metadata.append(self._ends[0].put(*EDGE, "r", np.zeros(chance.pick((10, 20_000))))[2])
            endpoints.append(metadata[0]["shm"]["name"].removesuffix("ctl"))
        for name, kind in self._plan(chance, endpoints):
            path = f"{MOUNT}/{name}"
            if os.path.lexists(path) and not os.path.isdir(path):
                os.unlink(path)
            if not os.path.lexists(path):
                put_there(chance, path, kind, self._image)
        answers = {self._step(chance, metadata) for _ in range(chance.randrange(2, 8))}
        return next(
            (answer for answer in ("MetadataError", "SegmentError", "read", "put") if answer in answers), "none"
        )

    def _step(self, chance: Chance, metadata: list[Any]) -> str:
        try:
            if not self._ends or chance.one_in(4):
                self._ends.append(SharedMemoryConnector(settings()))
            connector = chance.pick(self._ends)
            step = chance.randrange(7)
            if step == 0 and metadata:
                return told(connector.get(*EDGE, "r", metadata[0]))
            if step == 1:
                return told(connector.get(*EDGE, "r"))
            if step == 2:
                return "put" if connector.put(*EDGE, "r", b"new")[0] else "refused"
            if step == 3:
                connector.cleanup("r")
            elif step == 5:
                look_around()
            elif step == 4:
                janitor.sweep(namespace(), force=chance.one_in(2))
            else:
                connector.close()
                self._ends.remove(connector)
        except FastShmError as error:
            return type(error).__name__
        return "none"

    def check(self) -> None:
        for connector in self._ends:
            connector.close()
        self._ends.clear()
        for name in leftovers.names(namespace()):
            path = leftovers.MOUNT / name
            if path.is_file() and not path.is_symlink():
                assert path.stat().st_blocks * 512 < HOLE, f"somebody gave the hole {name} its memory"
        leftovers.remove(namespace())

    def describe(self, chance: Chance) -> str:
        return repr(self._plan(chance, []))

    def close(self) -> None:
        pass
