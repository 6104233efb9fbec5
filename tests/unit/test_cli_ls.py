"""``omni-fastshm ls``: the table for people and the JSON for scripts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children, environment

from omni_fastshm import inventory, reading, segments
from omni_fastshm.cli import main
from omni_fastshm.cli.text import human_bytes, human_seconds, printable
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

ROOT = Path(__file__).parents[2]
Ls = Callable[..., list[str]]


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: connect(SharedMemoryConnector, **{"segment_bytes": 1 << 20, **settings})


@pytest.fixture
def ls(capsys: pytest.CaptureFixture[str], namespace: str) -> Ls:
    """Run the command on this test's namespace; gives the lines that it prints."""

    def run(*arguments: str) -> list[str]:
        assert main(["ls", "--namespace", namespace, *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.splitlines()

    return run


def table(lines: list[str], first: str) -> list[dict[str, str]]:
    """The rows of the table whose header starts with that word."""
    start = next(n for n, line in enumerate(lines) if line.startswith(first))
    columns = [(each.start(), each[0]) for each in re.finditer(r"\S+( \S+)*", lines[start])]
    ends = [*(at for at, _ in columns[1:]), None]
    rows = []
    for line in lines[start + 1 :]:
        if not line:
            break
        rows.append({name: line[at:end].strip() for (at, name), end in zip(columns, ends, strict=True)})
    return rows


def test_nothing(ls: Ls, namespace: str) -> None:
    head, said = ls()
    assert re.fullmatch(
        rf"/dev/shm: \S+ \wiB of \S+ \wiB free; user \d+, namespace {namespace}: 0 endpoints, 0 B", head
    )
    assert said == f"nothing of omni-fastshm in namespace {namespace}"


def test_a_living_pipeline(ls: Ls, make: Any, children: Children, namespace: str) -> None:
    producer = make(key_lookup=True, namespace=namespace)
    _, _, metadata = producer.put("a", "b", "r", np.arange(20_000), consumers=3)
    producer.put("a", "b", "q", np.arange(20_000))
    living, dead = children.with_connector(), children.with_connector()
    for child in (living, dead):
        child.run("view = c.get('a', 'b', 'r', md)", md=metadata)
    dead.kill()
    lines = ls()
    memory = human_bytes(sum((leftovers.MOUNT / name).stat().st_blocks * 512 for name in leftovers.names(namespace)))
    assert lines[0].endswith(f"namespace {namespace}: 1 endpoint, {memory}")
    (row,) = table(lines, "NAMESPACE")
    assert 0 <= float(row.pop("AGE").removesuffix("s")) < 30
    assert row == {
        "NAMESPACE": namespace,
        "ENDPOINT": producer._producer.name.split(".")[3],
        "PID": str(os.getpid()),
        "STATE": "alive",
        "MEMORY": row["MEMORY"],
        "PENDING": "1",
        "HELD": "1",
        "FREE": "254",
        "TAKES": "2",
        "HOLDERS": f"{living.pid}, {dead.pid} (dead)",
    }
    assert re.fullmatch(r"\d\.\d MiB in 2", row["MEMORY"])
    assert table(lines, "DIRECTORY OF") == [
        {"DIRECTORY OF": namespace, "USERS": "1", "PRODUCERS": "1", "MEMORY": "16.0 KiB"}
    ]
    assert not any(line.startswith(("SEGMENT", "ALSO THERE")) for line in lines)


def test_wide(ls: Ls, make: Any, namespace: str) -> None:
    producer = make()
    view = producer.get("a", "b", "r", producer.put("a", "b", "r", np.arange(20_000))[2])
    producer.put("a", "b", "q", np.arange(20_000))
    lines = ls("--wide")
    (row,) = table(lines, "NAMESPACE")
    assert (row["PENDING BYTES"], row["HELD BYTES"]) == ("156.3 KiB", "156.3 KiB")
    assert float(row["OLDEST"].removesuffix("s")) < 30
    names = [name for name in leftovers.names(namespace) if not name.endswith(".dir")]
    assert [(each["SEGMENT"], each["LOOKED AT"]) for each in table(lines, "SEGMENT")] == [
        (names[0], "-"),
        (names[1], "yes"),
    ]
    status = (leftovers.MOUNT / names[1]).stat()
    assert table(lines, "SEGMENT")[1]["LENGTH"] == human_bytes(status.st_size)
    assert table(lines, "SEGMENT")[1]["MEMORY"] == human_bytes(status.st_blocks * 512)
    (holder,) = table(lines, "ENDPOINT")
    assert (holder["SLOT"], holder["PID"], holder["ALIVE"], holder["BLOCKS"]) == ("0", str(os.getpid()), "yes", "1")
    del view


def test_an_orphan(ls: Ls, children: Children, namespace: str) -> None:
    child = children.with_connector(orphan_ttl_s=100)
    child.run("c.put('a', 'b', 'r', np.arange(20_000))")
    child.kill()
    before = table(ls(), "NAMESPACE")[0]["STATE"]
    SharedMemoryConnector({}).close()
    after = table(ls(), "NAMESPACE")[0]["STATE"]
    leftovers.remove(namespace)
    assert before == "orphaned (keeps 1m40s)"
    assert re.fullmatch(r"orphaned \(1m\d\ds left\)", after)


def test_what_else_is_there(ls: Ls, namespace: str) -> None:
    own, other = segments.owner_prefix(), f"omnifs.{os.geteuid() + 1}."
    for name in (f"{own}{namespace}.0123456789abcdef.d0", f"{other}{namespace}.\n\x1b[2Jé"):
        (leftovers.MOUNT / name).write_bytes(b"x" * 5000)
    rows = table(ls(), "ALSO THERE")
    leftovers.remove(namespace)
    assert [(row["ALSO THERE"], row["KIND"], row["MEMORY"]) for row in rows] == [
        (f"{own}{namespace}.0123456789abcdef.d0", "stray", "8.0 KiB"),
        (f"{other}{namespace}.\\n\\x1b[2Jé", "foreign", "8.0 KiB"),
    ]
    assert rows[0]["WHY"] == "its control segment is gone"
    assert {row["USER"] for row in rows} == {str(os.geteuid())}


def keys(kind: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)}


def test_json(ls: Ls, make: Any, namespace: str) -> None:
    producer = make(key_lookup=True, namespace=namespace)
    view = producer.get("a", "b", "r", producer.put("a", "b", "r", np.arange(20_000), consumers=2)[2])
    (leftovers.MOUNT / f"omnifs.{os.geteuid() + 1}.{namespace}.x").touch()
    given = json.loads("\n".join(ls("--json")))
    (name,) = leftovers.data_names(namespace)
    assert set(given) == keys(inventory.Snapshot) | {"format"}
    assert given["format"] == 1
    (endpoint,), (directory,), (oddity,) = given["endpoints"], given["directories"], given["oddities"]
    assert set(endpoint) == keys(inventory.Endpoint)
    assert endpoint["state"] == "alive"
    assert endpoint["control"]["blocks"] == {
        "pending": 0,
        "held_untaken": 1,
        "held": 0,
        "free": 255,
        "takes": 1,
        "pending_bytes": endpoint["control"]["blocks"]["held_bytes"],
        "held_bytes": endpoint["control"]["blocks"]["held_bytes"],
        "oldest_s": endpoint["control"]["blocks"]["oldest_s"],
    }
    assert endpoint["control"]["holders"][0]["pid"] == os.getpid()
    assert endpoint["control"]["held_segments"] == [0]
    (data,) = endpoint["data"]
    status = os.stat(leftovers.MOUNT / data["name"])
    assert data == {"name": name, "number": 0, "length": status.st_size, "allocated": status.st_blocks * 512}
    assert directory["users"] == 1
    assert oddity["kind"] == "foreign"
    (leftovers.MOUNT / oddity["name"]).unlink()
    del view


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not beside these tests")
def test_every_key_of_the_json_is_documented(ls: Ls, make: Any) -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    named = set(re.findall(r"`(?:….)?(?:\w+\.)*(\w+)(?:\[\])?`", page))
    for kind in (
        inventory.Snapshot,
        inventory.Endpoint,
        inventory.DataSegment,
        reading.Control,
        reading.Blocks,
        reading.Holder,
        inventory.NamespaceDirectory,
        inventory.Oddity,
    ):
        for key in keys(kind):
            assert key in named, f"docs/operating.md does not say what {key} of {kind.__name__} is"
    make().put("a", "b", "r", np.arange(20_000))
    lines = [line for line in ls() if line.startswith(("NAMESPACE", "DIRECTORY"))]
    assert len(lines) == 2
    for line in lines:
        assert re.sub(" +", " ", line) in re.sub(" +", " ", page)


def test_from_the_command_line_and_without_anything_heavy(namespace: str) -> None:
    code = (
        "import sys; from omni_fastshm.cli import main; main(['ls', '--namespace', sys.argv[1]]); "
        "print([m for m in ('torch', 'numpy', 'rich', 'omni_fastshm.codec') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, namespace], capture_output=True, text=True, timeout=150, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [f"nothing of omni-fastshm in namespace {namespace}", "[]"]


@pytest.mark.parametrize("arguments", [["{}"], ["--namespace", "{}"], ["--json", "{}"], ["{}", "--namespace={}"]])
@pytest.mark.parametrize("command", [["ls"], ["reap", "--dry-run"], ["top", "--once", "--interval", "0.05"]])
def test_a_namespace_by_itself_or_behind_its_option(
    command: list[str], arguments: list[str], capsys: pytest.CaptureFixture[str], namespace: str
) -> None:
    assert main([*command, *(text.format(namespace) for text in arguments)]) == 0
    out = capsys.readouterr().out
    if "--json" not in arguments:
        assert f"namespace {namespace}" in out
    elif command[0] != "reap":
        assert json.loads(out)["namespace"] == namespace


@pytest.mark.parametrize("command", ["ls", "reap", "top"])
def test_one_namespace(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "x", "--namespace", "y"])
    assert "two namespaces, x and y: give one, or none" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "reap", "top"])
@pytest.mark.parametrize(
    "arguments", [["--namespace", "a/b"], ["--namespace", ""], ["--namespace"], ["a/b"], [""], ["x", "y"], ["--nons"]]
)
def test_a_wrong_command_line(
    command: str, arguments: list[str], capsys: pytest.CaptureFixture[str], namespace: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, *arguments])
    assert stopped.value.code == 2
    assert "usage: omni-fastshm" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["reap"], ["reap", "--dry-run"]])
def test_without_a_mount(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segments, "MOUNT", str(tmp_path / "nowhere"))
    assert main(command) == 1
    assert f"omni-fastshm: cannot look at {tmp_path}/nowhere: No such file" in capsys.readouterr().err


@pytest.mark.root
@pytest.mark.parametrize("command", ["ls", "reap"])
def test_an_empty_mount_of_any_size(command: str) -> None:
    script = f"mount -t tmpfs -o size=0 none /dev/shm && exec {sys.executable} -m omni_fastshm {command}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=150, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    if command == "ls":
        assert done.stdout.splitlines() == [
            "/dev/shm: no size limit; user 0, all namespaces: 0 endpoints, 0 B",
            "nothing of omni-fastshm in any namespace",
        ]
    else:
        assert done.stdout.startswith(
            "all namespaces: 0 names removed, 0 payloads dropped, 0 B given back; 0 kept, 0 alive, 0 of other"
        )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5 << 62, "20.0 EiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (9.94, "9.9s"), (42.9, "42s"), (182, "3m02s"), (7500, "2h05m"), (86400 * 3 + 4 * 3600, "3d04h")],
)
def test_times(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_nothing_moves_the_cursor() -> None:
    assert printable("a\tb\n\x1b[2J\udc80é") == "a\\tb\\n\\x1b[2J\\udc80é"
