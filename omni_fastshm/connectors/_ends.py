"""How connectors end: with their process, in a forked child, and what `close` says of what nobody took."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Open", "tell_dropped"]

_log = logging.getLogger("omni_fastshm")


class Open:
    """The open connectors of one kind, in this process.

    Args:
        disown: called in a forked child for each: what was inherited must neither work nor tidy up.
    """

    def __init__(self, disown: Callable[[Any], None]) -> None:
        self._connectors: weakref.WeakSet[Any] = weakref.WeakSet()
        self._disown = disown
        self._registered = False
        os.register_at_fork(after_in_child=self._forked)

    def add(self, connector: Any) -> None:
        """From here on `connector` is closed with a process that ends in good order, however it ends."""
        self._connectors.add(connector)
        if self._registered:
            return
        self._registered = True
        atexit.register(self._close_all)
        if "multiprocessing" in sys.modules:
            # Its forked children end without the interpreter's exit handlers, but run these.
            from multiprocessing.util import Finalize

            Finalize(None, self._close_all, exitpriority=10)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._connectors))

    def discard(self, connector: Any) -> None:
        """It is closed."""
        self._connectors.discard(connector)

    def _close_all(self) -> None:
        for connector in list(self._connectors):
            connector.close()

    def _forked(self) -> None:
        self._registered = False
        for connector in list(self._connectors):
            self._disown(connector)
            self._connectors.discard(connector)


def tell_dropped(dropped: int, namespace: str) -> None:
    """Log that `close` dropped so many payloads; nothing where there were none."""
    if dropped:
        payloads = "1 payload" if dropped == 1 else f"{dropped} payloads"
        _log.warning("closed with %s that nobody had taken: dropped (namespace %s)", payloads, namespace)
