"""Reclaims what dead processes left on the shm mount.

Who is dead is decided by the lock of an endpoint's control segment alone: the kernel drops it at death, whatever the
process id says, also across PID namespaces. Whoever gets that lock is the heir and the only one to tidy up. Only
objects of this user and with our prefix are looked at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from omni_fastshm import segments
from omni_fastshm._core import LOCK_MAKER, LOCK_OWNER, LOCK_USERS, Inbox, Segment
from omni_fastshm.directory import entered, open_directory, remove_if_unused
from omni_fastshm.errors import FastShmError, SegmentError
from omni_fastshm.reading import ENDPOINT_LIMIT, Control, read_control, read_directory

logger = logging.getLogger("omni_fastshm")


@dataclass(frozen=True)
class Kept:
    """A dead producer whose payloads may still be got.

    Attributes:
        name: of its control segment.
        payloads: how many have takes left.
        seconds_left: how long they are kept from now on.
        dead_s: seconds since it was first found dead.
    """

    name: str
    payloads: int
    seconds_left: float
    dead_s: float


@dataclass
class Swept:
    """What a sweep did, or would do.

    Attributes:
        removed: names taken off the mount.
        kept: dead producers whose payloads may still be got.
        alive: control segments of living producers.
        left_alone: by name, why something could not be handled.
        dropped: payloads that nobody had taken in time.
        freed: bytes of what was removed; segments that readers still look at give theirs back later and are not
            counted.
        held: bytes of those: they come back when the readers let go.
    """

    removed: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    dropped: int = 0
    freed: int = 0
    held: int = 0


def sweep(namespace: str | None = None, *, force: bool = False, wanted: int | None = None) -> Swept:
    """Remove what no living process needs.

    Args:
        namespace: where; None means all namespaces of this user.
        force: also drop orphaned payloads whose time has not come yet, for want of room.
        wanted: with `force`: stop dropping them as soon as so many bytes are free on the mount. What nobody needs any
            more goes first, also in other namespaces of this user; then orphans of `namespace`, then those of the
            others, each time the producer that has been dead for longest. None drops all of `namespace` alone.

    Returns:
        What was done. Never raises for a single object that cannot be handled: it is logged and left.
    """
    work = _Sweep(dry=False)
    if force and wanted is not None:
        work.make_room(namespace, wanted)
    else:
        work.go_through(namespace, force)
    return work.swept


def sweep_alike(pattern: re.Pattern[str]) -> None:
    """`sweep` each of this user's namespaces whose whole name matches."""
    found = {name.split(".")[2] for name in segments.list_names(_prefix(None))}
    for namespace in sorted(found):
        if pattern.fullmatch(namespace):
            sweep(namespace)


def preview(namespace: str | None = None, *, force: bool = False) -> Swept:
    """What `sweep` would do now. Changes nothing and takes no lock."""
    work = _Sweep(dry=True)
    work.go_through(namespace, force)
    return work.swept


class _Sweep:
    """One sweep and what has come of it so far; with `dry`, what would come of it."""

    def __init__(self, *, dry: bool) -> None:
        self.swept = Swept()
        self._dry = dry

    def go_through(self, namespace: str | None, force: bool) -> None:
        """All endpoints, strays and directories of a namespace, or of all."""
        names = segments.list_names(_prefix(namespace))
        controls = [name for name in names if segments.parse_control_name(name) is not None]
        for control in _by_age(controls):
            with self._left_alone_on_error(control):
                self._endpoint(control, force)
        for control, strays in _data_by_control(names).items():
            if control not in controls:
                self._strays(control, strays)
        for name in segments.list_names(_prefix(namespace)):
            if name.endswith(".dir"):
                self._directory(name)

    def make_room(self, namespace: str | None, wanted: int) -> None:
        """Sweep, then drop orphans before their time until `wanted` bytes are free."""
        self.go_through(namespace, False)
        if namespace is not None and not self._enough(wanted):
            self.swept.kept, self.swept.alive = [], []
            self.go_through(None, False)
        own = _prefix(namespace)
        for orphan in sorted(self.swept.kept, key=lambda each: (not each.name.startswith(own), -each.dead_s)):
            if self._enough(wanted):
                break
            self._drop(orphan)

    def _enough(self, wanted: int) -> bool:
        # Free memory alone says little: whoever asks was just refused some, perhaps by another limit than the mount's.
        return self.swept.freed > 0 and segments.mount_free() >= wanted

    def _drop(self, orphan: Kept) -> None:
        self.swept.kept.remove(orphan)
        with self._left_alone_on_error(orphan.name):
            self._endpoint(orphan.name, True)
        self._directory(_directory_of(orphan.name))

    @contextlib.contextmanager
    def _left_alone_on_error(self, name: str) -> Iterator[None]:
        """Whatever stands under one name, a link or another user's file, must not keep us from the others."""
        try:
            yield
        except (FastShmError, OSError) as error:
            self.swept.left_alone[name] = str(error)
            if not self._dry:
                _tell(name, str(error))

    def _nobody_has(self, fd: int, name: str, byte: int) -> bool:
        """Nobody has this lock: then it is ours from here on, unless this sweep is dry."""
        if self._dry:
            return not Segment.locked(fd, name, byte)
        got: bool = Segment.lock(fd, name, byte)
        return got

    def _endpoint(self, control: str, force: bool) -> None:
        with _opened(control) as fd:
            if fd is None:
                return
            if not self._nobody_has(fd, control, LOCK_OWNER):
                self.swept.alive.append(control)
                return
            found = read_control(fd, control)
            if isinstance(found, Control):
                inbox = None if self._dry else Inbox(Segment(control, os.dup(fd), False, True), None)
                kept = _kept(control, found, inbox)
                if kept is not None and not force:
                    self.swept.kept.append(kept)
                    return
                self.swept.dropped += found.blocks.untaken if inbox is None else _cancel_all(inbox)
                if inbox is not None:
                    inbox.mark_closed()  # readers let go of its descriptor and mappings
                found = read_control(fd, control)  # only now it is certain that nobody begins to look
            # Listed only now: it may have made another just before it died.
            for each in _data_by_control(segments.list_names(segments.data_name(control, 0)[:-1])).get(control, []):
                with self._left_alone_on_error(each):
                    self._remove(each, _is_used(each, found))
            self._take_out([control])  # before its name goes: nobody would come back for the id
            self._remove_open(fd, control, _is_used(control, found), cut=False)

    def _strays(self, control: str, strays: list[str]) -> None:
        """Data segments whose control segment somebody took away: nothing tells whether their producer lives."""
        if not segments.list_names(control):
            for name in strays:
                with self._left_alone_on_error(name):
                    self._remove(name, None)

    def _remove(self, name: str, used: bool | None) -> None:
        with _opened(name) as fd:
            if fd is None:
                return
            if self._nobody_has(fd, name, LOCK_OWNER):
                self._remove_open(fd, name, used, cut=True)
            else:  # its producer lives: somebody else took the control segment's name, or put another thing there
                raise SegmentError("its producer is alive", op="sweep", segment=name)

    def _remove_open(self, fd: int, name: str, used: bool | None, *, cut: bool) -> None:
        """Remove a name; `cut` gives its memory back, too, where it is certain that nobody looks at it any more.

        Readers may still have it mapped without looking: the memory goes all the same. Where somebody does look,
        or where nobody knows (`used` is None), that would be his SIGBUS. What has another name as well is not ours.
        """
        allocated = Segment.inspect(fd, name)[1]
        if used:
            self.swept.held += allocated
        else:
            self.swept.freed += allocated
        if not self._dry:
            if cut and used is False and os.fstat(fd).st_nlink == 1:
                Segment(name, os.dup(fd), False, True).empty()
            segments.unlink(name)
        self.swept.removed.append(name)

    def _directory(self, name: str) -> None:
        """A directory that nobody uses, of a namespace without producers; of a full one ids that lead nowhere."""
        missing: list[str] = []
        with self._left_alone_on_error(name), entered(), _opened(name) as fd:
            if fd is None:
                return
            ids = read_directory(fd)  # before the names: a producer makes its segment before it enters
            known = set(segments.list_names(name[: -len("dir")])).difference(self.swept.removed)
            if not any(each.endswith(".ctl") for each in known) and self._remove_if_unused(fd, name):
                return
            # Most are of janitors that were killed before they took them out. Some may be of living producers whose
            # names somebody removed, and lead those there who know them: so they stay while there are places enough.
            if isinstance(ids, list) and len(ids) > ENDPOINT_LIMIT // 2:
                controls = [segments.control_name(name.split(".")[2], each) for each in ids]
                missing = [each for each in controls if each not in known]
        if missing:
            self._take_out(missing)
            # Its last user may have left meanwhile.
            with self._left_alone_on_error(name), entered(), _opened(name) as fd:
                if fd is not None and not any(each.endswith(".ctl") for each in segments.list_names(name[:-3])):
                    self._remove_if_unused(fd, name)

    def _remove_if_unused(self, fd: int, name: str) -> bool:
        allocated = Segment.inspect(fd, name)[1]
        if self._dry:
            unused = not Segment.locked(fd, name, LOCK_MAKER) and not Segment.locked(fd, name, LOCK_USERS)
        else:
            unused = remove_if_unused(fd, name)
        if unused:
            self.swept.removed.append(name)
            self.swept.freed += allocated
        return unused

    def _take_out(self, controls: list[str]) -> None:
        """Producers of one namespace that are gone leave its directory; whether that is needed is looked at last."""
        if self._dry:
            return
        name = _directory_of(controls[0])
        with self._left_alone_on_error(name):
            with _opened(name) as fd:
                if fd is None or isinstance(read_directory(fd), str):
                    return  # nobody has entered a half-made one, and joining it would wait for its maker
            directory = open_directory(name.split(".")[2], make=False)
            if directory is not None:
                for control in controls:
                    parts = segments.parse_control_name(control)
                    if parts is not None:
                        directory.leave(parts.endpoint)
                # Not left as an endpoint leaves it: that would take it from orphans that are found through it.
                directory.segment.close_descriptor()


def _prefix(namespace: str | None) -> str:
    return segments.owner_prefix() + ("" if namespace is None else f"{namespace}.")


def _directory_of(control: str) -> str:
    return segments.directory_name(control.split(".")[2])


def _data_by_control(names: list[str]) -> dict[str, list[str]]:
    """The data segments among some names, by the name of the control segment that they belong to."""
    found: dict[str, list[str]] = {}
    for name in names:
        stem, _, number = name.rpartition(".d")
        if number.isdecimal() and segments.parse_control_name(f"{stem}.ctl") is not None:
            found.setdefault(f"{stem}.ctl", []).append(name)
    return found


def _by_age(controls: list[str]) -> list[str]:
    def changed(name: str) -> float:
        try:
            return os.lstat(os.path.join(segments.MOUNT, name)).st_mtime
        except OSError:
            return 0.0

    return sorted(controls, key=changed)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int | None]:
    """A descriptor, or None when there is no such object; with its end all locks taken through it are gone."""
    with segments.no_fork:
        fd = segments.open_descriptor(name)
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)


def _kept(control: str, found: Control, inbox: Inbox | None) -> Kept | None:
    """Why a dead producer's segments have to stay; None when they need not. With an inbox its death is noted."""
    dead, ttl = (found.dead_s or 0.0, found.orphan_ttl_s) if inbox is None else inbox.orphan_age()
    if found.closed or not found.blocks.untaken or dead >= ttl:
        return None
    return Kept(control, found.blocks.untaken, ttl - dead, dead)


def _cancel_all(inbox: Inbox) -> int:
    """Nobody can begin to look after this; returns how many payloads were dropped."""
    inbox.reap()
    return sum(inbox.cancel(block, sequence) for block, sequence, pending, *_ in inbox.blocks() if pending)


def _is_used(name: str, found: Control | str) -> bool | None:
    """Does a living process look at this data segment, or control segment? None when nothing there tells."""
    if isinstance(found, str):
        return None
    if name.endswith(".ctl"):
        return any(each.alive for each in found.holders)
    return found.held_segments is None or int(name.rpartition(".d")[2]) in found.held_segments


_told: dict[str, str] = {}
_TOLD_MOST = 1000


def _tell(name: str, reason: str) -> None:
    """Log what was left alone, once: a put that waits for room sweeps many times a second."""
    if _told.get(name) == reason:
        return
    if len(_told) >= _TOLD_MOST:
        _told.clear()
    _told[name] = reason
    logger.warning("janitor: %s left alone: %s", name, reason)
