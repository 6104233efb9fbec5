"""Fixtures of the tests with several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds a SharedMemoryConnector in this process."""
    from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

    return lambda **settings: connect(SharedMemoryConnector, **settings)
