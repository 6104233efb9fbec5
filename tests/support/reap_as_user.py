"""``omni-fastshm reap`` and ``ls`` by a user beside whose leftovers lie another user's; run as root."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from typing import Any

import numpy as np
from support import leftovers
from support.forking import fork, join

from omni_fastshm.cli import main as command
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

FIRST, SECOND = 1001, 1002
NAMESPACE = os.environ["OMNI_FASTSHM_NAMESPACE"]


def names(user: int) -> list[str]:
    return [name for name in leftovers.names(NAMESPACE) if name.startswith(f"omnifs.{user}.")]


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def killed(user: int) -> None:
    become(user)
    connector = SharedMemoryConnector({"orphan_ttl_s": 0})
    assert connector.put("0", "1", "r1", np.arange(100_000))[0]
    os.kill(os.getpid(), signal.SIGKILL)


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command([*arguments, "--namespace", NAMESPACE])
    return status, out.getvalue()


def look(*arguments: str) -> Any:
    status, text = run(*arguments, "--json")
    assert status == 0
    return json.loads(text)


def second() -> None:
    become(SECOND)
    there = look("ls")
    assert [endpoint["name"] for endpoint in there["endpoints"]] == [n for n in names(SECOND) if n.endswith(".ctl")]
    assert [(odd["name"], odd["kind"], odd["uid"]) for odd in there["oddities"]] == [
        (name, "foreign", FIRST) for name in names(FIRST)
    ]
    foreign = names(FIRST)
    dry = look("reap", "--dry-run")
    assert dry["dry_run"] is True
    assert sorted(dry["removed"]) == names(SECOND)
    status, text = run("reap")
    assert status == 0
    assert names(SECOND) == []
    assert names(FIRST) == foreign
    for name in foreign:
        assert f"skipped  {name}: of user {FIRST}\n" in text
    assert text.endswith(f"0 kept, 0 alive, {len(foreign)} of other users skipped\n"), text
    again = look("reap")
    assert (again["removed"], again["left_alone"]) == ([], [])
    assert again["foreign"] == [{"name": name, "uid": FIRST} for name in foreign]


def first() -> None:
    become(FIRST)
    assert run("reap")[0] == 0
    assert names(FIRST) == []


def main() -> None:
    with SharedMemoryConnector({}) as connector:  # what is imported late is imported now: the users may not read it
        connector.put("0", "1", "r", np.arange(100_000))
        run("reap", "--dry-run")
        run("ls", "--wide")
    for user in (FIRST, SECOND):
        _, status = os.waitpid(fork(lambda user=user: killed(user)), 0)  # type: ignore[misc]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert len(names(user)) == 3
    join(fork(second))
    join(fork(first))
    print("ok")


if __name__ == "__main__":
    main()
