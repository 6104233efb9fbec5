"""What an operator does: ``omni-fastshm reap``; and what nobody needs one for: crash loops, containers on one mount."""

from __future__ import annotations

import json
import os
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Child, Children, run_script
from support.steps import PUT_BIG

from omni_fastshm import segments
from omni_fastshm._core import layout
from omni_fastshm.cli import main

Reap = Callable[..., dict[str, Any]]
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
ENDPOINT = "0123456789abcdef"


@pytest.fixture
def reap(capsys: pytest.CaptureFixture[str], namespace: str) -> Reap:
    """Run the command on this test's namespace; gives its JSON."""

    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["reap", "--namespace", namespace, "--json", *arguments]) == status
        captured = capsys.readouterr()
        assert captured.err == ""
        given = json.loads(captured.out)
        assert isinstance(given, dict)
        return given

    return run


@pytest.fixture
def dead(children: Children) -> Callable[..., str]:
    """A function that leaves a killed producer with an untaken payload; gives its control segment's name."""

    def kill(**settings: Any) -> str:
        child = children.with_connector(**settings)
        metadata = child.run(PUT_BIG, rid="r", seed=1)[2]
        child.kill()
        return str(metadata["shm"]["name"])

    return kill


def everything(namespace: str) -> list[Any]:
    """Bytes, times and sizes of all that is there, and who has which lock."""
    found: list[Any] = []
    paths = [leftovers.MOUNT / name for name in leftovers.names(namespace)]
    for path in paths:
        status = path.lstat()
        found.append(
            (path.name, status.st_ino, status.st_size, status.st_blocks, status.st_mtime_ns, status.st_ctime_ns)
        )
        found.append(path.read_bytes() if path.is_file() else None)
    inodes = {str(path.lstat().st_ino) for path in paths}
    rows = [line.split()[1:] for line in Path("/proc/locks").read_text().splitlines()]
    return [*found, sorted(row for row in rows if row[4].split(":")[-1] in inodes)]


class TestReap:
    """It says what is removed, what is kept and why, what lives, and what could not be handled."""

    def test_nothing_to_do(self, reap: Reap) -> None:
        assert reap() == {
            "format": 1,
            "dry_run": False,
            "removed": [],
            "dropped_payloads": 0,
            "freed_bytes": 0,
            "held_bytes": 0,
            "kept": [],
            "alive": [],
            "foreign": [],
            "left_alone": [],
        }

    def test_what_the_dead_left(self, reap: Reap, dead: Any, shm_names: Any) -> None:
        name = dead(orphan_ttl_s=0)
        names = shm_names()
        memory = sum((leftovers.MOUNT / each).stat().st_blocks * 512 for each in names)
        told = reap("--dry-run")
        assert shm_names() == names
        done = reap()
        assert {**told, "dry_run": False} == done
        assert sorted(done["removed"]) == names
        assert name in done["removed"]
        assert (done["dropped_payloads"], done["freed_bytes"]) == (1, memory)
        assert shm_names() == []

    def test_what_a_reader_looks_at_is_told_apart(
        self, reap: Reap, make: Any, children: Children, namespace: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        producer, reader = children.with_connector(orphan_ttl_s=0), make()
        view = reader.get("0", "1", "r", producer.run(PUT_BIG, rid="r", seed=1)[2])
        producer.kill()
        memory = sum((leftovers.MOUNT / each).stat().st_blocks * 512 for each in leftovers.names(namespace))
        assert main(["reap", "--namespace", namespace, "--dry-run"]) == 0
        assert re.search(
            r"would remove 3 names, drop 0 payloads, give back \S+ KiB, \S+ MiB more when readers let go; ",
            capsys.readouterr().out,
        )
        done = reap()
        assert done["held_bytes"] > 800_000
        assert done["freed_bytes"] + done["held_bytes"] == memory, (
            "all of it comes back, now or when the reader lets go"
        )
        del view

    def test_payloads_in_their_time_are_kept_until_forced(self, reap: Reap, dead: Any, shm_names: Any) -> None:
        name = dead(orphan_ttl_s=100)
        (kept,) = reap()["kept"]
        assert (kept["name"], kept["payloads"]) == (name, 1)
        assert 50 < kept["seconds_left"] <= 100
        assert len(shm_names()) == 3
        assert len(reap("--force", "--dry-run")["removed"]) == 3
        assert len(shm_names()) == 3
        forced = reap("--force")
        assert (forced["kept"], forced["dropped_payloads"]) == ([], 1)
        assert shm_names() == []

    def test_the_living_are_named_and_not_touched(self, reap: Reap, make: Any, shm_names: Any) -> None:
        connector = make()
        _, _, metadata = connector.put("a", "b", "r", np.arange(100_000))
        names = shm_names()
        done = reap("--force")
        assert (done["alive"], done["removed"]) == ([metadata["shm"]["name"]], [])
        assert shm_names() == names
        assert connector.get("a", "b", "r", metadata) is not None

    def test_a_dry_run_changes_nothing(self, reap: Reap, make: Any, dead: Any, namespace: str) -> None:
        connector = make(segment_bytes=1 << 20)  # of a size that has all its memory from the start
        view = connector.get("a", "b", "r", connector.put("a", "b", "r", np.arange(100_000), consumers=2)[2])
        dead(orphan_ttl_s=100)
        for suffix in (f"{ENDPOINT}.ctl", f"{ENDPOINT[::-1]}.d0"):
            (leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{suffix}").touch()
        before = everything(namespace)
        assert len(before[-1]) >= 3
        for arguments in ([], ["--force"]):
            assert len(reap("--dry-run", *arguments)["removed"]) == 2 * (1 + len(arguments))
            assert everything(namespace) == before
        reap("--force")
        assert everything(namespace) != before
        del view

    def test_what_cannot_be_handled_is_said_by_the_status(self, reap: Reap, dead: Any, namespace: str) -> None:
        dead(orphan_ttl_s=0)
        path = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{ENDPOINT}.ctl"
        path.symlink_to("/etc/passwd")
        for arguments in (["--dry-run"], []):
            done = reap(*arguments, status=1)
            assert len(done["removed"]) == 2, "one bad name keeps nothing else"
            assert [each["name"] for each in done["left_alone"]] == [path.name]
            assert "refused" in done["left_alone"][0]["reason"]
        assert path.is_symlink()
        path.unlink()
        leftovers.remove(namespace)

    def test_for_people(self, dead: Any, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
        name = dead(orphan_ttl_s=100)
        odd = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{ENDPOINT}.d0"
        odd.symlink_to("/etc/passwd")
        foreign = leftovers.MOUNT / f"omnifs.{os.geteuid() + 1}.{namespace}.\n\x1b[2J"
        foreign.touch()
        assert main(["reap", "--namespace", namespace]) == 1
        *lines, last = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert lines[0].startswith(f"kept  {name}: its producer is dead, but 1 payload may still be got for 1m")
        assert lines[0].endswith("; --force drops them")
        assert lines[1] == f"skipped  {foreign.name[:-5]}\\n\\x1b[2J: of user {os.geteuid()}"
        assert lines[2] == f"left alone  {odd.name}: is not a shared memory object: refused"
        assert last == (
            f"namespace {namespace}: 0 names removed, 0 payloads dropped, 0 B given back; "
            "1 kept, 0 alive, 1 of other users skipped, 1 left alone"
        )
        odd.unlink()
        foreign.unlink()
        assert main(["reap", "--namespace", namespace, "--force", "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines[:-1]] == [["would", "remove"]] * 3
        assert lines[-1].startswith(f"namespace {namespace}: would remove 3 names, drop 1 payload, give back ")
        assert main(["reap", "--namespace", namespace, "--force"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"removed  {segments.data_name(name, 0)}"


class TestR05ReaperDeletesALiveSegment:
    """Cleanup that trusts "does this pid exist" misjudges reused pids, and processes of other PID namespaces."""

    @pytest.mark.parametrize("pid", ["this process", "nobody", "init"])
    def test_a_pid_that_an_unrelated_process_has_now(self, reap: Reap, dead: Any, shm_names: Any, pid: str) -> None:
        name = dead(orphan_ttl_s=0)
        offset, size = next((o, n) for s, f, o, n in layout() if (s, f) == ("ofs_control", "pid"))
        value = {"this process": os.getpid(), "nobody": 2**22 + 5, "init": 1}[pid]
        with open(leftovers.MOUNT / name, "r+b") as file:
            file.seek(offset)
            file.write(value.to_bytes(size, "little"))
        assert name in reap()["removed"]
        assert shm_names() == []

    @pytest.mark.parametrize("pid", ["dead process", "nobody", "zero"])
    def test_a_living_owner_whose_pid_says_nothing(
        self, reap: Reap, make: Any, children: Children, shm_names: Any, pid: str
    ) -> None:
        gone = children.start()
        gone.kill()
        owner = make(orphan_ttl_s=0)
        _, _, metadata = owner.put("0", "1", "r", np.arange(100_000))
        name = metadata["shm"]["name"]
        offset, size = next((o, n) for s, f, o, n in layout() if (s, f) == ("ofs_control", "pid"))
        with open(leftovers.MOUNT / name, "r+b") as file:
            file.seek(offset)
            file.write({"dead process": gone.pid, "nobody": 2**22 + 5, "zero": 0}[pid].to_bytes(size, "little"))
        names = shm_names()
        assert reap("--force")["alive"] == [name]
        assert shm_names() == names
        assert owner.get("0", "1", "r", metadata) is not None

    @pytest.mark.root
    def test_a_living_owner_in_another_pid_namespace(self, reap: Reap, make: Any, children: Children) -> None:
        owner = in_pid_namespace(children, orphan_ttl_s=0)
        metadata = owner.run(PUT_BIG, rid="r", seed=5)[2]
        done = reap("--force")
        assert (done["alive"], done["removed"]) == ([metadata["shm"]["name"]], [])
        got = make().get("0", "1", "r", metadata)
        assert got is not None
        del got
        kill_inside(owner)
        assert metadata["shm"]["name"] in reap()["removed"]


def in_pid_namespace(children: Children, **settings: Any) -> Child:
    child = children.start(command=PID_NAMESPACE)
    child.run(
        "import numpy as np, os\n"
        "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
        "from omni_fastshm import janitor\n"
        "assert os.getpid() < 5, 'not in a PID namespace of its own'\n"
        "c = SharedMemoryConnector(settings)",
        settings=settings,
    )
    return child


def kill_inside(child: Child) -> None:
    """Kill a child in a PID namespace of its own and wait for its end, not only for that of the command around it."""
    inner = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
    descriptor = os.pidfd_open(inner)
    try:
        child.kill()
        assert select.select([descriptor], [], [], 60)[0]
    finally:
        os.close(descriptor)


@pytest.mark.root
class TestTwoPidNamespaces:
    """Two containers share one shm mount; both call themselves process 1."""

    def test_they_exchange_payloads_and_tidy_up_after_each_other(self, children: Children, shm_names: Any) -> None:
        one, two = in_pid_namespace(children, orphan_ttl_s=0), in_pid_namespace(children, orphan_ttl_s=0)
        assert one.run("result = os.getpid()") == two.run("result = os.getpid()")
        first = one.run(PUT_BIG, rid="r", seed=1)[2]
        second = two.run(PUT_BIG, rid="s", seed=2)[2]
        take = "got = c.get('0', '1', rid, md); result = int(got[0]['a'][0])"
        assert two.run(take, rid="r", md=first) == 1
        assert one.run(take, rid="s", md=second) == 2
        # A start, a sweep, a sweep by force: the other one, with the same number, is alive.
        sweep = "SharedMemoryConnector({}).close(); result = janitor.sweep(c.namespace, force=True).removed"
        assert (one.run(sweep), two.run(sweep)) == ([], [])
        assert two.run("result = int(got[0]['a'][-1])") == 1 + 131071
        # What one held and sent when it was killed is gone with the next start of the other.
        kill_inside(one)
        assert two.run("c.put('0', '1', 'r', np.arange(100)); result = c.health()['live_blocks']") == 1
        two.run("SharedMemoryConnector({}).close()")
        left = [name for name in shm_names() if not name.endswith(".dir")]
        assert {name.split(".")[3] for name in left} == {second["shm"]["name"].split(".")[3]}
        assert two.run("result = int(got[0]['a'][-1])") == 1 + 131071, "a view outlives the other namespace"
        two.run("del got; c.close()")
        assert shm_names() == []


@pytest.mark.root
class TestR10SeveralUsers:
    """A second user on the host could not clean up what the first one's run had left, and failed for good."""

    def test_reap_skips_the_foreign_and_takes_its_own(self) -> None:
        run_script("reap_as_user.py")


class TestCrashLoop:
    """A service that is restarted and killed without end needs nobody to clean up."""

    @pytest.mark.parametrize(
        "restarts", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.time_limit(300)])]
    )
    def test_the_mount_does_not_fill_up(self, restarts: int) -> None:
        run_script("crash_loop.py", str(restarts), "1", timeout=280)

    @pytest.mark.root
    def test_orphans_that_are_to_be_kept_for_long_give_way(self, children: Children) -> None:
        """Every life leaves a payload that is to be kept for an hour, on a mount that has room for three of them."""
        mount = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"', "sh")
        base = children.start(command=mount)
        base.run("import os; from omni_fastshm import janitor")
        settings = {"segment_bytes": 4 << 20, "max_bytes": 4 << 20, "put_timeout_s": 0, "orphan_ttl_s": 3600}
        kept: list[int] = []
        for _ in range(8):
            life = children.start(command=("nsenter", "-t", str(base.pid), "-m", "--"))
            assert life.run(
                "import numpy as np\n"
                "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
                "c = SharedMemoryConnector(settings)\n"
                "result = c.put('a', 'b', 'r', np.arange(480_000))[0]",
                settings=settings,
            ), f"no room after {kept}"
            life.kill()
            kept.append(base.run("result = sum(name.endswith('.ctl') for name in os.listdir('/dev/shm'))"))
        assert kept[0] == 1
        assert kept[-1] <= 4
        assert base.run("janitor.sweep(force=True); result = os.listdir('/dev/shm')") == []

    @pytest.mark.root
    def test_a_put_drops_no_more_than_it_needs(self, children: Children) -> None:
        """Three orphans fill the mount; a new producer needs the room of one, and takes that of the oldest."""
        mount = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=14m none /dev/shm && exec "$@"', "sh")
        base = children.start(command=mount)
        settings = {"segment_bytes": 4 << 20, "max_bytes": 4 << 20, "put_timeout_s": 0, "orphan_ttl_s": 3600}
        code = (
            "import numpy as np\n"
            "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
            "c = SharedMemoryConnector(settings)\n"
            "result = c.put('a', 'b', 'r', np.full(500_000, seed))[2]"
        )
        base.run("from omni_fastshm import janitor")
        sent = []
        for seed in range(3):
            life = children.start(command=("nsenter", "-t", str(base.pid), "-m", "--"))
            sent.append(life.run(code, settings=settings, seed=seed))
            life.kill()
            base.run("janitor.sweep()")  # and with it the death is noted
        assert base.run(code, settings=settings, seed=3) is not None
        look = "result = [got and int(got[0][0]) for got in (c.get('a', 'b', 'r', md) for md in sent)]"
        assert base.run(look, sent=sent) == [None, 1, 2]
        base.run("c.close(); janitor.sweep()")
