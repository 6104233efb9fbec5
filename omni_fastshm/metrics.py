"""`health()` for Prometheus: needs the extra ``metrics`` (prometheus_client).

from omni_fastshm import metrics
metrics.register()                                # all connectors of this process, also those built later
prometheus_client.start_http_server(9400)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from omni_fastshm._meter import BUCKETS, Meter
from omni_fastshm.base import OmniConnectorBase
from omni_fastshm.errors import ConfigError
from omni_fastshm.observers import latency, on_close

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["FastShmCollector", "open_connectors", "register"]

_MODULES = ("shared_memory", "in_process", "mooncake")
_PREFIX = "omni_fastshm_"

# Key of `health()["edges"]` -> name of the counter and what it counts, per edge.
EDGE_COUNTERS = {
    "puts": ("puts", "payloads sent"),
    "put_bytes": ("put_bytes", "serialized bytes sent"),
    "refused": ("refused", "puts that found no room"),
    "put_errors": ("put_errors", "puts that raised"),
    "gets": ("gets", "payloads received"),
    "get_bytes": ("get_bytes", "serialized bytes received"),
    "misses": ("misses", "gets that gave None"),
    "get_errors": ("get_errors", "gets that raised"),
}
EDGE_HISTOGRAMS = {
    "put_latency": ("put_seconds", "what a put took, waiting for room included"),
    "get_latency": ("get_seconds", "what a get took, waiting for the payload included"),
}
# Key of `health()` -> the same, per connector.
COUNTERS = {
    "inline_writes": ("inline_writes", "payloads sent inside the metadata"),
    "inline_fallbacks": ("inline_fallbacks", "of these: for want of room"),
    "shm_writes": ("shm_writes", "payloads sent through shared memory"),
    "own_segment_writes": ("own_segment_writes", "of these: larger than segment_bytes"),
    "store_writes": ("store_writes", "payloads sent through Mooncake's store"),
    "blocked_s": ("blocked_seconds", "time that puts waited for room"),
    "dropped": ("dropped", "payloads that nobody had taken when the connector closed"),
}
NO_ROOM = "no_room"
"""Key of `health()` with a number for each reason."""
GAUGES = {
    "live_blocks": ("live_blocks", "payloads that wait or are looked at"),
    "leases": ("leases", "received payloads that views of this process keep"),
    "used_bytes": ("used_bytes", "in use"),
    "capacity_bytes": ("capacity_bytes", "of all segments, or the limit"),
    "pinned_bytes": ("pinned_bytes", "page-locked for a GPU"),
}
PEAKS = {  # of several connectors the largest counts, not the sum
    "high_water_bytes": ("high_water_bytes", "the most that was in use at a time"),
    "oldest_lease_s": ("oldest_lease_seconds", "age of the oldest lease of this process"),
}

_Labels = tuple[str, ...]


class _Totals:
    """Figures by labels; counters of connectors that are gone stay in."""

    def __init__(self) -> None:
        self.counters: defaultdict[tuple[str, _Labels], float] = defaultdict(float)
        self.histograms: dict[tuple[str, _Labels], dict[str, Any]] = {}

    def add(self, health: dict[str, Any]) -> None:
        labels: _Labels = (health["namespace"], health["connector"])
        for key in COUNTERS:
            self.counters[key, labels] += health.get(key, 0)
        for reason, number in health["no_room"].items():
            self.counters[NO_ROOM, (*labels, reason)] += number
        for edge in health["edges"]:
            at = (*labels, f"{edge['from_stage']}->{edge['to_stage']}")
            for key in EDGE_COUNTERS:
                self.counters[key, at] += edge[key]
            for key in EDGE_HISTOGRAMS:
                known = self.histograms.get((key, at))
                self.histograms[key, at] = latency([edge[key]] if known is None else [known, edge[key]])

    def merge(self, other: _Totals) -> None:
        for key, value in other.counters.items():
            self.counters[key] += value
        for at, figures in other.histograms.items():
            self.histograms[at] = latency([figures, self.histograms[at]] if at in self.histograms else [figures])


def open_connectors() -> list[OmniConnectorBase]:
    """All connectors of this process that have not been closed."""
    found: list[OmniConnectorBase] = []
    for name in _MODULES:
        module = sys.modules.get(f"omni_fastshm.connectors.{name}")
        found += list(getattr(module, "_open", ()))
    return found


class FastShmCollector:
    """Gives the figures of connectors whenever Prometheus asks.

    Each look calls `health()`, which for MooncakeConnector asks its master. What a connector did stays counted after it
    is closed.

    Args:
        connectors: which; None for all of this process, also those that are built later. They are not kept alive.
    """

    def __init__(self, connectors: Iterable[OmniConnectorBase] | None = None) -> None:
        self._given = None if connectors is None else weakref.WeakSet(connectors)
        self._lock = threading.Lock()
        self._seen: dict[Meter, dict[str, Any]] = {}  # last figures of those that have not said that they closed
        self._closed: deque[tuple[Meter, dict[str, Any]]] = deque()  # closed since the last look
        self._counted: weakref.WeakSet[Meter] = weakref.WeakSet()
        self._gone = _Totals()
        on_close(self._note_closed)

    def _note_closed(self, connector: Any, meter: Meter, health: dict[str, Any]) -> None:
        # No lock: the garbage collector may close a connector anywhere, also in the middle of a look.
        if self._given is None or connector in self._given:
            self._closed.append((meter, health))

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls: one family per metric, also those without a value yet."""
        totals, states = self._look()
        yield from _families(totals, states)

    def describe(self) -> Iterator[Metric]:
        """The families without values, so that registering looks at no connector."""
        yield from _families(_Totals(), [])

    def _look(self) -> tuple[_Totals, list[dict[str, Any]]]:
        with self._lock:
            wanted: list[Any] = open_connectors() if self._given is None else list(self._given)
            fresh = {each._meter: each.health() for each in wanted}
            self._seen.update(fresh)
            while self._closed:
                meter, health = self._closed.popleft()
                if meter not in self._counted:
                    self._counted.add(meter)
                    self._gone.add(health)
            for meter in [each for each in self._seen if each in self._counted]:
                del self._seen[meter]
            totals = _Totals()
            totals.merge(self._gone)
            for health in self._seen.values():
                totals.add(health)
            return totals, [health for meter, health in fresh.items() if meter not in self._counted]


def _families(totals: _Totals, states: list[dict[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    per_connector = ["namespace", "connector"]
    for table, labels in ((COUNTERS, per_connector), (EDGE_COUNTERS, [*per_connector, "edge"])):
        for key, (name, text) in table.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for (which, at), number in totals.counters.items():
                if which == key:
                    counter.add_metric(at, number)
            yield counter
    counter = CounterMetricFamily(
        _PREFIX + NO_ROOM, "payloads that found no room, by reason", labels=[*per_connector, "reason"]
    )
    for (which, at), number in totals.counters.items():
        if which == NO_ROOM:
            counter.add_metric(at, number)
    yield counter
    for key, (name, text) in EDGE_HISTOGRAMS.items():
        histogram = HistogramMetricFamily(_PREFIX + name, text, labels=[*per_connector, "edge"])
        for (which, at), figures in totals.histograms.items():
            if which == key:
                histogram.add_metric(at, _buckets(figures), figures["seconds"])
        yield histogram
    for table, several in ((GAUGES, sum), (PEAKS, max)):
        for key, (name, text) in table.items():
            values: defaultdict[_Labels, list[float]] = defaultdict(list)
            for health in states:
                # InProcessConnector without a limit says sys.maxsize, which nobody wants in a sum.
                value = health[key] if health[key] != sys.maxsize else float("inf")
                values[health["namespace"], health["connector"]].append(value)
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=per_connector)
            for at, each in values.items():
                gauge.add_metric(at, several(each))
            yield gauge
    up = GaugeMetricFamily(_PREFIX + "up", "connectors, by status", labels=[*per_connector, "status"])
    count: defaultdict[_Labels, int] = defaultdict(int)
    for health in states:
        count[health["namespace"], health["connector"], health["status"]] += 1
    for at, number in count.items():
        up.add_metric(at, number)
    yield up


def _buckets(figures: dict[str, Any]) -> list[tuple[str, float]]:
    """Cumulative, by upper bound in seconds, as Prometheus wants them."""
    found, total = [], 0
    for index, count in enumerate(figures["buckets"]):
        total += count
        found.append(("+Inf" if index == BUCKETS - 1 else repr(2**index / 1e6), total))
    return found


def register(*connectors: OmniConnectorBase, registry: CollectorRegistry | None = None) -> FastShmCollector:
    """Let Prometheus see connectors of this process.

    Args:
        connectors: which; none means all, also those that are built later.
        registry: of prometheus_client; None takes its default one.

    Returns:
        The collector, for ``registry.unregister``.

    Raises:
        ConfigError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise ConfigError(
            "metrics: prometheus_client is not installed; pip install 'omni-fastshm[metrics]' brings it", op="metrics"
        ) from None
    collector = FastShmCollector(connectors or None)
    (REGISTRY if registry is None else registry).register(collector)
    return collector
