"""Calls in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def start(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Future[Any], threading.Thread]:
    """Call `function` in a thread; the future carries its result or exception."""
    future: Future[Any] = Future()

    def body() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return future, thread
