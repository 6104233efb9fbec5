"""The glue of stages, against a connector of a few lines: what is sent, what is told, what is an error."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from omni_fastshm.adapter import recv_via_connector, try_recv_via_connector, try_send_via_connector
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import CodecError, ConfigError, MetadataError, MissingPayload


class Shelf:
    """A connector that keeps objects on a shelf; metadata carries a number, as the real ones do."""

    def __init__(self) -> None:
        self.shelf: dict[int, tuple[tuple[str, str, str], Any]] = {}
        self.full = False
        self.error: Exception | None = None

    def put(self, from_stage: str, to_stage: str, request_id: str, data: Any) -> Any:
        if self.error:
            raise self.error
        if self.full:
            return False, 0, None
        number = len(self.shelf) + 100
        self.shelf[number] = (from_stage, to_stage, request_id), data
        return True, 321, {"shelf": number, "size": 321}

    def get(
        self,
        from_stage: str,
        to_stage: str,
        request_id: str,
        metadata: Any = None,
        *,
        timeout: float | None = 0,
        copy: bool | None = None,
        device: Any = None,
    ) -> Any:
        self.options = {"timeout": timeout, "copy": copy, "device": device}
        found = self.shelf.pop((metadata or {}).get("shelf"), None)
        if found is None:
            return None
        assert found[0] == (from_stage, to_stage, request_id)
        return found[1], 321


class Metrics:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_forward(self, *call: Any) -> None:
        self.calls.append(call)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def send(shelf: Shelf, inputs: Any = "inputs", **changes: Any) -> tuple[bool, list[dict[str, Any]]]:
    queue: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {
        "connector": shelf,
        "stage_id": 0,
        "next_stage_id": 1,
        "req_id": "r-1",
        "next_inputs": inputs,
        "sampling_params": {"temperature": 0.5},
        "original_prompt": "hello",
        "next_stage_queue_submit_fn": queue.append,
        "metrics": None,
        **changes,
    }
    return try_send_via_connector(**arguments), queue


def test_the_notification_is_the_ecosystems_and_survives_json(shelf: Shelf) -> None:
    before = time.time()
    sent, queue = send(shelf)

    assert sent
    (note,) = queue
    assert json.loads(json.dumps(note)) == note
    assert before <= note.pop("sent_ts") <= time.time()
    assert note == {
        "request_id": "r-1",
        "sampling_params": {"temperature": 0.5},
        "from_connector": True,
        "from_stage": "0",
        "to_stage": "1",
        "connector_metadata": {"shelf": 100, "size": 321},
    }


def test_the_payload_has_the_three_parts_that_receivers_look_for(shelf: Shelf) -> None:
    send(shelf, [1, 2])

    key, payload = shelf.shelf[100]
    assert key == ("0", "1", "r-1")
    assert payload["engine_inputs"] == [1, 2]
    assert payload["sampling_params"] == {"temperature": 0.5}
    assert payload["metadata"]["original_prompt"] == "hello"
    assert payload["metadata"]["stage_transition"] == "0->1"


def test_what_was_sent_arrives_with_its_figures(shelf: Shelf) -> None:
    _, (note,) = send(shelf, {"x": 1})

    inputs, figures = try_recv_via_connector(note, {("0", "1"): shelf}, 1, timeout=2, copy=True, device="cpu")

    assert inputs == {"x": 1}
    assert figures is not None
    assert figures["rx_transfer_bytes"] == 321
    assert figures["rx_decode_time_ms"] >= 0
    assert figures["rx_in_flight_time_ms"] >= 0
    assert shelf.options == {"timeout": 2, "copy": True, "device": "cpu"}


@pytest.mark.parametrize("inputs", [None, 0, "", [], {}])
def test_an_empty_input_is_an_input(shelf: Shelf, inputs: Any) -> None:
    _, (note,) = send(shelf, inputs)

    got, figures = recv_via_connector(note, {("0", "1"): shelf}, "1")

    assert got == inputs
    assert figures is not None


def test_metrics_are_told_size_and_time(shelf: Shelf) -> None:
    metrics = Metrics()
    send(shelf, metrics=metrics)

    ((from_stage, to_stage, request_id, size, took_ms, used),) = metrics.calls
    assert (from_stage, to_stage, request_id, size, used) == (0, 1, "r-1", 321, True)
    assert 0 <= took_ms < 1000


def test_a_refused_put_is_false_and_tells_nobody(shelf: Shelf) -> None:
    shelf.full = True
    metrics = Metrics()

    assert send(shelf, metrics=metrics) == (False, [])
    assert not metrics.calls


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("engine_inputs.a[0]", "payload.a[0]"),
        ("engine_inputs", "payload"),
        ("metadata.original_prompt.x", "original_prompt.x"),
        ("sampling_params.engine_inputs", "sampling_params.engine_inputs"),
        ("engine_inputs_2", "engine_inputs_2"),
    ],
)
def test_the_path_in_an_encoding_error_begins_at_what_the_caller_gave(shelf: Shelf, path: str, shown: str) -> None:
    shelf.error = CodecError(f"{path}: Foo cannot be carried", key="r-1")

    with pytest.raises(CodecError) as caught:
        send(shelf)
    assert str(caught.value) == f"{shown}: Foo cannot be carried"
    assert caught.value.key == "r-1"


def test_the_codec_still_begins_its_paths_as_this_module_expects() -> None:
    with SharedMemoryConnector({}) as connector, pytest.raises(CodecError, match=r"^payload\.a\[0\]: object"):
        try_send_via_connector(connector, 0, 1, "r", {"a": [object()]}, None, None, lambda _: None)


def test_what_nobody_was_told_of_is_taken_back(shelf: Shelf) -> None:
    def broken(_: Any) -> None:
        raise BrokenPipeError("the next stage is gone")

    with pytest.raises(BrokenPipeError):
        send(shelf, next_stage_queue_submit_fn=broken)
    assert not shelf.shelf


@pytest.mark.parametrize(("stage", "following"), [(0, 0), ("", 1), (0, None), (True, 1)])
def test_an_edge_that_cannot_be_is_a_config_error(shelf: Shelf, stage: Any, following: Any) -> None:
    with pytest.raises(ConfigError):
        send(shelf, stage_id=stage, next_stage_id=following)


def test_a_missing_payload_is_none_or_halts_the_stage(shelf: Shelf) -> None:
    _, (note,) = send(shelf)
    shelf.shelf.clear()

    assert try_recv_via_connector(note, {("0", "1"): shelf}, 1) == (None, None)
    with pytest.raises(MissingPayload, match="r-1") as caught:
        recv_via_connector(note, {("0", "1"): shelf}, 1)
    assert caught.value.key == "r-1"
    assert isinstance(caught.value, LookupError)


def test_a_first_stages_task_carries_its_input_itself() -> None:
    assert try_recv_via_connector({"request_id": "r", "engine_inputs": [1]}, {}, 0) == ([1], None)
    assert recv_via_connector({"request_id": "r", "engine_inputs": None}, {}, 0) == (None, None)


def test_a_task_without_any_input_halts_the_stage() -> None:
    assert try_recv_via_connector({"request_id": "r"}, {}, 0) == (None, None)
    with pytest.raises(MissingPayload, match="engine_inputs"):
        recv_via_connector({"request_id": "r"}, {}, 0)


@pytest.mark.parametrize("missing", ["request_id", "from_stage"])
def test_an_incomplete_notification_is_named(shelf: Shelf, missing: str) -> None:
    _, (note,) = send(shelf)
    del note[missing]

    with pytest.raises(MetadataError, match=missing):
        try_recv_via_connector(note, {("0", "1"): shelf}, 1)


def test_a_notification_for_another_stage_is_refused(shelf: Shelf) -> None:
    _, (note,) = send(shelf)

    with pytest.raises(MetadataError, match="stage 1"):
        try_recv_via_connector(note, {("0", "2"): shelf}, 2)
    assert shelf.shelf, "the payload must stay for its own stage"


@pytest.mark.parametrize("edge", [(0, 1), ("0", 1), (0, "1"), ("0", "1")])
def test_connectors_may_be_keyed_by_int_or_text(shelf: Shelf, edge: Any) -> None:
    _, (note,) = send(shelf)

    assert recv_via_connector(note, {(5, 1): Shelf(), edge: shelf}, 1)[0] == "inputs"


def test_a_key_that_is_no_edge_is_named(shelf: Shelf) -> None:
    _, (note,) = send(shelf)

    with pytest.raises(ConfigError, match=r"'0->1' \(str\) is not \(from_stage, to_stage\)"):
        recv_via_connector(note, {"0->1": shelf}, 1)


def test_an_edge_without_connector_lists_those_there_are(shelf: Shelf) -> None:
    _, (note,) = send(shelf)

    with pytest.raises(ConfigError, match="5->1"):
        try_recv_via_connector(note, {("5", "1"): shelf}, 1)


def test_a_payload_of_somebody_else_is_refused(shelf: Shelf) -> None:
    _, _, metadata = shelf.put("0", "1", "r-1", ["bare"])
    note = {"request_id": "r-1", "from_connector": True, "from_stage": 0, "connector_metadata": metadata}

    with pytest.raises(MetadataError, match="engine_inputs"):
        try_recv_via_connector(note, {("0", "1"): shelf}, 1)


@pytest.mark.parametrize("sent_ts", [None, "now", True, 4e12])
def test_a_strange_time_does_not_matter(shelf: Shelf, sent_ts: Any) -> None:
    _, (note,) = send(shelf)
    note["sent_ts"] = sent_ts

    _, figures = recv_via_connector(note, {("0", "1"): shelf}, 1)

    assert figures is not None
    assert figures["rx_in_flight_time_ms"] == 0.0
