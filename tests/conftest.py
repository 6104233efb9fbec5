"""What every test gets: a namespace of its own, a time limit, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The helpers live beside the tests. Only tests/ goes on the path, never the repository's root: that would put
# the uncompiled package in front of an installed wheel.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("support", "contract")

from support import leftovers  # noqa: E402
from support.child import Children  # noqa: E402
from support.waiting import within  # noqa: E402

TIME_LIMIT_S = 180.0  # most need a second; starting interpreters on a machine busy with other things takes long
# A call that is stuck in native code never runs the signal's handler: then the whole run ends, with stacks.
HARD_LIMIT_EXTRA_S = 30.0

_stderr_copy: dict[str, int] = {}
_failed = pytest.StashKey[bool]()
_counter = iter(range(1 << 30))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take long or need much memory")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "time_limit(seconds): this test may take longer than the default limit")
    if os.environ.get("OMNI_FASTSHM_CI"):
        # The same examples each time: what a search at random finds, it shall find where somebody can go after it.
        from hypothesis import settings

        settings.register_profile("ci", derandomize=True, database=None)
        settings.load_profile("ci")
    # Output is captured while tests run; the hard limit has to write to the real stderr.
    _stderr_copy["fd"] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(_stderr_copy.pop("fd"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run with --slow")
    root = pytest.mark.skip(reason="needs root (mounts, namespaces, or files of other users)")
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(slow)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(root)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_devices():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and a torch built for it"))


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report  # type: ignore[return-value]


@pytest.fixture(scope="session", autouse=True)
def _warm_up() -> None:
    """Do once what opens descriptors or starts threads once per process and keeps them."""
    import numpy as np

    with contextlib.suppress(ModuleNotFoundError):  # the tests of a wheel run without it
        import torch

        torch.from_numpy(np.ones(4)).add_(1).sum().item()
    # A collection before and after each test would otherwise look at all of torch every time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("time_limit")
    limit = float(marker.args[0]) if marker else TIME_LIMIT_S

    def too_long(signum: int, frame: Any) -> None:
        faulthandler.dump_traceback(file=_stderr_copy["fd"], all_threads=True)
        pytest.fail(f"the test ran longer than {limit:g} s; the stacks of all threads are on stderr")

    previous = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + HARD_LIMIT_EXTRA_S, exit=True, file=_stderr_copy["fd"])
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def namespace(_time_limit: None) -> Iterator[str]:
    """A namespace that only this test uses; connectors and child processes take it from the environment."""
    name = f"t{os.getpid()}-{next(_counter)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNI_FASTSHM_NAMESPACE", name)
        yield name


@pytest.fixture(autouse=True)
def _nothing_left_behind(namespace: str, request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    before = leftovers.Snapshot(namespace)
    yield
    gc.collect()
    within(5, lambda: not before.difference(), 0.05)  # another thread may be on its last instructions
    left = before.difference()
    leftovers.remove(namespace)
    # The traceback of a failed test keeps its frames alive, and with them connectors and views: what is left
    # then says nothing.
    if left and not request.node.stash.get(_failed, False):
        pytest.fail("left behind:\n" + "\n".join(left))


@pytest.fixture
def connect(_nothing_left_behind: None, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that builds a connector; at the end each must be without leases, and is closed."""
    made: list[Any] = []

    def build(cls: Callable[[dict[str, Any]], Any], **settings: Any) -> Any:
        connector = cls(settings)
        made.append(connector)
        return connector

    yield build
    gc.collect()
    # Another thread may be about to let go of the last one: a leak is what stays.
    within(5, lambda: not any(connector.health()["leases"] for connector in made))
    leases = {index: connector.health()["leases"] for index, connector in enumerate(made)}
    for connector in made:
        connector.close()
    made.clear()
    if any(leases.values()) and not request.node.stash.get(_failed, False):
        pytest.fail(f"leases that outlived the test, by the order of the connectors: {leases}")


@pytest.fixture
def shm_names(namespace: str) -> Callable[[], list[str]]:
    """A function that lists what lies in shared memory under this test's namespace."""
    return lambda: leftovers.names(namespace)


@pytest.fixture
def children(_nothing_left_behind: None, request: pytest.FixtureRequest) -> Iterator[Children]:
    """Starts fresh interpreters; at the end each must have ended well and silently."""
    group = Children()
    try:
        yield group
    finally:
        problems = group.end()
    if problems and not request.node.stash.get(_failed, False):
        pytest.fail("\n".join(problems))


@pytest.fixture
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was never installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mooncake" else real(name, *rest)
    )


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[Any]:
    """A real Mooncake master that all tests of the session share, each with keys of its own namespace."""
    from support.mooncake_master import require_mooncake, running

    require_mooncake()
    with running("--default_kv_lease_ttl=5000", "--client_ttl=3") as master, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNI_FASTSHM_TEST_MASTER", master.address)
        yield master


@pytest.fixture
def run_thread(_nothing_left_behind: None) -> Iterator[Callable[..., Any]]:
    """A function that runs a callable in a thread and gives a future; all are joined at the end."""
    from support.threads import start

    threads: list[threading.Thread] = []

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future, thread = start(function, *args, **kwargs)
        threads.append(thread)
        return future

    yield run
    for thread in threads:
        with contextlib.suppress(RuntimeError):
            thread.join(20)
    alive = [t.name for t in threads if t.is_alive()]
    threads.clear()
    assert not alive, f"threads that did not end: {alive}"
