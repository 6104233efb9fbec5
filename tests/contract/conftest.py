"""Fixtures of the contract."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counting frees objects during the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was raised where nothing can be raised, as in ``__del__``."""
    caught: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", caught.append)
    return caught
