"""Connectors under the contract of vllm-omni: our own class everywhere, and where vllm-omni is installed (`make
test-vllm-omni`) the one that derives from its."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omni_fastshm.integrations._vllm_host import find_host, is_installed
from omni_fastshm.integrations.vllm_omni import connector_class

KINDS = ["own", "derived"] if is_installed() else ["own"]


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest) -> Any:
    """What the class derives from; None for a class of our own."""
    return find_host() if request.param == "derived" else None


@pytest.fixture
def make(connect: Callable[..., Any], host: Any) -> Callable[..., Any]:
    """A function that makes a connector of the generation since 0.30."""
    return lambda **config: connect(connector_class("FastSharedMemoryConnector", keyed=True, host=host), **config)


@pytest.fixture
def make_told(connect: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a connector of the generation of December 2025; that one is never installed here."""
    return lambda **config: connect(connector_class("FastSharedMemoryConnector", keyed=False), **config)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """A function that gives what was logged at WARNING and above."""
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= 30]
