"""`omni-fastshm doctor`: what it says of machines in order and of others."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.child import environment

from omni_fastshm import segments
from omni_fastshm.cli import checks, main
from omni_fastshm.cli.checks import CHECKS, Finding, run_check

NAMES = [
    "shm mount",
    "memlock limit",
    "huge pages for shm",
    "cores",
    "torch",
    "CUDA",
    "page-locking",
    "Mooncake",
    "left behind",
]


@pytest.fixture(scope="module", autouse=True)
def _store_is_loaded() -> None:
    """Mooncake's client opens descriptors when it is imported, and keeps them."""
    run_check(checks._mooncake)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["doctor", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def mount_of(monkeypatch: pytest.MonkeyPatch, size: int, free: int, inodes: int = 1000) -> None:
    real = os.statvfs
    page = 4096
    found = SimpleNamespace(f_blocks=size // page, f_frsize=page, f_bavail=free // page, f_files=1000, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: found if path == segments.MOUNT else real(path))


def test_each_check_gives_one_finding(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = doctor(capsys)
    assert [each["name"] for each in said["checks"]] == NAMES
    assert said["format"] == 1
    assert {each["status"] for each in said["checks"]} <= {"ok", "warn", "fail"}
    assert status == (1 if said["status"] == "fail" else 0)


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["CHECK", "FOUND"]
    starts = [line for line in lines[1:] if not line.startswith(" ")]
    assert [line[: len(name)] for line, name in zip(starts, NAMES, strict=True)] == NAMES


GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "free", "inodes", "status", "text"),
    [
        (16 * GIB, 15 * GIB, 9, "ok", "15.0 GiB of 16.0 GiB"),
        (64 << 20, 64 << 20, 9, "warn", "--shm-size"),
        (16 * GIB, 63 << 20, 9, "fail", "--shm-size"),
        (16 * GIB, 15 * GIB, 0, "fail", "nr_inodes"),
        (0, 0, 9, "ok", "no size limit"),
    ],
)
def test_the_mount(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
    free: int,
    inodes: int,
    status: str,
    text: str,
) -> None:
    mount_of(monkeypatch, size, free, inodes)
    code, said = doctor(capsys)
    found = said["checks"][0]
    assert found["status"] == status
    assert text in found["found"] + found["advice"]
    assert code == (1 if status == "fail" else 0)


def test_no_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(segments, "MOUNT", str(tmp_path / "none"))
    code, said = doctor(capsys)
    assert code == 1
    assert said["checks"][0]["status"] == "fail"
    assert "mount -t tmpfs" in said["checks"][0]["advice"]


@pytest.mark.parametrize(
    ("soft", "hard", "status", "text"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", "unlimited"),
        (8 << 20, resource.RLIM_INFINITY, "warn", "raised to unlimited"),
        (2 << 30, 4 << 30, "ok", "2.0 GiB"),
    ],
)
def test_locked_memory(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, status: str, text: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = run_check(checks._memlock_limit)
    assert (found.status, text in found.found) == (status, True)


@pytest.mark.parametrize(
    ("text", "found", "advised"),
    [
        ("always within_size advise [never] deny force\n", "never", True),
        ("always [within_size] advise never deny force\n", "within_size", False),
        (None, "this kernel has none", False),
    ],
)
def test_huge_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, found: str, advised: bool
) -> None:
    file = tmp_path / "shmem_enabled"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(checks, "_HUGE", file)
    said = run_check(checks._huge_pages)
    assert (said.found, bool(said.advice)) == (found, advised)


def test_cores_and_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "_NODES", tmp_path)
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    found = run_check(checks._cores)
    assert "3 cores, 2 NUMA nodes" in found.found
    assert "numactl" in found.advice
    (tmp_path / "node1").rmdir()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert run_check(checks._cores).status == "warn"


def test_a_driver_without_torch_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "_DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in run_check(checks._cuda).found
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch finds no device" in run_check(checks._cuda).found
    monkeypatch.setattr(checks, "_DRIVER", tmp_path / "none")
    assert run_check(checks._cuda).status == "ok"


def test_page_locking(shm_names: Any) -> None:
    from support.fake_device import REFUSED, FakeDevices

    from omni_fastshm.staging import devices

    fake = FakeDevices()
    devices.use(fake)
    try:
        assert run_check(checks._page_locking).found == "shared memory can be page-locked"
        fake.refuse = [REFUSED]
        found = run_check(checks._page_locking)
    finally:
        devices.drop("meta")
    assert found.status == "warn"
    assert f"error {REFUSED}" in found.found
    assert fake.pending == 0
    assert not fake.registered
    assert not fake.violations
    assert not [name for name in segments.list_names(segments.owner_prefix()) if ".doctor." in name]


def test_without_mooncake(without_mooncake: None) -> None:
    found = run_check(checks._mooncake)
    assert found.status == "ok"
    assert "pip install" in found.advice


def test_what_the_dead_left(namespace: str) -> None:
    code = (
        "import os, numpy as np\n"
        "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
        "c = SharedMemoryConnector({})\n"
        "c.put('a', 'b', 'r', np.arange(20_000))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=150, check=False)
    assert done.returncode == -9
    found = run_check(checks._left_behind)
    assert found.status == "warn"
    assert "dead endpoint" in found.found
    assert "omni-fastshm reap" in found.advice
    assert main(["reap", "--namespace", namespace, "--force"]) == 0


def test_broken_objects(namespace: str) -> None:
    name = f"{segments.owner_prefix()}{namespace}.{1:016x}.d3"
    Path(segments.MOUNT, name).write_bytes(bytes(4096))
    assert "broken object" in run_check(checks._left_behind).found
    segments.unlink(name)


def test_a_check_that_breaks() -> None:
    def _of_the_weather() -> Finding:
        raise OSError("no window")

    assert run_check(_of_the_weather) == Finding("of the weather", "warn", "cannot be told: OSError: no window")


@pytest.mark.parametrize("module", ["torch", "mooncake"])
def test_with_a_package_that_cannot_be_imported(module: str) -> None:
    code = f"import sys\nsys.modules[{module!r}] = None\nfrom omni_fastshm.cli import main\nsys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr
    line = next(line for line in done.stdout.splitlines() if line.lower().startswith(module))
    assert "not installed" in line


def test_there_are_no_others() -> None:
    assert len(CHECKS) == len(NAMES)
