"""Reclaims what dead processes left on the shm mount.

Who is dead is decided by the lock of an endpoint's control segment alone: the kernel drops it at death, whatever the
process id says, also across PID namespaces. Whoever gets that lock is the heir and the only one to tidy up. Only
objects of this user and with our prefix are looked at.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from omni_fastshm import segments
from omni_fastshm._core import LOCK_OWNER, Inbox, Segment
from omni_fastshm.directory import leave_directory, open_directory, remove_if_unused
from omni_fastshm.errors import FastShmError, MetadataError

logger = logging.getLogger("omni_fastshm")


@dataclass
class Swept:
    """What a sweep found.

    Attributes:
        removed: names taken off the mount.
        kept: control segments of dead producers whose payloads may still be got.
        alive: control segments of living producers.
        dropped: payloads that nobody had taken in time.
    """

    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    dropped: int = 0


def sweep(namespace: str | None = None, *, force: bool = False) -> Swept:
    """Remove what no living process needs.

    Args:
        namespace: where; None means all namespaces of this user.
        force: also drop orphaned payloads whose time has not come yet, oldest producer first, for want of room.

    Returns:
        What was done. Never raises for a single object that cannot be handled: it is logged and left.
    """
    swept = Swept()
    names = segments.list_names(segments.owner_prefix() + ("" if namespace is None else f"{namespace}."))
    for control in _by_age([name for name in names if name.endswith(".ctl")]):
        with _left_alone_on_error(control):
            _sweep_endpoint(control, force, swept)
    _remove_strays(names, swept)
    _sweep_directories([name for name in names if name.endswith(".dir")], swept)
    return swept


@contextlib.contextmanager
def _left_alone_on_error(name: str) -> Iterator[None]:
    """Whatever stands under one name, a link or another user's file, must not keep us from the others, or from work."""
    try:
        yield
    except (FastShmError, OSError) as error:
        logger.warning("janitor: %s left alone: %s", name, str(error))


def _by_age(controls: list[str]) -> list[str]:
    def changed(name: str) -> float:
        try:
            return os.lstat(os.path.join(segments.MOUNT, name)).st_mtime
        except OSError:
            return 0.0

    return sorted(controls, key=changed)


def _sweep_endpoint(control: str, force: bool, swept: Swept) -> None:
    name = segments.parse_control_name(control)
    fd = None if name is None else segments.open_descriptor(control)
    if fd is None or name is None:
        return
    if not Segment.lock(fd, control, LOCK_OWNER):
        os.close(fd)
        swept.alive.append(control)
        return
    segment = Segment(control, fd, False, True)  # and with it the lock, until this function ends
    data = segments.list_names(control[:-3] + "d")  # now, for it may have made another just before it died
    try:
        inbox = Inbox(segment, None)
    except MetadataError:
        inbox = None  # its maker died before it was finished: nobody can have got anything from it
    held: set[int] = set()
    if inbox is not None:
        inbox.reap()
        blocks = inbox.blocks()
        waiting = [block for block in blocks if block[2]]
        age, keep = inbox.orphan_age()
        if waiting and age < keep and not force and not inbox.closed:
            swept.kept.append(control)
            return
        for block in waiting:
            swept.dropped += inbox.cancel(block[0], block[1])
        held = {block[4] for block in inbox.blocks()}
        if any(block[5] for block in inbox.blocks()):  # pieces elsewhere are looked at: keep all memory
            held = {int(n.rpartition(".d")[2]) for n in data if n.rpartition(".d")[2].isdigit()}
    for each in data:
        with _left_alone_on_error(each):
            _remove_data(each, held, swept)
    segments.unlink(control)
    swept.removed.append(control)
    _take_out(name)


def _remove_data(name: str, held: set[int] | None, swept: Swept) -> None:
    """Take a data segment's name away, and its memory unless a lease may look at it; None: nobody knows."""
    number = name.rpartition(".d")[2]
    fd = segments.open_descriptor(name)
    if fd is not None:
        segment = Segment(name, fd, False, True)
        # A name is ours by its form alone: what has another name as well may be somebody's file.
        if held is not None and number.isdigit() and int(number) not in held and os.fstat(fd).st_nlink == 1:
            segment.empty()  # readers may have it mapped without looking at it: the memory goes all the same
        segments.unlink(name)
        swept.removed.append(name)


def _take_out(name: segments.ControlName) -> None:
    directory = open_directory(name.namespace, make=False)
    if directory is not None:
        directory.leave(name.endpoint)
        leave_directory(directory)


def _remove_strays(names: list[str], swept: Swept) -> None:
    """Data segments without a control segment: the tidying of a dead endpoint was itself cut short."""
    for name in names:
        control = name.rpartition(".d")[0] + ".ctl"
        if not name.rpartition(".d")[2].isdigit() or segments.parse_control_name(control) is None:
            continue
        if control not in names and not segments.list_names(control):
            with _left_alone_on_error(name):
                _remove_data(name, None, swept)  # its producer may live: only the control segment could tell


def _sweep_directories(directories: list[str], swept: Swept) -> None:
    """Directories that nobody uses, of namespaces without producers."""
    for name in directories:
        with _left_alone_on_error(name):
            fd = segments.open_descriptor(name)
            if fd is None:
                continue
            try:
                producers = [n for n in segments.list_names(name[:-3]) if n.endswith(".ctl")]
                if not producers and remove_if_unused(fd, name):
                    swept.removed.append(name)
            finally:
                os.close(fd)
