"""Shared memory objects by name: make, open, check, list, unlink. The cold path; nothing here runs per message.

All names are direct children of the shm mount and look like ``omnifs.<uid>.<namespace>.<endpoint>.ctl``; what users
choose freely (request ids, stages) never becomes part of one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import stat
import threading
from dataclasses import dataclass

import posix_ipc

from omni_fastshm._core import LOCK_OWNER, Segment
from omni_fastshm.errors import MetadataError, SegmentError

MOUNT = "/dev/shm"  # where Linux C libraries keep POSIX shared memory

# Held from the opening of a descriptor until an object that a forked child disowns has it: a fork in another thread
# waits that long. Otherwise the child would keep the descriptor, and its locks keep a dead parent alive to all others.
no_fork = threading.RLock()
os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)

_CONTROL = re.compile(r"omnifs\.([0-9]{1,10})\.([A-Za-z0-9_-]{1,40})\.([0-9a-f]{16})\.ctl")


def user_id() -> int:
    """Whose objects this process makes and may use."""
    return os.geteuid()


def owner_prefix() -> str:
    """What the names of all our objects of this user start with."""
    return f"omnifs.{user_id()}."


def control_name(namespace: str, endpoint: int) -> str:
    """Name of a producing endpoint's control segment."""
    return f"{owner_prefix()}{namespace}.{endpoint:016x}.ctl"


def data_name(control: str, number: int) -> str:
    """Name of data segment `number` of the producer with that control segment."""
    return f"{control[: -len('.ctl')]}.d{number}"


def directory_name(namespace: str) -> str:
    """Name of a namespace's directory."""
    return f"{owner_prefix()}{namespace}.dir"


@dataclass(frozen=True)
class ControlName:
    """A control segment's name in parts."""

    uid: int
    namespace: str
    endpoint: int


@functools.lru_cache(maxsize=1024)
def parse_control_name(name: str) -> ControlName | None:
    """The parts of a control segment's name, or None when it is not one."""
    match = _CONTROL.fullmatch(name)
    return ControlName(int(match[1]), match[2], int(match[3], 16)) if match else None


def list_names(prefix: str) -> list[str]:
    """Names on the shm mount that start with `prefix`, sorted."""
    try:
        return sorted(name for name in os.listdir(MOUNT) if name.startswith(prefix))
    except OSError:
        return []


UNLIMITED = 1 << 63  # a mount without a limit counts nothing, and reads as one of size 0


def mount_free() -> int:
    """Bytes that are free on the shm mount, `UNLIMITED` where it does not say; 0 when there is no mount."""
    try:
        found = os.statvfs(MOUNT)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize if found.f_blocks else UNLIMITED


def mount_size() -> int:
    """Bytes that the shm mount could ever hold; `UNLIMITED` where it does not say."""
    try:
        found = os.statvfs(MOUNT)
    except OSError:
        return UNLIMITED
    return found.f_blocks * found.f_frsize or UNLIMITED


def names_left() -> int | None:
    """How many more objects the mount takes; None where it does not count them."""
    try:
        found = os.statvfs(MOUNT)
    except OSError:
        return None
    return found.f_favail if found.f_files else None


@functools.cache
def host_identity() -> str:
    """Names this host and shm mount: ``hostname/boot/device``. Two processes share memory if boot and device agree.

    The boot id is the kernel's; the device number tells apart containers that have mounts of their own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()[:13]
    except OSError:
        boot = "unknown"
    try:
        device = os.stat(MOUNT).st_dev
    except OSError:
        device = 0
    return f"{socket.gethostname()}/{boot}/{device:x}"


def same_host(identity: str) -> bool:
    """Does `identity` (a producer's) name the memory that this process sees? Host names are for people only."""
    own = host_identity()
    return identity == own or identity.split("/")[-2:] == own.split("/")[-2:]


def make(
    name: str,
    size: int,
    *,
    backed: int | None = None,
    populate: bool = True,
    lock: int | None = None,
    room: int = 0,
) -> Segment:
    """Make a new object, reserve its memory, map it.

    Args:
        name: must not exist yet.
        size: its length in bytes.
        backed: how many of them get memory now (default all); no room for them is an error here, never a SIGBUS later.
        populate: fill the page tables as well.
        room: how long `Segment.extend` can make it.
        lock: byte to lock from the start, before anybody can take the object for a dead one's.

    Raises:
        FileExistsError: the name is taken, or somebody removed the new object before it was locked.
        SegmentError: no room (its `errno` is ENOSPC), no permission, no mount.
    """
    with no_fork:
        return _make(name, size, size if backed is None else backed, populate, lock, room)


def _make(name: str, size: int, backed: int, populate: bool, lock: int | None, room: int) -> Segment:
    fd = _create(name)
    try:
        if lock is not None and not (Segment.lock(fd, name, lock) and Segment.inspect(fd, name)[4]):
            raise FileExistsError(errno.EEXIST, "removed while it was made", name)
        os.fchmod(fd, 0o600)  # whatever the umask made of it
        # The attempt would take all there is, for a moment, from whoever else lives on this mount.
        if max(backed, room) > mount_free():
            raise SegmentError("no room", errno=errno.ENOSPC, op="make", segment=name)
        Segment.reserve(fd, name, size, backed)
    except BaseException as error:
        if not isinstance(error, FileExistsError):
            unlink(name)  # while it is locked: unlocked, it could be another's new object that has the name by now
        os.close(fd)
        if isinstance(error, SegmentError):
            raise _explained(error, name, max(backed, room)) from None
        raise
    kept = None  # and with it the lock, until the name is gone: without, it could be another's new object by then
    with contextlib.suppress(OSError):  # no descriptor left: then the mapping fails as well, most likely
        kept = os.dup(fd)
    try:
        return Segment(name, fd, populate, True, room)
    except BaseException:
        unlink(name)
        raise
    finally:
        if kept is not None:
            os.close(kept)


def _create(name: str) -> int:
    try:
        fd: int = posix_ipc.SharedMemory("/" + name, posix_ipc.O_CREX, mode=0o600).fd
    except posix_ipc.ExistentialError:
        if os.path.isdir(MOUNT):
            raise FileExistsError(errno.EEXIST, "exists already", name) from None
        raise SegmentError(
            f"cannot make shared memory {name}: there is no {MOUNT}. Is it mounted?",
            errno=errno.ENOENT,
            op="make",
            segment=name,
        ) from None
    except (OSError, ValueError, posix_ipc.Error) as error:
        raise SegmentError(
            f"cannot make shared memory {name} on {MOUNT}: {error}. "
            + (
                f"{MOUNT} has no inodes left: remove files there, or mount it with more (nr_inodes)."
                if names_left() == 0
                else f"Is {MOUNT} mounted and writable?"
            ),
            errno=getattr(error, "errno", None),
            op="make",
            segment=name,
        ) from error
    return fd


def _explained(error: SegmentError, name: str, wanted: int) -> SegmentError:
    return SegmentError(
        f"no shared memory for {name}: {wanted} bytes wanted, {mount_free()} free on {MOUNT} "
        f"({os.strerror(error.errno or 0)}). "
        f"Make the mount larger (docker run --shm-size, or remount {MOUNT}) or the segments smaller.",
        errno=error.errno,
        op="make",
        segment=name,
    )


def open_descriptor(name: str) -> int | None:
    """A descriptor of an existing object of ours, or None when there is none. To be called and used under `no_fork`.

    Raises:
        MetadataError: the name leads to a link, to something that is not shared memory, or to another user's object.
        SegmentError: it exists but cannot be opened.
    """
    try:
        fd: int = posix_ipc.SharedMemory("/" + name).fd
    except posix_ipc.ExistentialError:
        if _is_link(name):  # also a dangling one, which looks like a missing object
            raise MetadataError(f"{name} is a symbolic link: refused", op="open", segment=name) from None
        return None
    except (OSError, ValueError, posix_ipc.Error) as error:
        raise _refused(name, error) from error
    try:
        _, _, uid, regular, _ = Segment.inspect(fd, name)
        if not regular:
            raise MetadataError(f"{name} is not a shared memory object: refused", op="open", segment=name)
        if uid != os.geteuid():
            raise MetadataError(
                f"{name} belongs to user {uid}, not to {os.geteuid()}: refused", op="open", segment=name
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_link(name: str) -> bool:
    return os.path.islink(os.path.join(MOUNT, name))


def _refused(name: str, error: Exception) -> Exception:
    """Why an existing name cannot be opened, in the caller's terms."""
    try:
        found = os.lstat(os.path.join(MOUNT, name))
    except OSError:
        return SegmentError(f"cannot open {name}: {error}", op="open", segment=name)
    if not stat.S_ISREG(found.st_mode):
        return MetadataError(f"{name} is not a shared memory object: refused", op="open", segment=name)
    if found.st_uid != os.geteuid():
        return MetadataError(f"{name} belongs to user {found.st_uid}: refused", op="open", segment=name)
    return SegmentError(f"cannot open {name}: {error}", errno=getattr(error, "errno", None), op="open", segment=name)


def open_data(control: str, number: int) -> Segment:
    """Map a data segment of that producer; its memory stays until the mapping and all views are gone.

    Raises:
        SegmentError: it is gone; its `errno` is ENOENT.
    """
    name = data_name(control, number)
    with no_fork:
        fd = open_descriptor(name)
        if fd is None:
            raise SegmentError(f"{name} is gone", errno=errno.ENOENT, op="open", segment=name)
        size, allocated, *_ = Segment.inspect(fd, name)
        if allocated < size:  # ours have memory from the start; mapping would give it to a hole of whatever length
            os.close(fd)
            raise MetadataError(
                f"{name} is {size} bytes long but has memory for {allocated}: refused", op="open", segment=name
            )
        return Segment(name, fd, True, False)


def unlink(name: str) -> None:
    """Remove a name; what is mapped lives on. A missing name is silence, and so is one that is no text."""
    try:
        posix_ipc.unlink_shared_memory("/" + name)
    except (posix_ipc.ExistentialError, OSError, ValueError, posix_ipc.Error):
        pass


def make_control(namespace: str, size: int, backed: int) -> tuple[Segment, int]:
    """A control segment under a fresh random id, owned (locked) by this process; with the id."""
    for _ in range(16):
        endpoint = int.from_bytes(os.urandom(8), "little") or 1
        try:
            segment = make(control_name(namespace, endpoint), size, backed=backed, populate=False, lock=LOCK_OWNER)
        except FileExistsError:
            continue
        return segment, endpoint
    raise SegmentError(f"cannot make a control segment in namespace {namespace}: every name was taken", op="make")
