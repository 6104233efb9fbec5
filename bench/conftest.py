"""What every measurement needs: the machine's facts in the results, pinned cores, a clean /dev/shm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# At the end, so that an installed package is measured and not the checkout beside this folder.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.payloads import LOADS
from bench.peers import NAMES, load_peer

RESULTS = pytest.StashKey[dict[str, Any]]()
LIBRARIES = ("omni-fastshm", "torch", "numpy", "msgspec", "posix_ipc", "pyzmq", "iceoryx2", "ray", "pytest-benchmark")
PLACE = f"bench{os.getpid()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("omni_fastshm measurements")
    group.addoption(
        "--bench-cores",
        default="auto",
        help="cores of producer and consumer, such as 0,1; 'auto' takes the first two allowed, 'none' none",
    )
    group.addoption("--bench-seconds", type=float, default=1.5, help="time per load and peer, in seconds (default 1.5)")
    group.addoption(
        "--bench-peers",
        default=",".join(NAMES),
        help=f"which to measure, of {', '.join(NAMES)} (default all that are installed)",
    )
    group.addoption(
        "--bench-loads", default=",".join(LOADS), help=f"which payloads, of {', '.join(LOADS)} (default all)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each load with each peer that takes it; the load varies slowest, so that peers stand together in tables."""
    if {"load", "name"} <= set(metafunc.fixturenames):
        alone = getattr(metafunc.module, "ONE_PROCESS", False)
        pairs = [
            (load, name)
            for load in loads(metafunc.config)
            for name in peers(metafunc.config)
            if load_peer(name).takes(load) and (load_peer(name).one_process or not alone)
        ]
        metafunc.parametrize(("load", "name"), pairs)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}
    for read in (cores, peers, loads):
        read(config)  # a wrong option is an error before the first measurement


def peers(config: pytest.Config) -> list[str]:
    """The peers to measure, in the order asked for; those not installed are left out of "all" only."""
    wanted = _listed(config, "--bench-peers", "peer", NAMES)
    missing = {name: load_peer(name).missing for name in wanted if load_peer(name).missing}
    if len(wanted) < len(NAMES) and missing:
        said = ", ".join(f"{name} needs the package {package}" for name, package in missing.items())
        raise pytest.UsageError(f"--bench-peers: {said}; pip install '.[bench]' brings all but ray")
    return [name for name in wanted if name not in missing]


def loads(config: pytest.Config) -> list[str]:
    """The payloads to measure, in the order asked for."""
    return _listed(config, "--bench-loads", "load", tuple(LOADS))


def _listed(config: pytest.Config, option: str, what: str, known: tuple[str, ...]) -> list[str]:
    wanted: list[str] = config.getoption(option).split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise pytest.UsageError(f"{option}: no {what} named {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = [load_peer(name).missing for name in NAMES if load_peer(name).missing]
    return [f"peers not measured, for want of a package: {', '.join(map(str, left_out))}"] if left_out else []


def cores(config: pytest.Config) -> tuple[int | None, int | None]:
    """The cores of producer and consumer, None for not pinned."""
    wanted = config.getoption("--bench-cores")
    allowed = sorted(os.sched_getaffinity(0))
    if wanted == "none" or (wanted == "auto" and len(allowed) < 2):
        return None, None
    if wanted == "auto":
        return allowed[0], allowed[1]
    try:
        producer, consumer = (int(core) for core in wanted.split(","))
    except ValueError:
        raise pytest.UsageError(f"--bench-cores: two numbers such as 0,1 are wanted, not {wanted!r}") from None
    if not {producer, consumer} <= set(allowed):
        raise pytest.UsageError(f"--bench-cores {wanted}: this process may only use cores {allowed}")
    return producer, consumer


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Only show that the measurement works (`--benchmark-disable`): a message or two each."""
    return bool(request.config.getoption("benchmark_disable"))


@pytest.fixture(scope="session")
def seconds(request: pytest.FixtureRequest) -> float:
    """How long to measure one load with one peer."""
    return float(request.config.getoption("--bench-seconds"))


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where what is counted instead of timed goes: into the results file, under ``counts``."""
    return request.config.stash[RESULTS]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The copies of a peer shall not be helped by a core that the other process needs."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pinned(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """This process stays on the producer's core meanwhile; the value is the consumer's core."""
    producer, consumer = cores(request.config)
    before = os.sched_getaffinity(0)
    if producer is not None:
        os.sched_setaffinity(0, {producer})
    yield consumer
    os.sched_setaffinity(0, before)


def shared_memory_of(place: str) -> dict[str, int]:
    """Names in /dev/shm that contain `place`, with the bytes that each really occupies."""
    found = {}
    for entry in os.scandir("/dev/shm"):
        if place in entry.name:
            try:
                found[entry.name] = entry.stat().st_blocks * 512
            except FileNotFoundError:
                pass  # unlinked between the two calls
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever this run made in /dev/shm is gone when it ends."""
    yield
    assert not shared_memory_of(PLACE), f"left in /dev/shm: {sorted(shared_memory_of(PLACE))}"


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # a host's name says nothing about a figure
    machine_info["facts"] = machine_facts(config)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    output_json["counts"] = config.stash[RESULTS]


def machine_facts(config: pytest.Config) -> dict[str, Any]:
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    mount = os.statvfs("/dev/shm")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "pinned": list(cores(config)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "shm_bytes": mount.f_blocks * mount.f_frsize,
        "shm_huge_pages": huge.read_text().strip() if huge.exists() else "not readable",
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "governor": governor.read_text().strip() if governor.exists() else "not readable",
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Hardware"):
            return value.strip()
    return platform.processor() or platform.machine()
