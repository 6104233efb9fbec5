"""What lies on the shm mount under our names: a snapshot that changes nothing."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from omni_fastshm import segments
from omni_fastshm._core import LOCK_MAKER, LOCK_OWNER, LOCK_USERS, Segment
from omni_fastshm.errors import FastShmError, SegmentError
from omni_fastshm.reading import HALF_MADE, Control, read_control, read_directory

_NAME = re.compile(r"omnifs\.(\d+)\.(.*)", re.DOTALL)
_DIRECTORY = re.compile(r"omnifs\.\d+\.([A-Za-z0-9_-]{1,40})\.dir")
_DATA = re.compile(r"(.*)\.d(\d+)", re.DOTALL)


@dataclass(frozen=True)
class DataSegment:
    """One data segment.

    Attributes:
        name: on the mount.
        number: k of ``….d<k>``.
        length: in bytes.
        allocated: bytes of memory that it really takes.
    """

    name: str
    number: int
    length: int
    allocated: int


@dataclass(frozen=True)
class Endpoint:
    """A producing endpoint: its control segment and its data segments.

    Attributes:
        namespace: where it is found.
        endpoint: its id, as in the names.
        name: of the control segment.
        state: "alive", "closing" (alive, and has begun to close), "orphaned" (dead, its untaken payloads may still be
            got) or "dead" (the next sweep removes it).
        length: of the control segment, in bytes; sparse.
        allocated: bytes of memory that it really takes.
        orphan_left_s: for an orphaned one: how long its payloads are kept from now on; from the next look on when
            `dead_s` is None.
        data: its data segments.
        control: the rest.
    """

    namespace: str
    endpoint: str
    name: str
    state: str
    length: int
    allocated: int
    orphan_left_s: float | None
    data: tuple[DataSegment, ...]
    control: Control

    @property
    def memory(self) -> int:
        """Bytes that control and data segments take."""
        return self.allocated + sum(each.allocated for each in self.data)


@dataclass(frozen=True)
class NamespaceDirectory:
    """A namespace's directory.

    Attributes:
        namespace: whose.
        name: on the mount.
        length: in bytes.
        allocated: bytes of memory that it really takes.
        in_use: does any living endpoint use it?
        users: how many endpoints do; None when the system does not tell.
        producers: endpoint ids in it.
    """

    namespace: str
    name: str
    length: int
    allocated: int
    in_use: bool
    users: int | None
    producers: tuple[str, ...]


@dataclass(frozen=True)
class Oddity:
    """Something under our names that is not a segment in good order.

    Attributes:
        name: on the mount.
        kind: "foreign" (another user's name or object), "starting" (being made by a living process), "half-made" (its
            maker died), "damaged" (or of another version), "stray" (a data segment without a control segment) or
            "refused" (a link, a FIFO, no name of ours, cannot be opened).
        uid: whose it is.
        reason: in words.
        length: in bytes.
        allocated: bytes of memory that it takes.
    """

    name: str
    kind: str
    uid: int
    reason: str
    length: int
    allocated: int


@dataclass(frozen=True)
class Snapshot:
    """What lies on the mount.

    Attributes:
        mount: where.
        uid: whose objects were opened.
        namespace: which one was asked for; None for all.
        size: of the mount in bytes; 0 when it has no limit.
        free: bytes free on it.
        endpoints: producing endpoints, by namespace, oldest first.
        directories: by namespace.
        oddities: by name.
    """

    mount: str
    uid: int
    namespace: str | None
    size: int
    free: int
    endpoints: tuple[Endpoint, ...]
    directories: tuple[NamespaceDirectory, ...]
    oddities: tuple[Oddity, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``omni-fastshm ls --json`` prints it."""
        return asdict(self)


def take_snapshot(namespace: str | None = None) -> Snapshot:
    """Look at everything under our names, without changing anything.

    Args:
        namespace: only this one; None means all.

    Returns:
        What is there; other users' objects by name only. What cannot be read is an `Oddity`, never an error.

    Raises:
        SegmentError: there is no shm mount.
    """
    try:
        mount = os.statvfs(segments.MOUNT)
    except OSError as error:
        raise SegmentError(f"cannot look at {segments.MOUNT}: {error.strerror}", errno=error.errno, op="ls") from None
    parts = _Parts()
    for name in segments.list_names("omnifs."):
        if namespace is None or name.split(".")[2:3] == [namespace]:
            parts.sort_in(name)
    parts.add_endpoints()
    return Snapshot(
        segments.MOUNT,
        segments.user_id(),
        namespace,
        mount.f_blocks * mount.f_frsize,
        mount.f_bavail * mount.f_frsize,
        tuple(sorted(parts.endpoints, key=lambda each: (each.namespace, -each.control.age_s, each.name))),
        tuple(parts.directories),
        tuple(sorted(parts.oddities, key=lambda each: each.name)),
    )


class _Parts:
    """Names on the mount, sorted by what they belong to."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self.directories: list[NamespaceDirectory] = []
        self.oddities: list[Oddity] = []
        self._controls: list[str] = []
        self._data: dict[str, list[DataSegment]] = {}

    def sort_in(self, name: str) -> None:
        try:
            found = os.lstat(os.path.join(segments.MOUNT, name))
        except OSError:
            return  # gone meanwhile
        matched = _NAME.fullmatch(name)
        if matched is None or int(matched[1]) != segments.user_id():
            self._odd(name, found, "foreign", f"of user {found.st_uid}: not looked at")
        elif segments.parse_control_name(name) is not None:
            self._controls.append(name)
        elif (data := _DATA.fullmatch(name)) and segments.parse_control_name(data[1] + ".ctl"):
            self._sort_in_data(name, found, data[1] + ".ctl", int(data[2]))
        elif (directory := _DIRECTORY.fullmatch(name)) is not None:
            self._look(name, found, functools.partial(self._add_directory, name, directory[1], found))
        else:
            self._odd(name, found, "refused", "not a name that omni-fastshm gives")

    def _odd(self, name: str, found: os.stat_result, kind: str, reason: str) -> None:
        self.oddities.append(Oddity(name, kind, found.st_uid, reason, found.st_size, found.st_blocks * 512))

    def _sort_in_data(self, name: str, found: os.stat_result, control: str, number: int) -> None:
        if not stat.S_ISREG(found.st_mode):
            self._odd(name, found, "refused", "not a shared memory object")
        elif found.st_uid != segments.user_id():
            self._odd(name, found, "foreign", f"belongs to user {found.st_uid}")
        else:
            each = DataSegment(name, number, found.st_size, found.st_blocks * 512)
            self._data.setdefault(control, []).append(each)

    def _look(self, name: str, found: os.stat_result, look: Callable[[int], None]) -> None:
        """Call `look` with a descriptor of an object of ours; why that cannot be done becomes an oddity."""
        try:
            with segments.no_fork:
                fd = segments.open_descriptor(name)
                if fd is not None:
                    try:
                        look(fd)
                    finally:
                        os.close(fd)
        except (FastShmError, OSError) as error:
            foreign = stat.S_ISREG(found.st_mode) and found.st_uid != segments.user_id()
            self._odd(name, found, "foreign" if foreign else "refused", str(error).removeprefix(f"{name} "))

    def _add_directory(self, name: str, namespace: str, found: os.stat_result, fd: int) -> None:
        ids = read_directory(fd)
        if isinstance(ids, str):
            self._odd(name, found, *_unfinished(ids, Segment.locked(fd, name, LOCK_MAKER)))
            return
        in_use = Segment.locked(fd, name, LOCK_USERS)
        users = _count_users(os.fstat(fd)) if in_use else 0
        producers = tuple(f"{each:016x}" for each in ids)
        self.directories.append(
            NamespaceDirectory(namespace, name, found.st_size, found.st_blocks * 512, in_use, users, producers)
        )

    def add_endpoints(self) -> None:
        for name in self._controls:
            self._add_endpoint(name, tuple(sorted(self._data.pop(name, []), key=lambda each: each.number)))
        for control, data in self._data.items():
            if not os.path.lexists(os.path.join(segments.MOUNT, control)):
                for each in data:
                    self._odd_data(each, "stray", "its control segment is gone")

    def _odd_data(self, each: DataSegment, kind: str, reason: str) -> None:
        self.oddities.append(Oddity(each.name, kind, segments.user_id(), reason, each.length, each.allocated))

    def _add_endpoint(self, name: str, data: tuple[DataSegment, ...]) -> None:
        try:
            found = os.lstat(os.path.join(segments.MOUNT, name))
        except OSError:
            return
        before = len(self.oddities)
        self._look(name, found, functools.partial(self._read_endpoint, name, found, data))
        if len(self.oddities) > before:
            for each in data:
                self._odd_data(each, self.oddities[before].kind, f"belongs to {name}")

    def _read_endpoint(self, name: str, found: os.stat_result, data: tuple[DataSegment, ...], fd: int) -> None:
        owned = Segment.locked(fd, name, LOCK_OWNER)
        control = read_control(fd, name)
        if isinstance(control, str):
            self._odd(name, found, *_unfinished(control, owned))
        else:
            self.endpoints.append(_endpoint(name, found, owned, data, control))


def _unfinished(reason: str, owned: bool) -> tuple[str, str]:
    """Kind and reason of the oddity that a segment is which says nothing."""
    if reason != HALF_MADE:
        return "damaged", f"{reason}; a living process owns it" if owned else reason
    return ("starting", "being made by a living process") if owned else ("half-made", reason)


def _endpoint(
    name: str, found: os.stat_result, owned: bool, data: tuple[DataSegment, ...], control: Control
) -> Endpoint:
    parts = segments.parse_control_name(name)
    assert parts is not None
    left = None
    if owned:
        state = "closing" if control.closed else "alive"
    elif control.orphan_left_s > 0:
        state, left = "orphaned", control.orphan_left_s
    else:
        state = "dead"
    return Endpoint(
        parts.namespace,
        f"{parts.endpoint:016x}",
        name,
        state,
        found.st_size,
        found.st_blocks * 512,
        left,
        data,
        control,
    )


def _count_users(found: os.stat_result) -> int | None:
    """How many hold the users' lock of a directory, as the kernel lists it; None when it does not."""
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        with open("/proc/locks") as locks:
            rows = [line.split() for line in locks]
    except OSError:
        return None
    byte = str(LOCK_USERS)
    return sum(row[1:2] == ["OFDLCK"] and row[5:8] == [file, byte, byte] for row in rows) or None
