"""How long calls take, on machines that are busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(least: float, most: float, call: Callable[..., Any], *arguments: Any, tries: int = 5, **options: Any) -> Any:
    """Call, and give the answer of the first call quicker than `most` seconds; none may be quicker than `least`.

    A busy machine only ever adds to what a call takes: one quick call shows that none has to be slow.

    Raises:
        AssertionError: one was quicker than `least`, or none was quicker than `most`.
    """
    took = []
    for _ in range(tries):
        start = time.monotonic()
        answer = call(*arguments, **options)
        took.append(time.monotonic() - start)
        assert took[-1] >= least, took
        if took[-1] < most:
            return answer
    raise AssertionError(f"not once in less than {most} s: {took}")
