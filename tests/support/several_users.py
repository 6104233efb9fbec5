"""Users of one host that meet under one namespace; run as root, becomes each of them in a forked child."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.forking import fork, join, wait
from support.two_users import become

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import MetadataError, SegmentError

WANT = np.arange(20_000)
SMALL = {"segment_bytes": 1 << 18, "orphan_ttl_s": 0}
FIRST, SECOND = 1001, 1002
NAMESPACE = os.environ.get("OMNI_FASTSHM_NAMESPACE", "")
lines: list[str] = []


class Keep(logging.Handler):
    """Keeps what was logged in `lines`."""

    def emit(self, record: logging.LogRecord) -> None:
        lines.append(record.getMessage())


def connector(**settings: Any) -> Any:
    return SharedMemoryConnector({**SMALL, **settings})


def transfer(own: Any, want: np.ndarray = WANT) -> None:
    ok, _, metadata = own.put("a", "b", "r", want)
    assert ok
    assert np.array_equal(own.get("a", "b", "r", metadata)[0], want)


def names(user: int) -> list[str]:
    return [name for name in leftovers.names(NAMESPACE) if name.startswith(f"omnifs.{user}.")]


def as_user(user: int, body: Callable[[], None]) -> None:
    """Run `body` as that user, who must not leave anything."""

    def child() -> None:
        if user:
            become(user)
        body()

    before = names(user)
    join(fork(child), 30)
    assert names(user) == before


def check_modes() -> None:
    found = {name: os.lstat(leftovers.MOUNT / name).st_mode & 0o7777 for name in leftovers.names(NAMESPACE)}
    assert found
    assert set(found.values()) == {0o600}, found


def foreign() -> None:
    """Nobody reads, uses or tidies up what belongs to another user, dead or alive; root is no exception."""
    read, write = os.pipe()

    def first() -> None:
        become(FIRST)
        os.umask(0)
        own = connector()
        transfer(own)
        metadata = own.put("a", "b", "left", WANT)[2]
        check_modes()
        os.write(write, repr(metadata).encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        transfer(own)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = fork(first)
    metadata = eval(os.read(read, 10_000))
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])

    def others() -> None:
        left = names(FIRST)
        assert left
        os.umask(0o777)
        with connector() as own, connector(key_lookup=True, namespace=NAMESPACE) as keyed:
            transfer(own)
            keyed.put("a", "b", "r", 1)
            check_modes()
            with pytest.raises(MetadataError, match=rf"no segment of user {os.getuid()}"):
                own.get("a", "b", "left", metadata)
            assert keyed.get("a", "b", "left") is None
            own.cleanup("left")
            own.cleanup("r")
        assert not janitor.sweep(NAMESPACE, force=True).dropped
        assert names(FIRST) == left

    for user in (SECOND, 0):
        as_user(user, others)
    os.kill(pid, signal.SIGCONT)
    assert wait(pid, 30) == -signal.SIGKILL
    for user in (SECOND, 0):
        as_user(user, others)

    def heir() -> None:
        become(FIRST)
        connector().close()

    join(fork(heir), 30)
    assert names(FIRST) == []


def kinds(path: str) -> list[Callable[[], object]]:
    """What another user may put under that name."""
    return [
        lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666)),
        lambda: os.mkfifo(path, 0o666),
        lambda: os.mkdir(path, 0o777),
        lambda: os.symlink(path + "-target", path),
        lambda: os.symlink("/dev/zero", path),
    ]


def squatted() -> None:
    """Another user's things under our names keep us from that namespace at most, and then with a clear word."""
    for suffix in ("0123456789abcdef.ctl", "0123456789abcdef.d0", "dir"):
        path = str(leftovers.MOUNT / f"omnifs.{FIRST}.{NAMESPACE}.{suffix}")
        for plant in kinds(path):

            def second(plant: Callable[[], object] = plant) -> None:
                become(SECOND)
                os.umask(0)
                plant()

            join(fork(second), 30)
            before = os.lstat(path)
            assert before.st_uid == SECOND

            def first(path: str = path, suffix: str = suffix) -> None:
                become(FIRST)
                lines.clear()
                own = connector()
                assert any(os.path.basename(path) in line for line in lines), lines
                if suffix == "dir":
                    with pytest.raises((MetadataError, SegmentError), match=os.path.basename(path)):
                        connector(key_lookup=True, namespace=NAMESPACE)
                    with connector(namespace=f"{NAMESPACE}-2") as another:
                        transfer(another)
                else:
                    transfer(own)
                own.close()
                janitor.sweep(NAMESPACE, force=True)

            join(fork(first), 30)
            after = os.lstat(path)
            assert (after.st_ino, after.st_size, after.st_mode) == (before.st_ino, before.st_size, before.st_mode)
            leftovers.remove(NAMESPACE)


def changed() -> None:
    """A process that becomes somebody else keeps its connectors under who it was."""
    own, other = connector(max_bytes=1 << 20), connector()
    view = other.get("a", "b", "1", own.put("a", "b", "1", WANT)[2])[0]
    metadata = own.put("a", "b", "2", WANT)[2]
    root = names(0)
    os.seteuid(FIRST)
    fresh = connector()
    transfer(fresh)
    assert names(FIRST)
    assert own.health()["status"] == "ok"
    assert np.array_equal(view, WANT)
    fresh.close()
    assert names(FIRST) == []
    os.seteuid(0)
    assert names(0) == root
    assert np.array_equal(other.get("a", "b", "2", metadata)[0], WANT)
    transfer(own)
    for each in (own, other):
        each.close()
    assert leftovers.names(NAMESPACE) == []


def grown() -> None:
    """A put that says yes can be got, also when its segment was made as somebody else."""
    own, other = connector(max_bytes=1 << 21), connector()
    transfer(own)
    os.seteuid(FIRST)
    ok, _, metadata = own.put("a", "b", "r", np.arange(60_000))
    os.seteuid(0)
    try:
        assert not ok or other.get("a", "b", "r", metadata) is not None
    finally:
        own.close()
        other.close()
        janitor.sweep(NAMESPACE, force=True)
        leftovers.remove(NAMESPACE)


def main(what: str) -> None:
    logging.getLogger().addHandler(Keep())
    with connector() as own:
        transfer(own)  # whatever is imported late is imported now: the users may not read this interpreter
    {"foreign": foreign, "squatted": squatted, "changed": changed, "grown": grown}[what]()
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
