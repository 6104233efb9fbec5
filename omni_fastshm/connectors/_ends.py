"""How connectors end: with their process, in a forked child, and what `close` says of what nobody took."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Dropped", "Open", "tell_dropped"]

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


class Dropped(NamedTuple):
    """Payloads that `close` drops.

    Args:
        edge: ``thinker->talker``.
        payloads: how many.
        bytes: of all of them.
        request: whose, where one is known.
    """

    edge: str
    payloads: int
    bytes: int
    request: str | None = None


def tell_dropped(connector: str, namespace: str, dropped: int, what: Iterable[Dropped], linger_s: float) -> None:
    """Log that `close` dropped payloads; nothing where there were none.

    Args:
        connector: the name of its class.
        namespace: its namespace.
        dropped: how many payloads.
        what: the same in detail, as far as it is known.
        linger_s: how long `close` has waited for takers.
    """
    if not dropped:
        return
    edges: dict[str, int] = {}
    requests, size = [], 0
    for each in what:
        edges[each.edge] = edges.get(each.edge, 0) + each.payloads
        size += each.bytes
        if each.request is not None:
            requests.append(repr(each.request))
    most = sorted(edges.items(), key=lambda pair: -pair[1])
    details = [connector, f"namespace {namespace}"]
    details += [f"{size} bytes", _some("edge", [f"{edge}: {number}" for edge, number in most])] if edges else []
    details += [_some("request", requests)] if requests else []
    _log.warning(
        "closed with %s that nobody had taken: dropped (%s). %s",
        "1 payload" if dropped == 1 else f"{dropped} payloads",
        "; ".join(details),
        _LATE if linger_s else _EARLY,
        extra={"bytes": size, "edge": most[0][0]} if len(most) == 1 else {"bytes": size},
    )


_EARLY = (
    "Close after the last get, or set linger_s, which makes close wait for takers; what nobody is to take goes with "
    "cleanup(request_id)"
)
_LATE = (
    "No taker came within linger_s: receivers are slower than that, or have ended; a longer one gives them more time"
)
_SHOWN = 3


def _some(what: str, texts: Sequence[str]) -> str:
    """A few of them, and how many more."""
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    shown = ", ".join(f"{text:.80}" for text in texts[:_SHOWN])
    return f"{what}{'' if len(texts) == 1 else 's'} {shown}{more}"
