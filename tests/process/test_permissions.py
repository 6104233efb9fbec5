"""What stands under our names and is not ours is never followed, never written to, never waited for.

A victim, a file that the planted thing leads to or is, must keep every byte.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import leftovers, payloads
from support.child import Children, run_script

from omni_fastshm import janitor, segments
from omni_fastshm.errors import MetadataError, SegmentError

VICTIM = b"keep me " * 1000
ENDPOINT = 0x0123456789ABCDEF


class Kind(NamedTuple):
    """Something that can be planted: how, and whether what is planted could be an object of ours."""

    name: str
    plant: Callable[[Path, Path], object]
    ours: bool = False
    root: bool = False


def plant_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def plant_of_another_user(path: Path) -> None:
    plant_file(path, VICTIM, 0o666)
    os.chown(path, 12345, 12345)


HARD_LINK = Kind("a hard link", lambda path, victim: os.link(victim, path), ours=True)
KINDS = [
    Kind("a link", lambda path, victim: path.symlink_to(victim)),
    Kind("a dangling link", lambda path, _: path.symlink_to(path.with_name(path.name + "-nowhere"))),
    Kind("a link to zeros", lambda path, _: path.symlink_to("/dev/zero")),
    Kind("a link to a folder", lambda path, victim: path.symlink_to(victim.parent)),
    Kind("a link to itself", lambda path, _: path.symlink_to(path)),
    Kind("a FIFO", lambda path, _: os.mkfifo(path)),
    Kind("a folder", lambda path, _: path.mkdir()),
    Kind("a socket", lambda path, _: plant_socket(path)),
    Kind("an empty file", lambda path, _: plant_file(path, b""), ours=True),
    Kind("a short file", lambda path, _: plant_file(path, b"x" * 100), ours=True),
    Kind("a file of no mode", lambda path, _: plant_file(path, b"x" * 100, 0), ours=True),
    HARD_LINK,
    Kind("another user's file", lambda path, _: plant_of_another_user(path), root=True),
    Kind("a device", lambda path, _: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)), root=True),
    Kind("a disk", lambda path, _: os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(7, 0)), root=True),
]
ALL = [pytest.param(kind, id=kind.name, marks=pytest.mark.root if kind.root else ()) for kind in KINDS]


@pytest.fixture
def victim(namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A file on the same mount that must not change."""
    path = leftovers.MOUNT / f"victim-{namespace}"
    path.write_bytes(VICTIM)
    yield path
    path.unlink()


@pytest.fixture
def plant(namespace: str, victim: Path) -> Iterator[Callable[[Kind, str], Path]]:
    """A function that puts something under one of our names."""

    def put_there(kind: Kind, suffix: str) -> Path:
        path = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{suffix}"
        kind.plant(path, victim)
        return path

    yield put_there
    leftovers.remove(namespace)


@pytest.fixture
def next_endpoints(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that says which endpoint ids come next, as if somebody had guessed them."""
    real = os.urandom

    def choose(*ids: int) -> None:
        waiting = list(ids)

        def urandom(count: int) -> bytes:
            return waiting.pop(0).to_bytes(8, "little") if count == 8 and waiting else real(count)

        monkeypatch.setattr(os, "urandom", urandom)

    return choose


def carries(producer: Any, consumer: Any, nbytes: int = 100_000) -> bool:
    ok, _, metadata = producer.put("a", "b", "r", payloads.array(nbytes))
    return bool(ok and payloads.same(consumer.get("a", "b", "r", metadata)[0], payloads.array(nbytes)))


def stands(path: Path, before: os.stat_result) -> bool:
    """Is the very thing still there?"""
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return False
    return (now.st_ino, now.st_mode, now.st_size) == (before.st_ino, before.st_mode, before.st_size)


@pytest.mark.time_limit(40)  # less than any other: opening a FIFO may hang
class TestWhereWeMake:
    """Somebody knew the name before we made the object."""

    @pytest.mark.parametrize("kind", ALL)
    def test_a_control_segment(self, make: Any, plant: Any, victim: Path, next_endpoints: Any, kind: Kind) -> None:
        producer, consumer = make(), make()
        path = plant(kind, f"{ENDPOINT:016x}.ctl")
        before = os.lstat(path)
        next_endpoints(ENDPOINT)
        assert carries(producer, consumer)
        assert stands(path, before)
        assert f"{ENDPOINT:016x}" not in producer._producer.name
        assert victim.read_bytes() == VICTIM

    def test_all_control_segments_that_are_tried(
        self, make: Any, plant: Any, next_endpoints: Any, shm_names: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        producer = make(put_timeout_s=30)
        for n in range(20):
            plant(KINDS[n % 8], f"{n:016x}.ctl")
        names = shm_names()
        next_endpoints(*range(20))
        start = time.monotonic()
        assert producer.put("a", "b", "r", payloads.array(100_000)) == (False, 0, None)
        assert time.monotonic() - start < 5
        assert "every name was taken" in caplog.text
        assert [name for name in shm_names() if not name.endswith(".dir")] == names
        assert carries(producer, make())

    @pytest.mark.parametrize("kind", ALL)
    def test_a_data_segment(self, make: Any, plant: Any, victim: Path, next_endpoints: Any, kind: Kind) -> None:
        producer, consumer = make(segment_bytes=1 << 20, max_bytes=8 << 20), make()
        next_endpoints(ENDPOINT)
        assert carries(producer, consumer)
        plant(kind, f"{ENDPOINT:016x}.d1")
        assert carries(producer, consumer, 3 << 20)
        assert victim.read_bytes() == VICTIM

    @pytest.mark.parametrize("kind", ALL)
    def test_a_directory(self, make: Any, plant: Any, victim: Path, kind: Kind) -> None:
        connector = make(put_timeout_s=0.1)
        path = plant(kind, "dir")
        before = os.lstat(path)
        usable = kind.ours and (kind.name != "a file of no mode" or os.geteuid() == 0)
        if usable:  # it is as one of ours whose maker died early: it is replaced
            assert carries(connector, make(key_lookup=True))
            assert victim.read_bytes() == VICTIM
            return
        with pytest.raises((MetadataError, SegmentError), match=re.escape(path.name)):
            make(key_lookup=True)
        with contextlib.suppress(MetadataError):
            assert connector.put("a", "b", "r", payloads.array(100_000)) == (False, 0, None)
        connector.cleanup("r")
        connector.close()
        assert stands(path, before)
        assert victim.read_bytes() == VICTIM


@pytest.mark.time_limit(40)  # less than any other: opening a FIFO may hang
class TestWhereWeOpen:
    """Metadata, or a listing, leads to a name."""

    @pytest.mark.parametrize("suffix", ["ctl", "d0"])
    @pytest.mark.parametrize("kind", ALL)
    def test_by_metadata(
        self,
        make: Any,
        plant: Any,
        victim: Path,
        next_endpoints: Any,
        kind: Kind,
        suffix: str,
    ) -> None:
        producer, consumer = make(), make()
        next_endpoints(ENDPOINT)
        metadata = producer.put("a", "b", "r", payloads.array(100_000))[2]
        os.unlink(leftovers.MOUNT / f"{metadata['shm']['name'][: -len('ctl')]}{suffix}")
        path = plant(kind, f"{ENDPOINT:016x}.{suffix}")
        before = os.lstat(path)
        with pytest.raises((MetadataError, SegmentError), match=re.escape(path.name)):
            consumer.get("a", "b", "r", metadata)
        assert consumer.health()["errors"] == 1
        assert stands(path, before)
        assert victim.read_bytes() == VICTIM

    @pytest.mark.parametrize("suffix", [f"{ENDPOINT:016x}.ctl", f"{ENDPOINT:016x}.d0", "dir"])
    @pytest.mark.parametrize("kind", ALL)
    def test_by_the_janitor(
        self,
        plant: Any,
        victim: Path,
        kind: Kind,
        suffix: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = plant(kind, suffix)
        before = os.lstat(path)
        swept = janitor.sweep(os.environ["OMNI_FASTSHM_NAMESPACE"], force=True)
        assert swept.alive == swept.kept == []
        if swept.removed:
            assert kind.ours
            assert swept.removed == [path.name]
        else:
            assert stands(path, before)
            assert f"{path.name} left alone" in caplog.text
        assert victim.read_bytes() == VICTIM

    def test_a_hard_link_among_the_segments_of_a_dead_producer(
        self, make: Any, plant: Any, victim: Path, children: Children
    ) -> None:
        child = children.with_connector(orphan_ttl_s=0)
        name = child.run("result = c.put('a', 'b', 'r', np.arange(20_000))[2]['shm']['name']")
        child.kill()
        path = plant(HARD_LINK, name.split(".")[-2] + ".d1")
        make().close()
        assert victim.read_bytes() == VICTIM
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    @pytest.mark.parametrize("kind", ALL)
    def test_by_the_neighbours_of_a_living_producer(self, make: Any, plant: Any, victim: Path, kind: Kind) -> None:
        """A thing that claims to be a data segment of a living producer is its producer's alone to remove."""
        producer, consumer = make(), make()
        assert carries(producer, consumer)
        endpoint = producer._producer.name.split(".")[3]
        path = plant(kind, f"{endpoint}.d9")
        before = os.lstat(path)
        assert janitor.sweep(os.environ["OMNI_FASTSHM_NAMESPACE"], force=True).removed == []
        assert stands(path, before)
        assert victim.read_bytes() == VICTIM
        assert carries(producer, consumer)


class TestModes:
    """Objects are for their owner alone, from their first moment on."""

    @pytest.mark.parametrize("umask", [0, 0o022, 0o777])
    def test_whatever_the_umask(self, make: Any, shm_names: Any, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
        first: list[int] = []
        real = segments._create

        def create(name: str) -> int:
            descriptor = real(name)
            first.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
            return descriptor

        monkeypatch.setattr(segments, "_create", create)
        previous = os.umask(umask)
        try:
            connector = make(segment_bytes=1 << 20, key_lookup=True)
            assert connector.put("a", "b", "r", payloads.array(3 << 20))[0]
        finally:
            os.umask(previous)
        assert len(first) == len(shm_names()) == 3
        assert all(mode & ~0o600 == 0 for mode in first), "open to others for a moment"
        for name in shm_names():
            assert stat.S_IMODE(os.lstat(leftovers.MOUNT / name).st_mode) == 0o600, name


@pytest.mark.root
class TestUsers:
    """Several users with the same settings, on one host."""

    def test_nobody_touches_what_belongs_to_another(self) -> None:
        run_script("several_users.py", "foreign")

    def test_what_another_plants_under_our_names(self) -> None:
        run_script("several_users.py", "squatted")

    def test_a_process_that_changes_its_user(self) -> None:
        run_script("several_users.py", "changed")

    def test_a_segment_made_as_another_user(self) -> None:
        run_script("several_users.py", "grown")


USE = "result = bool((view == 7).all()) and all(c.put('a', 'b', n, np.full(9_000, n))[0] for n in range(30))"


class TestRemovedFromOutside:
    """Somebody removes names while they are in use. Mapped memory stays, and nobody is cut off from it by a janitor."""

    def in_use(self, children: Children) -> Any:
        child = children.with_connector(segment_bytes=1 << 20, max_bytes=8 << 20)
        child.run("view = c.get('a', 'b', 'r', c.put('a', 'b', 'r', np.full(30_000, 7))[2])[0]")
        child.killed = True  # what it says at its end is of no interest, if only it comes to it
        return child

    @pytest.mark.parametrize(
        "suffix",
        [
            ".ctl",
            ".d0",
            ".dir",
        ],
    )
    def test_one_kind_of_name(self, make: Any, children: Children, namespace: str, suffix: str) -> None:
        child = self.in_use(children)
        for name in leftovers.names(namespace):
            if name.endswith(suffix):
                os.unlink(leftovers.MOUNT / name)
        for _ in range(2):
            make().close()  # each start runs the janitor
        janitor.sweep(namespace, force=True)
        assert child.run(USE) is True
        assert child.run("del view; c.close()") is None
        assert child.stop() == 0
        make().close()
        assert leftovers.names(namespace) == []

    def test_all_of_them(self, make: Any, children: Children, namespace: str) -> None:
        child = self.in_use(children)
        leftovers.remove(namespace)
        make().close()
        assert child.run(USE) is True
        assert child.run("del view; c.close()") is None
        assert child.stop() == 0
        assert leftovers.names(namespace) == []
