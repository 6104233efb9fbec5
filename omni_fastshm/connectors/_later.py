"""Sending from a helper thread: what `put(wait=False)` was given, in the order of the calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from omni_fastshm.staging import Begun

__all__ = ["Later"]


class Later:
    """The one helper thread of a connector; started by the first payload for it."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.order = threading.RLock()  # for who takes room and then submits: no other one submits between
        self._roomless = 0

    @property
    def next_is_next(self) -> bool:
        """Has everything that waits to be sent its room already?

        If not, a payload that comes now must not take room before those that came first: they might wait for it, and
        it is given back only when their turn is over.
        """
        return not self._roomless

    def submit(self, send: Callable[..., Any], begun: Begun | None) -> Future[Any]:
        """Call ``send(begun=begun)`` after all that was submitted before. To be called under the connector's lock.

        Returns:
            The future of its result. When it is cancelled, what was begun is given up.
        """
        if self._executor is None:
            self._executor = _started()
        if begun is None or begun.room is None:
            with self._lock:
                self._roomless += 1
            roomless = 1
        else:
            roomless = 0
        try:
            future: Future[Any] = self._executor.submit(send, begun=begun)
        except BaseException:
            with self._lock:
                self._roomless -= roomless
            raise

        def done(future: Future[Any]) -> None:
            with self._lock:
                self._roomless -= roomless
            if begun is not None and future.cancelled():
                begun.close()

        future.add_done_callback(done)
        return future

    def stop(self) -> None:
        """Cancel what has not begun; the rest ends by itself."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _started() -> ThreadPoolExecutor:
    """With its thread: where none can be had, what was submitted would wait in the queue for one, and be sent later."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="omni-fastshm-put")
    executor.submit(int)
    return executor
