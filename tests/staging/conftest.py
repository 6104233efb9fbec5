"""Devices of Python's own, and what must be true when a test with them is over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.fake_device import FakeDevices
from support.waiting import until

from omni_fastshm import _staging_parked
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.staging import devices, parked, pins


@pytest.fixture
def fake(_nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevices]:
    """The devices; at the end nothing is registered, enqueued or parked, and the driver has seen nothing wrong."""
    monkeypatch.setattr(_staging_parked, "_IDLE_S", 0.02)
    monkeypatch.setattr(pins, "_warned", False)
    runtime = FakeDevices()
    devices.use(runtime)
    yield runtime
    runtime.run_all()
    parked.poll()
    gc.collect()
    # All of it together: another thread may be in the middle of the last one.
    until(lambda: (len(runtime.registered), runtime.registrations - runtime.unregistrations, pins.total) == (0, 0, 0))
    devices.drop("meta")
    assert not runtime.violations
    assert not len(parked)


@pytest.fixture
def make(fake: FakeDevices, connect: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Builds SharedMemoryConnectors; what they began is over before these are looked at and closed."""
    # Of a size that has all its memory from the start.
    yield lambda **settings: connect(SharedMemoryConnector, **{"segment_bytes": 4 << 20, **settings})
    fake.run_all()
    parked.poll()
    until(lambda: not len(parked))
