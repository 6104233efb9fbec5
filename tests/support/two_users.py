"""Two users of one host with the same settings; run as root, becomes each of them in a forked child."""

from __future__ import annotations

import os
import signal

import numpy as np
from support import leftovers
from support.forking import fork, join

from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

WANT = np.arange(131_072)
FIRST, SECOND = 1001, 1002


def names(user: int) -> list[str]:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    return sorted(n for n in os.listdir(leftovers.MOUNT) if n.startswith(f"omnifs.{user}.{namespace}."))


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def transfer(connector: SharedMemoryConnector) -> None:
    ok, _, metadata = connector.put("0", "1", "r1", WANT)
    assert ok
    assert np.array_equal(connector.get("0", "1", "r1", metadata)[0], WANT)


def killed() -> None:
    become(FIRST)
    connector = SharedMemoryConnector({"orphan_ttl_s": 0})
    transfer(connector)
    assert connector.put("0", "1", "r1", WANT)[0]
    os.kill(os.getpid(), signal.SIGKILL)


def second() -> None:
    become(SECOND)
    with SharedMemoryConnector({}) as connector:
        transfer(connector)
        assert names(SECOND)
        janitor.sweep()
        assert names(FIRST), "one user took away what belongs to another"
    assert names(SECOND) == []


def heir() -> None:
    become(FIRST)
    with SharedMemoryConnector({}) as connector:
        transfer(connector)


def main() -> None:
    with SharedMemoryConnector({}) as connector:
        transfer(connector)  # whatever is imported late is imported now: the users may not read this interpreter
    _, status = os.waitpid(fork(killed), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    left = names(FIRST)
    assert left
    assert all(os.stat(leftovers.MOUNT / name).st_mode & 0o777 == 0o600 for name in left)
    join(fork(second))
    assert names(FIRST) == left
    join(fork(heir))
    assert names(FIRST) == []
    print("ok")


if __name__ == "__main__":
    main()
