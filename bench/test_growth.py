"""What a message costs as numbers grow; see `bench.growth`."""

from __future__ import annotations

import gc
from typing import Any

from bench import growth
from bench.conftest import PLACE


def test_growth(record: dict[str, Any], quick: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        record["growth"] = growth.measure(f"{PLACE}-growth", quick)
    finally:
        gc.enable()
