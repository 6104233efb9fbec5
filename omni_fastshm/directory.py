"""A namespace's directory segment: opened by every endpoint, made by the first, removed by the last."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

from omni_fastshm import segments
from omni_fastshm._core import LOCK_MAKER, LOCK_OWNER, LOCK_USERS, Directory, Segment
from omni_fastshm.errors import FastShmError, MetadataError, SegmentError

SIZE = 16384
_inside: list[int] = []  # threads that make, join or remove a directory; twice: in a signal handler meanwhile
os.register_at_fork(after_in_child=_inside.clear)


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Around all that may hold a lock of a directory: a signal handler in its middle must not wait for that lock."""
    thread = threading.get_ident()
    _inside.append(thread)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a fork in between
            _inside.remove(thread)


def _lock_wait(fd: int, name: str, byte: int, exclusive: bool = True) -> None:
    if _inside.count(threading.get_ident()) > 1 and not Segment.lock(fd, name, byte, exclusive):
        # The lock may be held by the very call that this signal handler interrupts: it would wait for ever.
        raise SegmentError(
            f"{name} is being made or removed by the call that a signal handler interrupts: put again later",
            errno=errno.EAGAIN,
            op="open",
            segment=name,
        )
    Segment.lock_wait(fd, name, byte, exclusive)


def open_directory(namespace: str, *, make: bool = True) -> Directory | None:
    """This endpoint's use of the namespace's directory, counted until `leave_directory`.

    Args:
        namespace: whose.
        make: make it when there is none; otherwise None is the answer then.

    Raises:
        SegmentError: there is no room for it.
        MetadataError: something that is not ours stands under its name.
    """
    with entered():
        return _open(segments.directory_name(namespace), make)


def _open(name: str, make: bool) -> Directory | None:
    for _ in range(1000):  # each round means that somebody else made or removed it meanwhile
        with segments.no_fork:
            fd = segments.open_descriptor(name)
            found = None if fd is None else _join(name, fd)
        if fd is None:
            if not make:
                return None
            found = _make(name)
        if found is not None:
            return found
    raise SegmentError(f"{name} is made and removed by others all the time", op="open", segment=name)


def _make(name: str) -> Directory | None:
    try:
        segment = segments.make(name, SIZE, lock=LOCK_MAKER)
    except FileExistsError:
        return None
    # Used before it is finished, and before the maker's lock goes: whoever wants to remove it needs both locks.
    if not Segment.lock(segment.fd, name, LOCK_USERS, False):
        return None
    directory = Directory(segment, True)
    Segment.unlock(segment.fd, name, LOCK_MAKER)
    return directory


def remove_if_unused(fd: int, name: str) -> bool:
    """Remove a directory that nobody uses or makes; the descriptor must have no lock of its own."""
    # The users' lock first: who does not get it leaves the removal to those who have it. The other way round, one of
    # two that leave at once could fail for the other's use, the other for the maker's lock, and the name would stay.
    unused: bool = (
        Segment.lock(fd, name, LOCK_USERS) and Segment.lock(fd, name, LOCK_MAKER) and Segment.inspect(fd, name)[4]
    )
    if unused:
        segments.unlink(name)
    return unused


def _join(name: str, fd: int) -> Directory | None:
    """Use an existing directory; None when it is being removed, or was left half-made and is now out of the way."""
    try:
        if not Segment.lock(fd, name, LOCK_USERS, False):
            # Until whoever removes it is done, or has died before it was. Shared: others may use it by then.
            _lock_wait(fd, name, LOCK_USERS, False)
        if not Segment.inspect(fd, name)[4]:
            os.close(fd)
            return None
    except BaseException:
        os.close(fd)
        raise
    segment = Segment(name, fd, False, True)  # not its pages yet: a hole of any length may stand there
    if _has_memory(segment) and Directory.valid(segment):
        return Directory(segment)
    # Being made, or left half-made. With the maker's lock nobody changes it any more: look again, at its present size.
    _lock_wait(segment.fd, name, LOCK_MAKER)
    segment = Segment(name, os.dup(segment.fd), False, True)  # the same open file, and so the same locks
    if _has_memory(segment) and Directory.valid(segment):
        Segment.unlock(segment.fd, name, LOCK_MAKER)
        return Directory(segment)
    if os.pread(segment.fd, 8, 0) != bytes(8) and Directory.made(segment):
        raise MetadataError(
            f"{name} was made by another version of omni-fastshm: end its processes or use another namespace",
            op="open",
            segment=name,
        )
    if Segment.inspect(segment.fd, name)[4]:  # still: only whoever has the maker's lock, as we do now, may unlink it
        segments.unlink(name)  # its maker died half-way
    return None


def _has_memory(segment: Segment) -> bool:
    """Has all of it memory? To look at a hole takes some, and is a SIGBUS where there is none left."""
    size, allocated, *_ = Segment.inspect(segment.fd, segment.name)
    return 0 < size <= allocated


def _has_orphans(directory: str) -> bool:
    """Is there a control segment without a living owner? The janitor removes the directory after it."""
    for name in segments.list_names(directory[: -len("dir")]):
        if name.endswith(".ctl"):
            with contextlib.suppress(FastShmError, OSError), segments.no_fork:
                fd = segments.open_descriptor(name)
                if fd is not None:
                    try:
                        if not Segment.locked(fd, name, LOCK_OWNER):
                            return True
                    finally:
                        os.close(fd)
    return False


def leave_directory(directory: Directory) -> None:
    """End this endpoint's use; the last one removes the name, unless dead producers' payloads are found through it."""
    segment = directory.segment
    if segment.fd < 0:
        return
    with entered():
        Segment.unlock(segment.fd, segment.name, LOCK_USERS)
        # Unlocked first: two that leave at once would otherwise each see the other, and both keep the name.
        if not _has_orphans(segment.name):
            remove_if_unused(segment.fd, segment.name)
        segment.close_descriptor()
