"""To wait for what another thread or process does by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60.0  # no machine needs so long; a test's own time limit may be shorter


def until(condition: Callable[[], object], pause_s: float = 0.001) -> None:
    """Look again and again until `condition` is true; fails when it never becomes so."""
    assert within(LIMIT_S, condition, pause_s), "it never came true"


def within(seconds: float, condition: Callable[[], object], pause_s: float = 0.001) -> bool:
    """Whether `condition` becomes true in this time; looks at least once."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True
