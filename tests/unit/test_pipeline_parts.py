"""The parts of a pipeline that need no processes: figures, the ledger of requests, the plan, joins."""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_fastshm._edges import Failure, HandOffFailed, Inlet, JoinInlet, Message, Outlet
from omni_fastshm._figures import EdgeFigures, EdgeSummary, Spread, way_of
from omni_fastshm._ledger import Ledger, Request
from omni_fastshm._pipeline_plan import StageEntry, check_reference, make_plan
from omni_fastshm._stage_worker import unfit_reason
from omni_fastshm.cli.run import table
from omni_fastshm.errors import ConfigError, StageFailed, UsageError
from omni_fastshm.pipeline import PipelineStats

# Figures


def test_a_spread_holds_only_times_that_were_measured() -> None:
    assert Spread.of(range(1, 101)) == Spread(50, 99, 100)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([3, 1, 2]) == Spread(2, 3, 3)
    assert Spread.of([]) == Spread(None, None, None)


def test_the_first_time_is_kept_apart() -> None:
    put, get = EdgeFigures(), EdgeFigures()
    for micros in (900.0, 10.0, 20.0, 30.0):
        put.add(1000, micros, "ring")
        get.add(1000, micros / 2)

    edge = EdgeSummary.of(("0", "1"), "X", put.snapshot(), get.snapshot())

    assert (edge.payloads, edge.total_bytes, edge.payload_bytes) == (4, 4000, 1000)
    assert (edge.first_put_us, edge.first_get_us) == (900.0, 450.0)
    assert edge.put_us == Spread(20.0, 30.0, 30.0)
    assert edge.ways == {"ring": 4}
    assert edge.gb_per_s == pytest.approx(1000 / 30 / 1e3)


def test_an_edge_of_which_nothing_is_known_has_no_times() -> None:
    edge = EdgeSummary.of(("0", "1"), "X", None, None)

    assert (edge.payloads, edge.payload_bytes, edge.gb_per_s, edge.put_us.p99) == (0, None, None, None)


@pytest.mark.parametrize(
    ("micros", "shown"), [(0.02, "50.00"), (3.0, "0.33"), (20.0, "0.050"), (1234.0, "0.00081"), (5e7, "0.000000020")]
)
def test_no_rate_is_shown_as_nothing(micros: float, shown: str) -> None:
    put = get = {"count": 1, "bytes": 1000, "sizes": [1000], "first": None, "micros": [micros / 2]}
    edge = EdgeSummary.of(("0", "1"), "X", put, get)
    assert table(PipelineStats((edge,), "caller", {}, {}, {})).splitlines()[2].split()[-1] == shown


def test_figures_do_not_grow_without_end() -> None:
    figures = EdgeFigures()
    for index in range(25_000):
        figures.add(1, float(index))

    snapshot = figures.snapshot()
    assert snapshot["count"] == snapshot["bytes"] == 25_000
    assert len(snapshot["micros"]) == len(snapshot["sizes"]) == 10_000
    assert snapshot["micros"][-1] == 24_999


@pytest.mark.parametrize(
    ("metadata", "way"),
    [
        ({"inline_bytes": b"", "size": 0}, "inline"),
        ({"shm": {}, "size": 1}, "ring"),
        ({"key": 1}, "other"),
        (None, "other"),
    ],
)
def test_the_way_is_read_from_the_metadata(metadata: Any, way: str) -> None:
    assert way_of(metadata) == way


# The ledger


def opened(ledger: Ledger, request_id: str | None = None) -> Request:
    ledger.take_place()
    return ledger.open(request_id)


def test_a_result_needs_all_last_stages() -> None:
    ledger = Ledger(["a", "b"], 4)
    request = opened(ledger)

    ledger.accept("a", Message("data", 0, "0", True, "A"))
    assert not request.future.done()
    ledger.accept("b", Message("data", 0, "0", True, "B"))
    assert request.future.result(0) == {"a": "A", "b": "B"}
    assert (ledger.in_flight, ledger.completed) == (0, 1)


def test_a_failure_shows_at_once_and_the_place_is_free_when_all_have_heard() -> None:
    ledger = Ledger(["a", "b"], 1)
    request = opened(ledger, "mine")

    ledger.accept("a", Message("fail", 0, "mine", failure=Failure("7", "seven failed")))
    with pytest.raises(StageFailed, match="seven failed") as caught:
        request.future.result(0)
    assert (caught.value.stage, caught.value.key) == ("7", "mine")
    assert ledger.in_flight == 1
    ledger.accept("b", Message("data", 0, "mine", True, "too late"))
    assert (ledger.in_flight, ledger.failed, ledger.completed) == (0, 1, 0)
    opened(ledger, "mine")


def test_what_comes_twice_or_late_is_ignored() -> None:
    ledger = Ledger(["a"], 2)
    request = opened(ledger)
    for value in ("first", "second"):
        ledger.accept("a", Message("data", 0, "0", True, value))
    ledger.accept("a", Message("data", 9, "9", True, "never opened"))

    assert request.future.result(0) == "first"
    ledger.fail(request, RuntimeError())
    assert (ledger.completed, ledger.failed) == (1, 0)


def test_after_a_refusal_nobody_waits() -> None:
    ledger = Ledger(["a"], 1)
    opened(ledger)
    ledger.refuse(lambda: UsageError("over"))

    with pytest.raises(UsageError, match="over"):
        ledger.take_place()


def test_failing_all_reaches_everything_under_way() -> None:
    ledger = Ledger(["a"], 3)
    requests = [opened(ledger) for _ in range(3)]
    ledger.accept("a", Message("data", 1, "1", True, "done"))
    ledger.fail_all(lambda request: RuntimeError(request.request_id))

    assert requests[1].future.result(0) == "done"
    assert [str(r.future.exception(0)) for r in (requests[0], requests[2])] == ["0", "2"]


# The plan


def entries(*names: str) -> list[StageEntry]:
    return [StageEntry(name, "", None, None, Path()) for name in names]


def plan(edges: dict[tuple[str, str], str], *names: str, **extra: Any) -> Any:
    settings = {edge: (name, extra) for edge, name in edges.items()}
    return make_plan(entries(*names), settings, dict.fromkeys(names, math.sqrt), None)


def test_stages_joined_in_process_form_one_group() -> None:
    shared, here = "SharedMemoryConnector", "InProcessConnector"
    made = plan({("a", "b"): here, ("b", "c"): shared, ("d", "c"): here, ("c", "e"): here}, *"abcde")

    assert made.groups == (("a", "b"), ("c", "d", "e"))
    assert (made.sources, made.sinks) == (("a", "d"), ("e",))


def test_each_run_has_its_own_namespace_unless_the_file_gives_one() -> None:
    edges = {("a", "b"): "SharedMemoryConnector"}
    first, second = (plan(edges, "a", "b").edges["a", "b"][1]["namespace"] for _ in range(2))
    given = plan(edges, "a", "b", namespace="mine").edges["a", "b"][1]

    assert first != second
    assert given["namespace"] == "mine"
    assert given["orphan_ttl_s"] == 0


def test_the_caller_never_takes_a_stages_name() -> None:
    assert plan({}, "caller").caller == "caller_"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("def stage(x): ...", True),
        ("class stage: ...", True),
        ("stage = print", True),
        ("stage: object = print", True),
        ("from math import sqrt as stage", True),
        ("from math import *", True),
        ("if True:\n    stage = print", True),
        ("async def other(x): ...", False),
        ("'text'\nimport math", False),
    ],
)
def test_a_reference_is_checked_without_running_the_file(content: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "my_stages.py").write_text(f"{content}\n")

    if found:
        assert check_reference("my_stages.py:stage", tmp_path) == f"{tmp_path.resolve()}/my_stages.py:stage"
    else:
        with pytest.raises(ConfigError, match="does not define 'stage'"):
            check_reference("my_stages.py:stage", tmp_path)


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")

    with pytest.raises(ConfigError, match="not valid Python"):
        check_reference("bad.py:x", tmp_path)


def test_looking_for_a_module_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package_that_must_not_run"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(1)\n")
    (package / "inner.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    assert check_reference(f"{package.name}.inner:x", tmp_path) == f"{package.name}.inner:x"
    with pytest.raises(ConfigError, match="no module"):
        check_reference(f"{package.name}.outer:x", tmp_path)
    with pytest.raises(ConfigError, match="no module"):
        check_reference(f"{package.name}.inner.deeper:x", tmp_path)


class Asynchronous:
    async def __call__(self, value: Any) -> Any:
        return value


class Plain:
    def __call__(self, value: Any) -> Any:
        return value


async def asynchronous(value: Any) -> Any:
    return value


async def asynchronous_pieces(value: Any) -> Any:
    yield value


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (asynchronous, "is async"),
        (asynchronous_pieces, "is async"),
        (Asynchronous, "is async"),
        (Asynchronous(), "is async"),
        (functools.partial(asynchronous, 1), "is async"),
        (int, "has no __call__"),
        (5, "neither a function nor a class"),
        (Plain, ""),
        (Plain(), ""),
        (functools.partial(math.pow, 2), ""),
        (math.sqrt, ""),
        (str.upper, ""),
        (Plain().__call__, ""),
    ],
)
def test_what_fits_as_a_stage(target: Any, words: str) -> None:
    reason = unfit_reason(target)
    assert words in reason
    assert bool(words) == bool(reason)


# Joins


class Inline:
    """A connector whose metadata is the payload."""

    def put(self, _from: str, _to: str, _id: str, data: Any) -> Any:
        return True, 1, {"inline_bytes": data, "size": 1}

    def get(self, _from: str, _to: str, _id: str, metadata: Any = None, **_: Any) -> Any:
        return metadata["inline_bytes"], 1


class Ends:
    """Two edges a→c and b→c into one join."""

    def __init__(self) -> None:
        connector: Any = Inline()
        self.pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        edges = [("a", "c"), ("b", "c")]
        self.a, self.b = (Outlet(e, connector, w) for e, (_, w) in zip(edges, self.pipes, strict=True))
        self.join = JoinInlet([Inlet(e, connector, r) for e, (r, _) in zip(edges, self.pipes, strict=True)])


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for pair in made.pipes:
        for pipe in pair:
            pipe.close()


def test_a_join_waits_for_the_slower_edge_and_keeps_the_order(ends: Ends) -> None:
    for seq in range(3):
        ends.a.send(seq, f"r{seq}", seq, last=True)
    for seq in range(3):
        ends.b.send(seq, f"r{seq}", -seq, last=True)
    ends.a.stop()
    ends.b.stop()

    messages = [ends.join.receive() for _ in range(4)]

    assert [m.value for m in messages[:3]] == [{"a": seq, "b": -seq} for seq in range(3)]
    assert [m.request_id for m in messages[:3]] == ["r0", "r1", "r2"]
    assert messages[3].kind == "stop"


class Lost(Inline):
    """A connector whose payloads never arrive; it remembers what was cleaned up."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def get(self, *_: Any, **__: Any) -> None:
        return None

    def cleanup(self, request_id: str) -> None:
        self.dropped.append(request_id)


def test_a_payload_that_does_not_arrive_is_named_by_the_callers_id() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        connector: Any = Lost()
        Outlet(("a", "b"), connector, writer).send(6, "it's mine", 1, last=True)
        message = Inlet(("a", "b"), connector, reader).receive()

    assert message.failure is not None
    assert "MissingPayload" in message.failure.text
    # Its own key in the connector is another one, so that the same id can be used again.
    assert connector.dropped not in ([], ["it's mine"])
    assert connector.dropped[0] not in message.failure.text
    assert message.failure.text.count(repr("it's mine")) == 2


class Full(Inline):
    """A connector without room."""

    def __init__(self, **config: Any) -> None:
        self.config = config

    def put(self, _from: str, _to: str, _id: str, data: Any) -> Any:
        return False, 0, None


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        (1000, bytes(5000), "more than max_bytes (1000) allows at all"),
        ("1e3", bytes(5000), "more than max_bytes (1e3) allows at all"),
        (10_000, bytes(5000), "within the connector's waiting time (put_timeout_s)"),
        (None, bytes(5000), "within the connector's waiting time (put_timeout_s)"),
        (10, print, "within the connector's waiting time (put_timeout_s)"),
    ],
)
def test_a_refusal_tells_too_large_from_full(limit: Any, value: Any, words: str) -> None:
    connector: Any = Full(max_bytes=limit)
    outlet = Outlet(("a", "b"), connector, None)  # type: ignore[arg-type]

    with pytest.raises(HandOffFailed) as caught:
        outlet.send(0, "r", value, last=True)
    assert words in str(caught.value)


def test_a_failed_request_leaves_no_half_filled_join(ends: Ends) -> None:
    ends.a.send(0, "r", "kept by mistake", last=True)
    ends.a.send(1, "s", 1, last=True)
    ends.b.send(0, "r", "piece", last=False)
    ends.b.fail(0, "r", Failure("b", "b failed"))
    ends.b.send(1, "s", 2, last=True)

    first, second = ends.join.receive(), ends.join.receive()

    assert (first.kind, first.seq, first.failure) == ("fail", 0, Failure("b", "b failed"))
    assert second.value == {"a": 1, "b": 2}
    assert not ends.join._open
    assert not ends.join._failed
