"""What docs/metrics.md shows runs, with the real prometheus_client and OpenTelemetry."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.child import environment

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not beside these tests")

PUT = """
import numpy as np
from omni_fastshm import SharedMemoryConnector

with SharedMemoryConnector() as connector:
    metadata = connector.put("thinker", "talker", "17", np.arange(20_000))[2]
    connector.get("thinker", "talker", "17", metadata)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_prometheus(snippets: list[str]) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
    (snippet,) = [each for each in snippets if "start_http_server" in each]
    begun = snippet.replace(
        "prometheus_client.start_http_server(9400)", "server, _ = prometheus_client.start_http_server(0)"
    )
    assert begun != snippet
    look = """
import urllib.request
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=150).read().decode())
server.shutdown()
server.server_close()
"""
    assert re.search(r'omni_fastshm_gets_total\{.*"thinker->talker".*\} 1\.0', run(begun + PUT + look))


def test_an_observer(snippets: list[str]) -> None:
    (snippet,) = [each for each in snippets if "print(transfer.op" in each]
    first, second = run(snippet + PUT).splitlines()
    assert re.fullmatch(r"put thinker talker 17 \d+ \d\S*", first)
    assert re.fullmatch(r"get thinker talker 17 \d+ \d\S*", second)


def test_opentelemetry(snippets: list[str]) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    (snippet,) = [each for each in snippets if "opentelemetry" in each]
    before = """
import omni_fastshm
from opentelemetry import trace as _trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
_trace.set_tracer_provider(provider)
"""
    call = "with tracer.start_as_current_span('request'):\n" + re.sub(r"^(?=.)", "    ", PUT, flags=re.MULTILINE)
    after = """
put, get, request = exporter.get_finished_spans()
assert (put.name, get.name) == ("put thinker->talker", "get thinker->talker")
assert put.parent.span_id == get.parent.span_id == request.context.span_id
assert put.attributes["request.id"] == "17"
assert put.attributes["transfer.bytes"] > 160_000
assert put.attributes["transfer.outcome"] == "ok"
assert 0 < put.end_time - put.start_time < 10**10
assert put.end_time <= get.end_time
print("ok")
"""
    assert run(before + snippet + call + after) == "ok\n"
