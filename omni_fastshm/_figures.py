"""Times and sizes of what crossed an edge, collected on both sides and put together by the pipeline."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EdgeFigures", "EdgeSummary", "Spread", "way_of"]

_KEPT = 10_000


def way_of(metadata: Any) -> str:
    """How a payload travelled, by its metadata: "inline", "ring", "store", or "other" (a reference)."""
    if isinstance(metadata, Mapping):
        if "inline_bytes" in metadata:
            return "inline"
        if "shm" in metadata:
            return "ring"
        if "mooncake" in metadata:
            return "store"
    return "other"


class EdgeFigures:
    """One side of an edge: the sending process times `put`, the receiving one `get`.

    The first call is kept apart from the others, for it also makes or maps the shared memory. Only the newest
    10,000 times are kept, so that a pipeline that runs for weeks does not grow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._micros: deque[float] = deque(maxlen=_KEPT)
        self._sizes: deque[int] = deque(maxlen=_KEPT)
        self._ways: Counter[str] = Counter()
        self._count = 0
        self._bytes = 0
        self._first: float | None = None

    def add(self, size_bytes: int, micros: float, way: str = "") -> None:
        """Count one payload.

        Args:
            size_bytes: its serialized size.
            micros: what the call took, in microseconds.
            way: the result of `way_of` where the metadata is known.
        """
        with self._lock:
            if self._first is None:
                self._first = micros
            else:
                self._micros.append(micros)
            self._sizes.append(size_bytes)
            self._count += 1
            self._bytes += size_bytes
            if way:
                self._ways[way] += 1

    def snapshot(self) -> dict[str, Any]:
        """Plain data that can cross a pipe."""
        with self._lock:
            return {
                "count": self._count,
                "bytes": self._bytes,
                "sizes": list(self._sizes),
                "first": self._first,
                "micros": list(self._micros),
                "ways": dict(self._ways),
            }


@dataclass(frozen=True)
class Spread:
    """Median, 99th percentile and maximum of some times in microseconds; None where nothing was measured."""

    median: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of `values`, by nearest rank: every figure is one that was measured."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(_rank(ordered, 50), _rank(ordered, 99), ordered[-1])


def _rank(ordered: list[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


@dataclass(frozen=True)
class EdgeSummary:
    """What crossed one edge so far.

    Args:
        from_stage: the sending stage.
        to_stage: the receiving stage.
        connector: the backend's name.
        payloads: how many were sent.
        total_bytes: their serialized sizes together.
        payload_bytes: the median size.
        ways: how many went "inline", by the "ring", by a "store", or another way ("other").
        put_us: time of `put` in the sending process, without the first.
        get_us: time of `get` in the receiving process, until the tensors can be used, without the first.
        first_put_us: time of the first `put`, which also makes the shared memory and reserves its pages.
        first_get_us: time of the first `get`, which also maps it.
    """

    from_stage: str
    to_stage: str
    connector: str
    payloads: int = 0
    total_bytes: int = 0
    payload_bytes: int | None = None
    ways: dict[str, int] = field(default_factory=dict)
    put_us: Spread = Spread()
    get_us: Spread = Spread()
    first_put_us: float | None = None
    first_get_us: float | None = None

    @property
    def gb_per_s(self) -> float | None:
        """Median payload over median put plus median get, in 10^9 bytes a second."""
        if not self.payload_bytes or self.put_us.median is None or self.get_us.median is None:
            return None
        return self.payload_bytes / (self.put_us.median + self.get_us.median) / 1e3

    @classmethod
    def of(
        cls,
        edge: tuple[str, str],
        connector: str,
        put: Mapping[str, Any] | None,
        get: Mapping[str, Any] | None,
    ) -> EdgeSummary:
        """Join both sides' snapshots; None for a side that nothing is known of (its process died)."""
        put, get = put or {}, get or {}
        main = put or get
        sizes = sorted(main.get("sizes", ()))
        return cls(
            edge[0],
            edge[1],
            connector,
            payloads=main.get("count", 0),
            total_bytes=main.get("bytes", 0),
            payload_bytes=int(_rank(sizes, 50)) if sizes else None,
            ways=dict(put.get("ways", {})),
            put_us=Spread.of(put.get("micros", ())),
            get_us=Spread.of(get.get("micros", ())),
            first_put_us=put.get("first"),
            first_get_us=get.get("first"),
        )
