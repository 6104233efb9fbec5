"""Targets `control`, `scribble`, `directory`: what becomes of shared fields that somebody else has written.

`control` plants a file under a producer's name: a real segment's bytes with some fields changed, cut short or made
longer, with and without its data segment, owned or orphaned. `scribble` changes fields of a living producer's segment
while that producer and a consumer work with it; `directory` does so with the namespace's directory.
"""

from __future__ import annotations

import copy
import fcntl
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from fuzz.chance import Chance
from fuzz.shared import HEADER, MOUNT, ControlFile, SharedFile, endpoint_name, look_around, namespace, own_namespace

from omni_fastshm import janitor, segments
from omni_fastshm._core import LOCK_OWNER, Inbox, Segment
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.directory import leave_directory, open_directory
from omni_fastshm.errors import FastShmError

KEYED_EDGE = ("a", "b")
HOLE = 256 << 20  # length of a data segment without memory


def settings(**more: Any) -> dict[str, Any]:
    return {
        **own_namespace(), "key_lookup": True, "segment_bytes": 1 << 18, "max_bytes": 1 << 20, "put_timeout_s": 0.005,
        "shm_threshold_bytes": 0, **more,
    }  # fmt: skip


class Image:
    """A real producer's segments as bytes: what is not zero, and the metadata of its payloads."""

    def __init__(self, *, keyed: bool) -> None:
        with SharedMemoryConnector(settings(key_lookup=keyed)) as producer:
            loan = producer.allocate((6000,), np.uint8)
            sent = [
                producer.put(*KEYED_EDGE, "r0", np.arange(900)), producer.put(*KEYED_EDGE, "r1", {"k": "v"},
                consumers=3),
                producer.put(*KEYED_EDGE, "r2", {"lent": loan}), producer.put(*KEYED_EDGE, "r3", bytes(9000)),
            ]  # fmt: skip
            self.metadata = [answer[2] for answer in sent]
            self.name = self.metadata[0]["shm"]["name"]
            self.size, self.pieces = self._read(self.name)
            self.data_size, self.data = self._read(segments.data_name(self.name, 0))

    @staticmethod
    def _read(name: str) -> tuple[int, list[tuple[int, bytes]]]:
        descriptor = os.open(f"{MOUNT}/{name}", os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            pages = [(at, os.pread(descriptor, 4096, at)) for at in _backed(descriptor, size)]
        finally:
            os.close(descriptor)
        return size, [(at, page) for at, page in pages if page.strip(b"\0")]


def _backed(descriptor: int, size: int) -> list[int]:
    found: list[int] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        found += range(start, at, 4096)
    return found


def plant(name: str, size: int, pieces: list[tuple[int, bytes]]) -> int:
    """A file with these bytes; its descriptor."""
    descriptor = os.open(f"{MOUNT}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, size)
    for at, piece in pieces:
        if at < size:
            os.pwrite(descriptor, piece[: size - at], at)
    return descriptor


def own(descriptor: int) -> None:
    """As the living producer's lock."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_OWNER, 1, 0))


class Control:
    """Planted control segments."""

    def __init__(self) -> None:
        self._images = [Image(keyed=True), Image(keyed=False)]
        self._name = ""
        self._owner = -1
        self._directory = open_directory(namespace())
        self._open: list[SharedMemoryConnector] = []

    def run(self, chance: Chance) -> str:
        image = chance.pick(self._images)
        endpoint = chance.getrandbits(64)
        self._name = endpoint_name(endpoint)
        self._plant(chance, image, endpoint)
        if self._directory is not None:
            self._directory.enter(endpoint)
        metadata = copy.deepcopy(image.metadata)
        for one in metadata:
            one["shm"]["name"] = self._name
        return self._work(chance, metadata)

    def _plant(self, chance: Chance, image: Image, endpoint: int) -> list[str]:
        self._owner = plant(self._name, image.size, image.pieces)
        if not chance.one_in(3):
            own(self._owner)
        with ControlFile(self._name) as control:
            control.store_header("endpoint", endpoint)
            done = [control.scribble_any(chance, 5) for _ in range(chance.pick((0, 1, 1, 2, 4)))]
        if chance.one_in(6):
            size = chance.pick(
                (0, 1, HEADER - 1, HEADER, image.size - 1, image.size + 8, image.size // 2, image.size << 12)
            )
            os.ftruncate(self._owner, size)
            done.append(f"length {size}")
        if not chance.one_in(8):
            size = chance.pick((image.data_size,) * 12 + (0, 1, 100, 4096, image.data_size + 4096, HOLE))
            data = plant(segments.data_name(self._name, 0), size, image.data)
            if 0 < size < HOLE:
                os.posix_fallocate(data, 0, size)
            os.close(data)
            done.append(f"data {size}")
        return done

    def _work(self, chance: Chance, metadata: list[dict[str, Any]]) -> str:
        answers = []
        for _ in range(chance.randrange(2, 8)):
            if not self._open or chance.one_in(8):
                self._open.append(SharedMemoryConnector(settings()))
            connector = chance.pick(self._open)
            step = chance.randrange(8)
            try:
                answers.append(self._step(chance, step, connector, chance.pick(metadata)))
            except FastShmError as error:
                answers.append(type(error).__name__)
        return max(set(answers), key=lambda answer: (answer == "read", answer != "none", answer))

    def _step(self, chance: Chance, step: int, connector: SharedMemoryConnector, metadata: dict[str, Any]) -> str:
        request = metadata["shm"]["request_id"]
        if step < 3:
            return told(connector.get(*KEYED_EDGE, request, metadata, copy=chance.pick((None, True))))
        if step == 3:
            return told(connector.get(*KEYED_EDGE, request))
        if step == 4:
            connector.cleanup(request)
        elif step == 5:
            return "put" if connector.put(*KEYED_EDGE, request, b"new")[0] else "refused"
        elif step == 6:
            janitor.sweep(namespace(), force=chance.one_in(2))
        else:
            return self._look()
        return "none"

    def _look(self) -> str:
        """What the janitor and tools ask of a segment."""
        look_around()
        descriptor = segments.open_descriptor(self._name)
        if descriptor is None:
            return "none"
        inbox = Inbox(Segment(self._name, descriptor, False, True), None)
        inbox.blocks()
        inbox.orphan_age()
        inbox.reap()
        return "looked"

    def check(self) -> None:
        for connector in self._open:
            connector.close()
            assert not connector.health()["leases"], "a lease is left"
        self._open.clear()
        os.close(self._owner)
        for name in segments.list_names(self._name[:-4]):
            segments.unlink(name)
        if self._directory is not None:
            for endpoint in self._directory.endpoints():
                self._directory.leave(endpoint)

    def describe(self, chance: Chance) -> str:
        image = chance.pick(self._images)
        endpoint = chance.getrandbits(64)
        self._name = endpoint_name(endpoint)
        return "\n".join(self._plant(chance, image, endpoint))

    def close(self) -> None:
        if self._directory is not None:
            leave_directory(self._directory)


def told(got: tuple[Any, int] | None) -> str:
    return "none" if got is None else "read"


class Scribble:
    """A living producer and a consumer, with a third party that writes into what they share."""

    def __init__(self, *, directory: bool = False) -> None:
        self._scribble_directory = directory
        self._ends: list[SharedMemoryConnector] = []
        self._views: list[Any] = []
        self._sent: list[dict[str, Any]] = []
        self._file: SharedFile | None = None

    def run(self, chance: Chance) -> str:
        keyed = self._scribble_directory or chance.one_in(2)
        producer = SharedMemoryConnector(settings(key_lookup=keyed))
        self._ends.append(producer)
        self._put(chance, producer, "r0")
        name = self._sent[0]["shm"]["name"]
        self._file = SharedFile(segments.directory_name(namespace())) if self._scribble_directory else ControlFile(name)
        self._ends.append(SharedMemoryConnector(settings(key_lookup=keyed)))
        answers: set[str] = set()
        for _ in range(chance.randrange(3, 12)):
            if chance.one_in(3):
                self._change(chance)
            try:
                answers.add(self._step(chance))
            except FastShmError as error:
                answers.add(type(error).__name__)
        return next((answer for answer in ("MetadataError", "refused", "read", "put") if answer in answers), "none")

    def _change(self, chance: Chance) -> str:
        if isinstance(self._file, ControlFile):
            return self._file.scribble_any(chance)
        assert self._file is not None
        return self._file.scribble(chance, "ofs_directory", 0)

    def _put(self, chance: Chance, connector: SharedMemoryConnector, request: str) -> str:
        payload: Any = np.zeros(chance.pick((10, 600, 20_000)), np.int64)
        if chance.one_in(6):
            payload = {"lent": connector.allocate((700,), np.int64), "rest": payload}
        ok, _, metadata = connector.put(*KEYED_EDGE, request, payload, consumers=chance.pick((1, 1, 2)))
        if ok:
            self._sent.append(metadata)
        return "put" if ok else "refused"

    def _get(self, chance: Chance, connector: SharedMemoryConnector, request: str) -> str:
        if chance.one_in(2):
            metadata = chance.pick(self._sent)
            got = connector.get(
                *KEYED_EDGE, metadata["shm"]["request_id"], metadata, copy=chance.pick((None, True, False))
            )
        else:
            got = connector.get(*KEYED_EDGE, request, timeout=chance.pick((0, 0, 0.002)))
        self._views.append(got)
        return told(got)

    def _step(self, chance: Chance) -> str:
        connector, request = chance.pick(self._ends), f"r{chance.randrange(4)}"
        step = chance.randrange(12)
        if step < 4:
            return self._put(chance, self._ends[0] if step else connector, request)
        if step < 8:
            return self._get(chance, self._ends[1] if step < 7 else connector, request)
        quiet: dict[int, Callable[[], Any]] = {
            8: lambda: connector.cleanup(request),
            9: connector.health,
            10: self._views.clear,
            11: lambda: self._rarer(chance, connector),
        }
        quiet[step]()
        return "none"

    def _rarer(self, chance: Chance, connector: SharedMemoryConnector) -> None:
        kind = chance.randrange(4)
        if kind == 0:
            connector.close()
        elif kind == 1:
            look_around()
            janitor.sweep(namespace(), force=chance.one_in(2))
        elif kind == 2 and len(self._ends) < 4:
            self._ends.append(SharedMemoryConnector(settings()))
        elif connector._producer is not None:
            connector._producer.outbox.reap()
            connector._producer.trim_idle()

    def check(self) -> None:
        self._views.clear()
        for connector in self._ends:
            connector.close()
            assert not connector.health()["leases"], "a lease is left"
        self._ends.clear()
        self._sent.clear()
        if self._file is not None:
            self._file.memory.close()
        janitor.sweep(namespace(), force=True)
        left = segments.list_names(f"{segments.owner_prefix()}{namespace()}.")
        for name in left:
            segments.unlink(name)
        assert not left or self._scribble_directory, f"left behind: {left}"

    def describe(self, chance: Chance) -> str:
        return "the answers depend on what the steps before did: run it with --first and --inputs 1 under a debugger"

    def close(self) -> None:
        pass


class Directory(Scribble):
    """The same with the namespace's directory as what is written into."""

    def __init__(self) -> None:
        super().__init__(directory=True)
