"""What others put under our names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import leftovers, payloads
from support.child import Children
from support.steps import PUT_BIG

from omni_fastshm.errors import MetadataError

Plant = Callable[[str, bytes], None]
"""Puts something under a name, knowing what stood there before."""


def write(path: str, content: bytes, mode: int = 0o600) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.chmod(path, mode)


def as_other_user(path: str, content: bytes) -> None:
    write(path, content, 0o666)
    os.chown(path, 12345, 12345)


def as_link(path: str, content: bytes) -> None:
    """A link to a perfect copy: only the link itself is wrong with it."""
    write(path + "-target", content)
    os.symlink(path + "-target", path)


class TestForeign:
    """What was planted under our names is neither opened nor taken for ours."""

    def got_after(self, make: Any, children: Children, suffix: str, plant: Plant) -> Any:
        """What a consumer gets, or the error, when something else stands in place of a producer's object."""
        child, consumer = children.with_connector(segment_bytes=2 << 20), make()
        metadata = child.run(PUT_BIG, rid="r", seed=1)[2]
        path = str(leftovers.MOUNT / metadata["shm"]["name"].strip("/")).removesuffix(".ctl") + suffix
        with open(path, "rb") as file:
            content = file.read()
        os.unlink(path)
        plant(path, content)
        before = os.path.lexists(path)
        start = time.monotonic()
        try:
            answer: Any = consumer.get("0", "1", "r", metadata)
        except MetadataError as error:
            answer = str(error)
            assert consumer.health()["errors"] == 1
        assert time.monotonic() - start < 5, "it waited for something"
        assert os.path.lexists(path) == before
        if isinstance(answer, str):
            assert os.path.basename(path) in answer
        child.kill()  # its own names lead elsewhere now: how it would end says nothing
        consumer.close()
        leftovers.remove(os.environ["OMNI_FASTSHM_NAMESPACE"])
        return answer

    @pytest.mark.parametrize("suffix", [".ctl", ".d0"])
    def test_a_fifo(self, make: Any, children: Children, suffix: str) -> None:
        assert "refused" in self.got_after(make, children, suffix, lambda path, _: os.mkfifo(path))

    @pytest.mark.parametrize("suffix", [".ctl", ".d0"])
    def test_a_directory(self, make: Any, children: Children, suffix: str) -> None:
        assert "refused" in self.got_after(make, children, suffix, lambda path, _: os.mkdir(path))

    @pytest.mark.parametrize("suffix", [".ctl", ".d0"])
    def test_a_link(self, make: Any, children: Children, suffix: str) -> None:
        assert "refused" in self.got_after(make, children, suffix, as_link)

    @pytest.mark.root
    @pytest.mark.parametrize("suffix", [".ctl", ".d0"])
    def test_a_file_of_another_user(self, make: Any, children: Children, suffix: str) -> None:
        assert "user 12345" in self.got_after(make, children, suffix, as_other_user)

    @pytest.mark.parametrize("suffix", [".ctl", ".d0"])
    @pytest.mark.parametrize("length", [0, 1, 4096, 100_000])
    def test_a_file_cut_short(self, make: Any, children: Children, suffix: str, length: int) -> None:
        answer = self.got_after(make, children, suffix, lambda path, content: write(path, content[:length]))
        assert isinstance(answer, str), "read from a segment that is too short for it"

    def test_a_control_segment_of_zeros(self, make: Any, children: Children) -> None:
        answer = self.got_after(make, children, ".ctl", lambda path, content: write(path, bytes(len(content))))
        assert "control segment" in answer

    @pytest.mark.parametrize("suffix", [".ctl", ".d0"])
    def test_nothing_at_all_is_a_segment_that_is_gone(self, make: Any, children: Children, suffix: str) -> None:
        assert self.got_after(make, children, suffix, lambda path, content: None) is None

    def test_files_are_for_their_owner_only(self, make: Any, shm_names: Any) -> None:
        previous = os.umask(0)
        try:
            make().put("0", "1", "r", payloads.array(100_000))
        finally:
            os.umask(previous)
        previous = os.umask(0o777)
        try:
            make().put("0", "1", "r", payloads.array(100_000))
        finally:
            os.umask(previous)
        assert len(shm_names()) >= 5
        for name in shm_names():
            assert (leftovers.MOUNT / name).stat().st_mode & 0o7777 == 0o600, name
