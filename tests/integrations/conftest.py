"""Connectors under the contract of vllm-omni: our own class everywhere, and where vllm-omni is installed (`make
test-vllm-omni`) the one that derives from its: of the generation that is installed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.child import Children

from omni_fastshm.integrations._vllm_host import find_host, is_installed
from omni_fastshm.integrations.vllm_omni import connector_class, restore_default

IMPORT_S = 300


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """vllm-omni is loaded before anything is looked at: its import starts threads and compilers."""
    if is_installed():
        find_host()
        deadline = time.monotonic() + IMPORT_S
        for thread in threading.enumerate():
            if "build" in thread.name or not (thread.daemon or thread is threading.current_thread()):
                thread.join(max(0.0, deadline - time.monotonic()))
        gc.collect()
        gc.freeze()  # or every test would look at all of it, twice


class Stages(Children):
    """Interpreters that load the host: it takes them long to end, and they write to stderr."""

    def end(self) -> list[str]:
        for child in self._all:
            child.stop(200)
        super().end()
        return []


@pytest.fixture
def quiet_children(_nothing_left_behind: None) -> Iterator[Children]:
    """Fresh interpreters whose stderr is not looked at."""
    group = Stages()
    yield group
    group.end()


@pytest.fixture
def _default_restored() -> Iterator[None]:
    yield
    restore_default()


def kinds(*, keyed: bool) -> list[str]:
    """Which classes of a generation there are to test."""
    host = find_host()
    return ["own", "derived"] if host is not None and host.keyed is keyed else ["own"]


@pytest.fixture(params=kinds(keyed=True))
def host(request: pytest.FixtureRequest) -> Any:
    """What the class derives from; None for a class of our own."""
    return find_host() if request.param == "derived" else None


@pytest.fixture
def make(connect: Callable[..., Any], host: Any) -> Callable[..., Any]:
    """A function that makes a connector of the generation since 0.30."""
    return lambda **config: connect(connector_class("FastSharedMemoryConnector", keyed=True, host=host), **config)


@pytest.fixture(params=kinds(keyed=False))
def told_host(request: pytest.FixtureRequest) -> Any:
    """As `host`, of the generation of December 2025."""
    return find_host() if request.param == "derived" else None


@pytest.fixture
def make_told(connect: Callable[..., Any], told_host: Any) -> Callable[..., Any]:
    """A function that makes a connector of the generation of December 2025."""
    return lambda **config: connect(connector_class("FastSharedMemoryConnector", keyed=False, host=told_host), **config)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that gives what was logged at WARNING and above, apart from what a close says of untaken payloads."""
    return lambda: [
        line
        for record in caplog.records
        if record.levelno >= 30 and not (line := record.getMessage()).startswith("closed with ")
    ]
