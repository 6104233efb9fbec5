"""Meters, observers, log fields and the lease trace: what a running pipeline says about itself."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.child import Children, environment

import omni_fastshm
from omni_fastshm import InProcessConnector, SharedMemoryConnector, Transfer
from omni_fastshm._meter import BUCKETS, Meter, listen
from omni_fastshm.errors import ConfigError
from omni_fastshm.lease_trace import VARIABLE
from omni_fastshm.observers import latency, quantile_s

BIG = np.arange(20_000)
Connect = Callable[..., Any]


@pytest.fixture
def heard() -> Iterator[list[Transfer]]:
    found: list[Transfer] = []
    omni_fastshm.add_observer(found.append)
    yield found
    omni_fastshm.remove_observer(found.append)


@pytest.mark.parametrize("cls", [SharedMemoryConnector, InProcessConnector])
def test_an_observer_hears_of_every_put_and_get(connect: Connect, namespace: str, heard: list[Any], cls: Any) -> None:
    connector = connect(cls, max_bytes=400_000, put_timeout_s=0)
    _, size, metadata = connector.put("a", "b", "r", BIG)
    connector.get("a", "b", "r", metadata)
    connector.get("a", "b", "r", metadata)
    assert connector.put("a", 7, "q", np.zeros(100_000))[0] is False
    with pytest.raises(omni_fastshm.MetadataError):
        connector.get("a", "b", 5, metadata)
    assert [each[:8] for each in heard] == [
        ("put", "ok", cls.__name__, namespace, "a", "b", "r", size),
        ("get", "ok", cls.__name__, namespace, "a", "b", "r", size),
        ("get", "none", cls.__name__, namespace, "a", "b", "r", 0),
        ("put", "refused", cls.__name__, namespace, "a", "7", "q", 0),
        ("get", "error", cls.__name__, namespace, "a", "b", "5", 0),
    ]
    assert all(0 < each.seconds < 10 for each in heard)


def test_what_cannot_be_carried_and_what_nobody_hears(connect: Connect, heard: list[Any]) -> None:
    connector = connect(SharedMemoryConnector)
    with pytest.raises(omni_fastshm.CodecError):
        connector.put("a", "b", "r", object())
    assert [each[:2] for each in heard] == [("put", "error")]
    omni_fastshm.remove_observer(heard.append)
    omni_fastshm.remove_observer(print)
    connector.put("a", "b", "r", 1)
    assert len(heard) == 1
    assert connector.health()["errors"] == 1


def test_what_an_observer_raises_stays_with_it(
    connect: Connect, heard: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @omni_fastshm.add_observer
    def broken(transfer: Transfer) -> None:
        raise RuntimeError("of the observer")

    try:
        connector = connect(SharedMemoryConnector)
        assert connector.put("a", "b", "r", BIG)[0] is True
    finally:
        omni_fastshm.remove_observer(broken)
    assert "an observer failed at put of request 'r' on a->b" in caplog.text
    assert len(heard) == 1, "the others hear of it all the same"


@pytest.mark.parametrize("cls", [SharedMemoryConnector, InProcessConnector])
def test_health_has_each_edge(connect: Connect, cls: Any) -> None:
    connector = connect(cls)
    for request in range(5):
        size, metadata = connector.put("a", "b", request, BIG)[1:]
        connector.get("a", "b", request, metadata)
    connector.put("a", "c", "x", BIG)
    health = connector.health()
    ab, ac = health["edges"]
    assert (ab["from_stage"], ab["to_stage"], ab["puts"], ab["gets"]) == ("a", "b", 5, 5)
    assert (ab["put_bytes"], ab["get_bytes"], ac["put_bytes"]) == (5 * size, 5 * size, size)
    assert (ac["to_stage"], ac["puts"], ac["gets"], ac["misses"]) == ("c", 1, 0, 0)
    assert health["put_latency"]["count"] == sum(health["put_latency"]["buckets"]) == 6
    assert health["get_latency"]["count"] == 5
    assert 0 < health["put_latency"]["seconds"] < 10
    assert (health["puts"], health["gets"], health["bytes_transferred"]) == (6, 5, 11 * size)


def test_high_water_and_own_segments(connect: Connect) -> None:
    connector = connect(SharedMemoryConnector, segment_bytes=1 << 20)
    views = [connector.get("a", "b", i, connector.put("a", "b", i, BIG)[2]) for i in range(4)]
    full = connector.health()
    assert full["high_water_bytes"] == full["used_bytes"] > 4 * BIG.nbytes
    del views
    size, metadata = connector.put("a", "b", "large", np.zeros(1 << 18))[1:]
    after = connector.health()
    assert (after["own_segment_writes"], after["shm_writes"]) == (1, 5)
    connector.get("a", "b", "large", metadata)
    connector.put("a", "b", "small", 1)
    assert connector.health()["used_bytes"] == 0
    assert connector.health()["high_water_bytes"] >= size
    assert (connector.health()["inline_writes"], connector.health()["own_segment_writes"]) == (1, 1)
    connector.close()
    assert connector.health()["high_water_bytes"] >= size


def test_the_oldest_lease(connect: Connect) -> None:
    connector = connect(SharedMemoryConnector)
    assert connector.health()["oldest_lease_s"] == 0
    begun = time.monotonic()
    first = connector.get("a", "b", 1, connector.put("a", "b", 1, BIG)[2])
    threading.Event().wait(0.2)
    between = time.monotonic()
    second = connector.get("a", "b", 2, connector.put("a", "b", 2, BIG)[2])
    age = connector.health()["oldest_lease_s"]
    assert 0.15 < age < time.monotonic() - begun + 0.05
    del first
    age = connector.health()["oldest_lease_s"]
    assert age < time.monotonic() - between + 0.05
    connector.close()
    threading.Event().wait(0.02)  # the clock for leases counts in steps of a few milliseconds
    assert connector.health()["oldest_lease_s"] > 0
    del second
    assert connector.health()["oldest_lease_s"] == 0


def test_buckets_double() -> None:
    meter = Meter("c", "n")
    from omni_fastshm._meter import start

    now = start()
    # The last one lasts since the machine's start, and the one before has 400 ms to its bucket's end: a busy machine
    # may well take some of them until the call.
    for began in (now, now - 1000, now - 3000, now - 600_000_000, 0):
        meter.sent(began, ("a", "b"), "r", (True, 1, {}))
    figures = meter.edges()[0][2]
    used = [index for index, count in enumerate(figures["buckets"]) if count]
    # Each call itself takes a little, so the first two may have slipped into the next bucket.
    assert used[-1] == BUCKETS - 1
    assert 20 in used
    assert sum(figures["buckets"]) == 5
    assert quantile_s(latency([figures]), 1.0) == float("inf")
    assert quantile_s(latency([figures]), 0.8) == 2**20 / 1e6
    assert quantile_s(latency([]), 0.5) is None


def test_made_up_stages_share_a_line() -> None:
    meter = Meter("c", "n")
    for number in range(3000):
        meter.sent(0, ("a", str(number)), "r", (True, 1, {}))
    edges = meter.edges()
    assert len(edges) <= 1025
    assert sum(put["count"] for _, _, put, _ in edges) == meter.puts == 3000
    assert ("", "") in {edge[:2] for edge in edges}


@pytest.mark.parametrize("cls", [SharedMemoryConnector, InProcessConnector])
def test_log_records_say_which_request(connect: Connect, caplog: pytest.LogCaptureFixture, cls: Any) -> None:
    connector = connect(cls, max_bytes=400_000, put_timeout_s=0)
    caplog.set_level(logging.WARNING)
    connector.put("a", "b", "r-1", np.zeros(100_000))
    (record,) = [record for record in caplog.records if "refused" in record.message]
    assert record.request_id == "r-1"
    assert record.edge == "a->b"
    assert record.bytes >= 800_000


# ---- where leases were taken


def test_a_forgotten_view_is_found(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, children: Children, namespace: str
) -> None:
    monkeypatch.setenv(VARIABLE, "0.1")
    connector = connect(SharedMemoryConnector)
    producer = children.with_connector()
    metadata = producer.run("result = [c.put('a', 'b', i, np.arange(20_000))[2] for i in range(600)]")

    def forgets() -> Any:
        return connector.get("a", "b", 1, metadata[1])

    kept = forgets()
    threading.Event().wait(0.15)
    for number in range(2, 600):
        connector.get("a", "b", number, metadata[number])
    fresh = connector.get("a", "b", 0, metadata[0])
    found, *rest = connector.health()["long_leases"]  # oldest first
    # On a machine that stood still meanwhile, the fresh one is held for long as well.
    assert all(lease["request_id"] == "0" and lease["age_s"] >= 0.1 for lease in rest)
    assert (found["from_stage"], found["to_stage"], found["request_id"]) == ("a", "b", "1")
    assert found["bytes"] == kept[1]
    assert 0.1 <= found["age_s"] < 30
    assert found["taken_at"][-1].startswith(f"{__file__}:")
    assert found["taken_at"][-1].endswith(" in forgets")
    assert len(connector._trace._traces) < 600, "what was let go is forgotten"
    del kept
    assert connector.health()["long_leases"] == []
    del fresh


@pytest.mark.parametrize("value", ["", "0", None])
def test_no_trace_unless_asked_for(connect: Connect, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    connector = connect(SharedMemoryConnector)
    assert connector._trace is None
    assert connector.health()["long_leases"] == []


def test_a_fork_while_another_thread_looks_at_the_trace() -> None:
    code = """
import os, threading, numpy as np
import omni_fastshm
from omni_fastshm import SharedMemoryConnector, observers

connector = SharedMemoryConnector()
view = connector.get("a", "b", "r", connector.put("a", "b", "r", np.arange(20_000))[2])
held, done = threading.Event(), threading.Event()

def hold():
    with connector._trace._lock, observers._lock:
        held.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    health = connector.health()
    omni_fastshm.add_observer(print)
    os._exit(0 if (health["status"], health["long_leases"]) == ("forked", []) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
done.set()
thread.join()
del view
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],  # a fork beside threads is the very thing
        env={**environment(), VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize("value", ["yes", "-1", "nan", "inf"])
def test_what_is_no_time(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=VARIABLE):
        SharedMemoryConnector({})


@pytest.mark.parametrize("payload", [BIG, 1], ids=["shared", "inline"])
def test_what_is_raised_while_a_put_is_told_of_is_no_error_of_the_put(connect: Connect, payload: Any) -> None:
    """As by a signal's handler in the middle of an observer."""
    connector = connect(SharedMemoryConnector)
    told: list[Any] = []

    def interrupted(*transfer: Any) -> None:
        told.append(transfer[-1])
        raise InterruptedError

    listen(interrupted)
    try:
        with pytest.raises(InterruptedError):
            connector.put("a", "b", "r", payload)
    finally:
        listen(None)
    assert told == ["ok"]
    health = connector.health()
    assert (health["puts"], health["errors"]) == (1, 0)
