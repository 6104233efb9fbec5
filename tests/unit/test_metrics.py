"""`omni_fastshm.metrics`: what Prometheus sees is what happened; the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_fastshm import InProcessConnector, SharedMemoryConnector
from omni_fastshm.errors import ConfigError

prometheus = pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
DASHBOARD = Path(__file__).parents[2] / "contrib" / "grafana" / "omni_fastshm.json"


def scrape(registry: Any) -> dict[str, float]:
    """Samples by name and label values, these in the order of the labels' names."""
    text = prometheus.generate_latest(registry).decode()
    from prometheus_client.parser import text_string_to_metric_families

    return {
        " ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_and_times_of_each_edge(connect: Any, namespace: str) -> None:
    from omni_fastshm import metrics

    registry = prometheus.CollectorRegistry()
    connector = connect(SharedMemoryConnector, namespace=namespace)
    metrics.register(connector, registry=registry)
    for request in range(3):
        size, metadata = connector.put("a", "b", request, np.arange(20_000))[1:]
        connector.get("a", "b", request, metadata)
    assert connector.get("a", "b", 2, metadata) is None
    connector.put("a", "c", 1, "small")
    with pytest.raises(TypeError):
        connector.put("a", "c", 2, object())
    found = scrape(registry)
    whole = f"SharedMemoryConnector {namespace}"
    ab, ac = f"SharedMemoryConnector a->b {namespace}", f"SharedMemoryConnector a->c {namespace}"
    assert found[f"omni_fastshm_puts_total {ab}"] == found[f"omni_fastshm_gets_total {ab}"] == 3
    assert found[f"omni_fastshm_put_bytes_total {ab}"] == found[f"omni_fastshm_get_bytes_total {ab}"] == 3 * size
    assert found[f"omni_fastshm_misses_total {ab}"] == 1
    assert found[f"omni_fastshm_put_errors_total {ac}"] == 1
    assert found[f"omni_fastshm_inline_writes_total {whole}"] == 1
    assert found[f"omni_fastshm_shm_writes_total {whole}"] == 3
    assert found[f"omni_fastshm_used_bytes {whole}"] <= found[f"omni_fastshm_high_water_bytes {whole}"]
    assert found[f"omni_fastshm_put_seconds_count {ab}"] == 3
    assert found[f"omni_fastshm_put_seconds_bucket SharedMemoryConnector a->b +Inf {namespace}"] == 3
    assert 0 < found[f"omni_fastshm_put_seconds_sum {ab}"] < 30
    keys = [key for key in found if "get_seconds_bucket SharedMemoryConnector a->b" in key]
    steps = [found[key] for key in sorted(keys, key=lambda key: float(key.split()[3]))]
    assert (len(steps), steps[-1]) == (26, 3)  # how many took less than 1 µs is the machine's to say: a warm get does
    assert steps == sorted(steps), "buckets are cumulative"
    assert found[f"omni_fastshm_up SharedMemoryConnector {namespace} ok"] == 1


def test_all_connectors_of_the_process_and_what_closed_ones_did(connect: Any, namespace: str) -> None:
    from omni_fastshm import metrics

    registry = prometheus.CollectorRegistry()
    metrics.register(registry=registry)
    first, second = connect(SharedMemoryConnector), connect(SharedMemoryConnector)
    third = connect(InProcessConnector)
    for connector in (first, second, third):
        connector.put("a", "b", "r", np.arange(20_000))
    key = f"omni_fastshm_puts_total SharedMemoryConnector a->b {namespace}"
    assert scrape(registry)[key] == 2
    assert scrape(registry)[f"omni_fastshm_puts_total InProcessConnector a->b {namespace}"] == 1
    assert scrape(registry)[f"omni_fastshm_capacity_bytes InProcessConnector {namespace}"] == float("inf")
    second.put("a", "b", "q", np.arange(20_000))  # between the last look and the end
    second.close()
    with SharedMemoryConnector() as short:  # lives between two looks
        short.put("a", "b", "q", np.arange(20_000))
    assert scrape(registry)[key] == 4
    del short
    assert scrape(registry)[key] == 4
    assert scrape(registry)[f"omni_fastshm_live_blocks SharedMemoryConnector {namespace}"] == 1


def test_what_found_no_room_by_reason(connect: Any, namespace: str) -> None:
    from omni_fastshm import metrics

    registry = prometheus.CollectorRegistry()
    connectors = [connect(SharedMemoryConnector, max_bytes=1 << 20, put_timeout_s=0) for _ in range(2)]
    metrics.register(*connectors, registry=registry)
    for connector in connectors:
        assert connector.put("a", "b", "kept", np.zeros(900_000, np.uint8))[0]
        assert not connector.put("a", "b", "full", np.zeros(900_000, np.uint8))[0]
    connectors[0].put("a", "b", "large", np.zeros(2_000_000, np.uint8))
    connectors[0].close()
    found = scrape(registry)
    assert found[f"omni_fastshm_no_room_total SharedMemoryConnector {namespace} full"] == 2
    assert found[f"omni_fastshm_no_room_total SharedMemoryConnector {namespace} too_large"] == 1


def test_over_http(connect: Any, namespace: str) -> None:
    from omni_fastshm import metrics

    registry = prometheus.CollectorRegistry()
    connector = connect(SharedMemoryConnector)
    metrics.register(connector, registry=registry)
    connector.put("thinker", "talker", "r", np.arange(20_000))
    server, thread = prometheus.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert re.search(r'^omni_fastshm_puts_total\{.*edge="thinker->talker".*\} 1\.0$', text, re.MULTILINE)


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_fastshm import metrics

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'omni-fastshm\[metrics\]'"):
        metrics.register()


@pytest.mark.skipif(not DASHBOARD.exists(), reason="the dashboard is not beside these tests")
def test_the_dashboard_asks_for_what_there_is(connect: Any) -> None:
    from omni_fastshm import metrics

    registry = prometheus.CollectorRegistry()
    connector = connect(SharedMemoryConnector, max_bytes=1 << 20, put_timeout_s=0)
    metrics.register(connector, registry=registry)
    connector.get("a", "b", "r", connector.put("a", "b", "r", 1)[2])
    assert connector.put("a", "b", "r", np.arange(1 << 20)) == (False, 0, None)
    there = {key.split()[0] for key in scrape(registry)}
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"omni_fastshm_\w+", target["expr"])
    }
    assert asked <= there, asked - there
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    given = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there if not name.endswith("_created")}
    assert given - shown == set(), "a metric that no panel shows"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
