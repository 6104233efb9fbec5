"""Sweeping beside things that the sweeper must leave alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children

from omni_fastshm import janitor, segments
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import MetadataError

ENDPOINT = "0123456789abcdef"
OBJECTS = [f"{ENDPOINT}.ctl", f"{ENDPOINT}.d0", f"{ENDPOINT}.d17", "dir"]


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: connect(SharedMemoryConnector, **settings)


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def dangling(path: Path) -> None:
    path.symlink_to("/nothing/there")


def folder(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def other_user(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 12345, 12345)


KINDS = [link, dangling, folder, fifo, pytest.param(other_user, marks=pytest.mark.root)]


@pytest.fixture
def plant(namespace: str) -> Iterator[Callable[[Any, str], Path]]:
    """A function that puts something that is not ours under one of our names."""

    def put_there(kind: Callable[[Path], None], suffix: str) -> Path:
        path = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{suffix}"
        kind(path)
        return path

    yield put_there
    leftovers.remove(namespace)


@pytest.mark.parametrize("kind", KINDS)
class TestForeign:
    """What stands under one name keeps nobody from working with the others."""

    @pytest.mark.parametrize("suffix", OBJECTS[:-1])
    @pytest.mark.parametrize("key_lookup", [False, True])
    def test_connectors_start_and_work(self, make: Any, plant: Any, kind: Any, suffix: str, key_lookup: bool) -> None:
        path = plant(kind, suffix)
        before = os.lstat(path)
        one, two = make(key_lookup=key_lookup), make(key_lookup=key_lookup)
        ok, _, metadata = one.put("a", "b", "r", np.arange(50_000))
        assert ok
        assert two.get("a", "b", "r", None if key_lookup else metadata) is not None
        one.close()
        two.close()
        assert os.lstat(path).st_ino == before.st_ino

    def test_in_place_of_the_directory(self, make: Any, plant: Any, kind: Any, namespace: str) -> None:
        path = plant(kind, "dir")
        connector = make()
        assert connector.get("a", "b", "r", connector.put("a", "b", "r", 1)[2])[0] == 1
        with pytest.raises(MetadataError, match=rf"{path.name}.*refused"):
            make(key_lookup=True)
        connector.close()
        assert os.path.lexists(path)

    @pytest.mark.parametrize("suffix", OBJECTS)
    def test_a_sweep_names_it_and_goes_on(
        self, plant: Any, kind: Any, suffix: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = plant(kind, suffix)
        stray = plant(Path.touch, "fedcba9876543210.d3")
        swept = janitor.sweep(os.environ["OMNI_FASTSHM_NAMESPACE"])
        assert swept.removed == [stray.name]
        assert os.path.lexists(path)
        assert f"{path.name} left alone" in caplog.text

    def test_among_the_segments_of_a_dead_producer(
        self, make: Any, plant: Any, kind: Any, children: Children, shm_names: Any, caplog: Any
    ) -> None:
        child = children.with_connector(orphan_ttl_s=0)
        name = child.run("result = c.put('a', 'b', 'r', np.arange(50_000))[2]['shm']['name']")
        child.kill()
        assert child.process.returncode == -signal.SIGKILL
        path = plant(kind, name.split(".")[-2] + ".d1")
        make(orphan_ttl_s=0).close()
        assert shm_names() == [path.name]
        caplog.clear()  # the log keeps the error, and with it the descriptors of the functions it went through


def test_a_data_segment_made_after_the_look_round_goes_as_well(
    children: Children, namespace: str, shm_names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producer grew, and died, between a sweep's listing of all names and its getting the lock."""
    child = children.with_connector(orphan_ttl_s=0)
    child.run("result = c.put('a', 'b', 'r', np.arange(50_000))[0]")
    child.kill()
    assert child.process.returncode == -signal.SIGKILL
    listings = []

    def list_names(prefix: str) -> list[str]:
        listings.append(prefix)
        names = real(prefix)
        return [name for name in names if name.endswith(".ctl")] if len(listings) == 1 else names

    real = segments.list_names
    monkeypatch.setattr(segments, "list_names", list_names)
    janitor.sweep(namespace)
    assert shm_names() == []
