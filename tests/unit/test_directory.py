"""The namespace's directory while others come, go and sweep at the same moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support import leftovers

from omni_fastshm import directory, janitor, segments
from omni_fastshm._core import LOCK_MAKER, LOCK_USERS, Directory, Segment
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import SegmentError

Neighbour = Callable[[str], None]
"""What another process does in the middle of a call here."""


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds a connector that uses the namespace's directory."""
    return lambda **settings: connect(SharedMemoryConnector, **{"key_lookup": True, **settings})


@contextmanager
def descriptor(name: str) -> Iterator[int]:
    fd = segments.open_descriptor(name)
    assert fd is not None
    try:
        yield fd
    finally:
        os.close(fd)


class Locks:
    """`Segment` as the directory's code sees it, with an action after a lock was taken, or beside its end."""

    def __init__(
        self, after: dict[int, Callable[[], None]], unlocking: Callable[[], None] | None = None, late: bool = False
    ) -> None:
        self._after = after
        self._unlocking = unlocking
        self._late = late

    def __call__(self, *args: Any) -> Segment:
        return Segment(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(Segment, name)

    def lock(self, fd: int, name: str, byte: int, exclusive: bool = True) -> bool:
        done = Segment.lock(fd, name, byte, exclusive)
        action = self._after.pop(byte, None) if done else None
        if action is not None:
            action()
        return done

    def lock_wait(self, fd: int, name: str, byte: int, exclusive: bool = True) -> None:
        Segment.lock_wait(fd, name, byte, exclusive)
        action = self._after.pop(byte, None)
        if action is not None:
            action()

    def unlock(self, fd: int, name: str, byte: int) -> None:
        action, self._unlocking = self._unlocking, None
        if self._late:
            Segment.unlock(fd, name, byte)
        if action is not None:
            action()
        if not self._late:
            Segment.unlock(fd, name, byte)


class Finished:
    """`Directory` as the directory's code sees it, with an action between finishing a new one and using it."""

    valid = staticmethod(Directory.valid)
    made = staticmethod(Directory.made)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __call__(self, segment: Segment, make: bool = False) -> Directory:
        built = Directory(segment, make)
        if make:
            self._action()
        return built


def sweeps(namespace: str) -> None:
    janitor.sweep(namespace)


def joins_and_leaves(namespace: str) -> None:
    found = directory.open_directory(namespace, make=False)
    if found is not None:
        directory.leave_directory(found)


def shared_by_all(one: Any, two: Any) -> bool:
    """Do both use the directory that has the name, and does what one sends reach the other?"""
    found = [os.fstat(each._directory.segment.fd) for each in (one, two)]
    same = found[0].st_ino == found[1].st_ino and [each.st_nlink for each in found] == [1, 1]
    sent = one.put("a", "b", "r", [1, 2])[0]
    return bool(same and sent and two.get("a", "b", "r") is not None)


class TestMaking:
    """Nobody removes a directory that is being made, or that its maker is about to use."""

    @pytest.mark.parametrize("neighbour", [sweeps, joins_and_leaves])
    def test_between_making_it_and_using_it(
        self, make: Any, namespace: str, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []

        def meanwhile() -> None:
            monkeypatch.setattr(directory, "Directory", Directory)
            neighbour(namespace)
            seen.append(len(leftovers.names(namespace)))

        monkeypatch.setattr(directory, "Directory", Finished(meanwhile))
        one = make()
        assert seen == [1]
        assert shared_by_all(one, make())

    def test_as_soon_as_its_name_is_there(self, make: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = segments.make

        def swept(*args: Any, **kwargs: Any) -> Segment:
            made = real(*args, **kwargs)
            janitor.sweep(namespace)
            return made

        with monkeypatch.context() as patch:
            patch.setattr(segments, "make", swept)
            one = make()
        assert shared_by_all(one, make())

    @pytest.mark.parametrize("neighbour", [sweeps, joins_and_leaves])
    @pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
    def test_when_the_makers_lock_goes(
        self, make: Any, namespace: str, neighbour: Neighbour, late: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []

        def meanwhile() -> None:
            neighbour(namespace)
            seen.extend(leftovers.names(namespace))

        with monkeypatch.context() as patch:
            patch.setattr(directory, "Segment", Locks({}, meanwhile, late))
            one = make()
        assert seen == [segments.directory_name(namespace)]
        assert shared_by_all(one, make())

    @pytest.mark.parametrize("by", ["open", "sweep"])
    def test_a_new_one_in_place_of_a_half_made_one_stays(
        self, namespace: str, by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two find what a dead maker left; while one looks at it, the other has removed it and made a new one."""
        path = leftovers.MOUNT / segments.directory_name(namespace)
        path.touch(0o600)
        new: list[Directory] = []

        def meanwhile() -> None:
            path.unlink()
            found = directory.open_directory(namespace)
            assert found is not None
            new.append(found)

        mine = None
        with monkeypatch.context() as patch:
            patch.setattr(directory, "Segment", Locks({LOCK_MAKER: meanwhile}))
            if by == "open":
                mine = directory.open_directory(namespace)
            else:
                assert janitor.sweep(namespace).removed == []
        assert len(new) == 1
        inodes = {os.fstat(each.segment.fd).st_ino for each in (*new, mine) if each is not None}
        assert inodes == {path.stat().st_ino}
        for each in (*new, mine):
            if each is not None:
                directory.leave_directory(each)


class TestRemoving:
    """It goes with the last one that uses it, and not before."""

    @pytest.mark.parametrize("byte", [LOCK_MAKER, LOCK_USERS])
    @pytest.mark.parametrize("by", ["sweep", "leave", "itself"])
    def test_a_lock_of_another_keeps_it(self, namespace: str, byte: int, by: str) -> None:
        own = directory.open_directory(namespace)
        assert own is not None
        name = own.segment.name
        with descriptor(name) as other:
            assert Segment.lock(other, name, byte, byte == LOCK_MAKER)
            if by == "itself":
                with descriptor(name) as third:
                    assert not directory.remove_if_unused(third, name)
            elif by == "sweep":
                assert janitor.sweep(namespace).removed == []
            else:
                directory.leave_directory(own)
            assert leftovers.names(namespace) == [name]
        directory.leave_directory(own)
        janitor.sweep(namespace)
        assert leftovers.names(namespace) == []

    def test_with_nobody_left_it_goes(self, namespace: str) -> None:
        own = directory.open_directory(namespace)
        assert own is not None
        with descriptor(own.segment.name) as other:
            Segment.unlock(own.segment.fd, own.segment.name, LOCK_USERS)
            assert directory.remove_if_unused(other, own.segment.name)
            assert not directory.remove_if_unused(other, own.segment.name), "a name that is gone is not ours to remove"
        directory.leave_directory(own)

    def test_it_goes_with_the_last_of_two_that_leave_at_once(
        self, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two = directory.open_directory(namespace), directory.open_directory(namespace)
        assert one is not None
        assert two is not None

        class Overtaken(Locks):
            """The other one leaves as soon as this one was refused a lock for the other's use."""

            def lock(self, fd: int, name: str, byte: int, exclusive: bool = True) -> bool:
                done = super().lock(fd, name, byte, exclusive)
                if not done and fd == one.segment.fd:
                    directory.leave_directory(two)
                return done

        with monkeypatch.context() as patch:
            patch.setattr(directory, "Segment", Overtaken({}))
            directory.leave_directory(one)
        assert two.segment.fd < 0, "nothing was refused"
        assert leftovers.names(namespace) == []

    def test_leaving_twice_leaves_the_next_one_alone(self, namespace: str) -> None:
        own = directory.open_directory(namespace)
        assert own is not None
        directory.leave_directory(own)
        following = directory.open_directory(namespace)
        assert following is not None
        directory.leave_directory(own)
        assert leftovers.names(namespace) == [following.segment.name]
        directory.leave_directory(following)


def test_a_removal_that_is_cut_short_holds_up_nobody(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two find it being removed; when the second waits, whoever removed it is dead, and the first works with it."""
    own = directory.open_directory(namespace)
    assert own is not None
    name = own.segment.name
    own.segment.close_descriptor()
    remover = segments.open_descriptor(name)
    assert remover is not None
    assert Segment.lock(remover, name, LOCK_USERS)
    first: list[Directory] = []

    class Waits(Locks):
        def lock_wait(self, fd: int, at: str, byte: int, exclusive: bool = True) -> None:
            if not first:
                os.close(remover)
                monkeypatch.setattr(directory, "Segment", Segment)
                joined = directory.open_directory(namespace)
                assert joined is not None
                first.append(joined)
            super().lock_wait(fd, at, byte, exclusive)

    monkeypatch.setattr(directory, "Segment", Waits({}))
    second = directory.open_directory(namespace)
    assert second is not None
    assert len(first) == 1
    directory.leave_directory(first[0])
    assert leftovers.names(namespace) == [name], "the second uses it"
    directory.leave_directory(second)


def test_the_name_of_one_without_memory_goes_while_it_is_locked(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards somebody else's directory could have it."""
    name = segments.directory_name(namespace)
    locked: list[bool] = []

    def full(fd: int, *_: Any) -> None:
        raise SegmentError("no room", errno=errno.ENOSPC, op="reserve", segment=name)

    def unlink(at: str) -> None:
        with descriptor(name) as other:
            locked.append(Segment.locked(other, name, LOCK_MAKER))
        real(at)

    class Full(Locks):
        reserve = staticmethod(full)

    real = segments.unlink
    monkeypatch.setattr(segments, "Segment", Full({}))
    monkeypatch.setattr(segments, "unlink", unlink)
    with pytest.raises(SegmentError):
        directory.open_directory(namespace)
    assert locked == [True]
    assert leftovers.names(namespace) == []


def test_one_that_is_finished_while_it_is_joined_is_used(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner saw it empty; by the time it has the maker's lock, the maker is done."""
    name = segments.directory_name(namespace)
    makers: list[Directory] = []

    class Late:
        """`Segment`, whose first wait for the maker's lock comes only after another endpoint has made the directory."""

        def __call__(self, *args: Any) -> Segment:
            return Segment(*args)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(Segment, attribute)

        def lock_wait(self, fd: int, at: str, byte: int, exclusive: bool = True) -> None:
            if byte == LOCK_MAKER and not makers:
                made = Segment(name, os.dup(fd), False, True)
                Segment.reserve(made.fd, name, directory.SIZE, directory.SIZE)
                again = Segment(name, os.dup(fd), True, True)
                makers.append(Directory(again, True))
                makers[0].enter(7)
            Segment.lock_wait(fd, at, byte, exclusive)

    (leftovers.MOUNT / name).touch(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "Segment", Late())
        joined = directory.open_directory(namespace)
    assert joined is not None
    assert joined.endpoints() == [7]
    other = directory.open_directory(namespace)  # the maker's lock was given back
    assert other is not None
    makers[0].segment.close_descriptor()
    directory.leave_directory(other)
    directory.leave_directory(joined)


def test_a_signal_handler_puts_while_the_directory_is_made(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that tells others to wait is held by the very call that the handler interrupts."""
    first, second = connect(SharedMemoryConnector), connect(SharedMemoryConnector)
    payload = np.zeros(100_000)
    make, answers = segments.make, []

    def interrupted(name: str, *args: Any, **more: Any) -> Any:
        made = make(name, *args, **more)
        if name.endswith(".dir"):
            answers.append(second.put("a", "b", "inner", payload))
        return made

    monkeypatch.setattr(segments, "make", interrupted)
    assert first.put("a", "b", "outer", payload)[0]
    assert answers == [(False, 0, None)]
    assert second.put("a", "b", "later", payload)[0]
