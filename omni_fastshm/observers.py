"""Hooks around every put and get of this process, and what meters say in `health()`."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from omni_fastshm._meter import BUCKETS, Meter, listen

__all__ = ["Transfer", "add_observer", "remove_observer"]

logger = logging.getLogger("omni_fastshm")


class Transfer(NamedTuple):
    """One put or get that has just ended.

    Args:
        op: "put" or "get".
        outcome: "ok"; "refused" (a put found no room); "none" (a get had nothing to give); "error" (it raised).
        connector: the connector's class, by name.
        namespace: the connector's.
        from_stage: the edge's start.
        to_stage: its end.
        request_id: the request.
        size: serialized size in bytes; 0 unless the outcome is "ok".
        seconds: what the call took, waiting for room or for the payload included.
    """

    op: str
    outcome: str
    connector: str
    namespace: str
    from_stage: str
    to_stage: str
    request_id: str
    size: int
    seconds: float


Observer = Callable[[Transfer], object]
_Observer = TypeVar("_Observer", bound=Observer)

_observers: tuple[Observer, ...] = ()
_lock = threading.Lock()


def add_observer(observer: _Observer) -> _Observer:
    """Call `observer` after every put and get of this process, in the thread that made it.

    What it raises is logged and goes no further. While there is no observer, puts and gets pay nothing for the hook.

    Args:
        observer: takes a `Transfer`.

    Returns:
        The same, so that this can stand above a function as a decorator.
    """
    _change(lambda: (*_observers, observer))
    return observer


def remove_observer(observer: Observer) -> None:
    """Undo `add_observer`; one that is not there is fine."""
    _change(lambda: tuple(each for each in _observers if each != observer))


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # the old one may have been held by a thread that does not exist in the child


os.register_at_fork(after_in_child=_new_lock)


def _change(make: Callable[[], tuple[Observer, ...]]) -> None:
    global _observers
    with _lock:
        _observers = make()
        listen(_tell if _observers else None)


def _tell(meter: Meter, op: str, edge: tuple[str, str], request: str, size: int, ns: int, outcome: str) -> None:
    transfer = Transfer(op, outcome, meter.connector, meter.namespace, *edge, request, size, ns / 1e9)
    for observer in _observers:
        try:
            observer(transfer)
        except Exception:
            logger.exception("an observer failed at %s of request %r on %s->%s", op, request, *edge)


_closing: list[weakref.WeakMethod[Callable[[Any, Meter, dict[str, Any]], None]]] = []


def on_close(method: Callable[[Any, Meter, dict[str, Any]], None]) -> None:
    """Call a bound method, while its object lives, with each connector that closes, its meter and its `health()`."""
    with _lock:
        _closing[:] = [each for each in _closing if each() is not None]
        _closing.append(weakref.WeakMethod(method))


def tell_closed(connector: Any, meter: Meter, health: dict[str, Any]) -> None:
    """A connector has closed, and this is what it did."""
    for each in list(_closing):
        method = each()
        if method is not None:
            method(connector, meter, health)


def log_fields(edge: Iterable[str], request: str, size: int) -> dict[str, Any]:
    """The `extra` of a log record about one payload: `request_id`, `edge`, `bytes`."""
    return {"request_id": request, "edge": "->".join(edge), "bytes": size}


def latency(sides: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Calls of several edges together: how many, how long in all, and a histogram."""
    count, seconds, buckets = 0, 0.0, [0] * BUCKETS
    for side in sides:
        count += side["count"]
        seconds += side["seconds"]
        buckets = [a + b for a, b in zip(buckets, side["buckets"], strict=True)]
    return {"count": count, "seconds": seconds, "buckets": buckets}


def edge_figures(meter: Meter) -> list[dict[str, Any]]:
    """`health()["edges"]`: a row per edge that was used."""
    rows = []
    for start, end, put, get in sorted(meter.edges(), key=lambda edge: edge[:2]):
        rows.append(
            {
                "from_stage": start,
                "to_stage": end,
                "puts": put["count"],
                "put_bytes": put["bytes"],
                "refused": put["none"],
                "put_errors": put["errors"],
                "put_latency": latency([put]),
                "gets": get["count"],
                "get_bytes": get["bytes"],
                "misses": get["none"],
                "get_errors": get["errors"],
                "get_latency": latency([get]),
            }
        )
    return rows


def meter_figures(meter: Meter) -> dict[str, Any]:
    """What every connector's `health()` says of its puts and gets."""
    edges = edge_figures(meter)
    return {
        "puts": meter.puts,
        "gets": meter.gets,
        "bytes_transferred": meter.bytes,
        "errors": meter.errors,
        "misses": meter.misses,
        "put_latency": latency(edge["put_latency"] for edge in edges),
        "get_latency": latency(edge["get_latency"] for edge in edges),
        "edges": edges,
    }


def quantile_s(figures: dict[str, Any], share: float) -> float | None:
    """An upper bound, in seconds, of what `share` of the calls took; None without calls.

    Args:
        figures: a latency of `health()`.
        share: 0 to 1, such as 0.99.

    Returns:
        The end of the bucket in which that call lies: at most twice what it took, from 1 µs on; `inf` for the last one.
    """
    wanted, seen = share * figures["count"], 0
    for index, count in enumerate(figures["buckets"]):
        seen += count
        if count and seen >= wanted:
            return float("inf") if index == BUCKETS - 1 else 2**index / 1e6
    return None
