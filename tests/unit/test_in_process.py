"""InProcessConnector beyond the contract that all connectors share: room, order, copies, processes, spaces."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import os
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from support.threads import start
from support.waiting import until

from omni_fastshm.connectors import _spaces
from omni_fastshm.connectors._leaves import buffer_bytes, moved, own_copy, shared_copy
from omni_fastshm.connectors.in_process import InProcessConnector
from omni_fastshm.errors import CodecError, ConfigError, ConnectorClosed, ForkedConnector, MetadataError, SegmentError
from omni_fastshm.placement import check_placement

Make = Callable[..., InProcessConnector]
EDGE = ("0", "1")


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that builds connectors, which are closed at the end."""
    made: list[InProcessConnector] = []

    def build(**config: Any) -> InProcessConnector:
        made.append(InProcessConnector(config))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call `function` in a thread; the future carries its result or exception."""
    return start(function, *args, **kwargs)[0]


def waiting(connector: InProcessConnector, number: int) -> None:
    """Wait until that many puts of the connector wait for room."""
    until(lambda: len(connector._queue) == number)


def taken(answer: Any) -> Any:
    assert answer is not None
    return answer[0]


# Hand-over


def test_the_object_itself_goes_through(make: Make) -> None:
    connector = make()
    payload = {"x": np.zeros(10), "y": [threading.Lock(), object()]}
    ok, size, metadata = connector.put(0, 1, "r", payload)
    assert (ok, size) == (True, 80)
    assert connector.get("0", "1", "r", metadata) == (payload, 80)
    assert connector.get(0, 1, "r", metadata, timeout=None) is None


def test_config_is_the_very_dict() -> None:
    config: dict[str, Any] = {"codec_chunk_frames": 25}
    with InProcessConnector(config) as connector:
        assert connector.config is config
    with InProcessConnector() as connector:
        assert connector.config == {}


@pytest.mark.parametrize("config", [{"max_bytes": -1}, {"shm_threshold_bytes": 5}, {"linger_s": "x"}, [], 5])
def test_wrong_settings(config: Any) -> None:
    with pytest.raises(ConfigError, match="InProcessConnector"):
        InProcessConnector(config)


def test_metadata_is_plain_data_with_edge_and_id(make: Make) -> None:
    import json

    connector = make()
    _, _, metadata = connector.put(0, 1, "r", b"abc")
    inner = metadata["in_process"]
    assert (inner["from_stage"], inner["to_stage"], inner["request_id"], inner["size"]) == ("0", "1", "r", 3)
    for copy in (
        json.loads(json.dumps(metadata)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(metadata)),
        pickle.loads(pickle.dumps(metadata)),
    ):
        assert copy == metadata
    assert connector.get(0, 1, "r", json.loads(json.dumps(metadata))) == (b"abc", 3)


def test_connectors_of_one_namespace_see_each_other(make: Make) -> None:
    one, other, foreign = make(namespace="n1"), make(namespace="n1"), make(namespace="n2")
    _, _, metadata = one.put(0, 1, "r", "x")
    with pytest.raises(MetadataError, match="namespace 'n1', this connector in 'n2'"):
        foreign.get(0, 1, "r", metadata)
    foreign.cleanup("r")
    assert other.get(0, 1, "r", metadata) == ("x", 0)


def test_payloads_without_key_lookup_are_not_found_by_key(make: Make) -> None:
    plain, keyed = make(namespace="n"), make(namespace="n", key_lookup=True)
    plain.put(0, 1, "r", "x")
    assert keyed.get(0, 1, "r") is None
    _, _, metadata = keyed.put(0, 1, "r", "y")
    assert plain.get(0, 1, "r", metadata) == ("y", 0)
    assert plain.health()["live_blocks"] == 1


def test_metadata_from_another_process_names_both(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = make()
    _, _, metadata = connector.put(0, 1, "r", "x")
    metadata["in_process"]["process"] = "4711-abc"
    metadata["in_process"]["host"] = "elsewhere"
    with pytest.raises(MetadataError) as caught:
        connector.get(0, 1, "r", metadata)
    text = str(caught.value)
    assert "process 4711-abc on host elsewhere" in text
    assert f"this is process {os.getpid()}-" in text
    assert "SharedMemoryConnector" in text
    assert connector.health()["errors"] == 1


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        [],
        "x",
        5,
        {"shm": {"name": "x"}, "size": 1},
        {"inline_bytes": b"", "size": 0},
        {"in_process": 5, "size": 1},
        {"in_process": {}, "size": 0},
    ],
)
def test_metadata_of_something_else(make: Make, metadata: Any) -> None:
    for connector in (make(), make(namespace="n", key_lookup=True)):
        with pytest.raises(MetadataError, match="request 'r' on edge 0 -> 1"):
            connector.get(0, 1, "r", metadata)


@pytest.mark.parametrize("number", [True, "1", 1.0, None])
def test_a_damaged_number(make: Make, number: Any) -> None:
    connector = make()
    _, _, metadata = connector.put(0, 1, "r", "x")
    metadata["in_process"]["number"] = number
    with pytest.raises(MetadataError, match="damaged"):
        connector.get(0, 1, "r", metadata)


def test_a_number_of_another_payload_gives_nothing(make: Make) -> None:
    connector = make()
    _, _, first = connector.put(0, 1, "r", "x")
    _, _, other = connector.put(0, 1, "s", "y")
    first["in_process"]["number"] = other["in_process"]["number"]
    assert connector.get(0, 1, "r", first) is None
    assert connector.get(0, 1, "s", other) == ("y", 0)


# Room


def test_too_large_is_refused_at_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    connector = make(max_bytes=100, put_timeout_s=1000)
    with caplog.at_level(logging.WARNING):
        assert connector.put(0, 1, "r", bytes(101)) == (False, 0, None)
    assert connector.put(0, 1, "r", bytes(101), wait=False).result(0) == (False, 0, None)
    assert "request 'r' on edge 0 -> 1 refused, it can never fit: 101 bytes wanted, 100 of 100" in caplog.text
    health = connector.health()
    assert (health["refused"], health["used_bytes"], health["capacity_bytes"]) == (2, 0, 100)


def test_no_room_in_time_is_refused_with_numbers(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    connector = make(max_bytes=100, put_timeout_s=0.05)
    connector.put(0, 1, "a", bytes(60))
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert connector.put(0, 1, "b", bytes(50)) == (False, 0, None)
    assert 0.05 <= time.monotonic() - start < 5
    assert "50 bytes wanted, 40 of 100 (max_bytes) free" in caplog.text
    assert connector.health()["blocked_s"] >= 0.05
    assert connector.put(0, 1, "c", bytes(40))[0]


def test_a_get_makes_room_for_a_waiting_put(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=30)
    _, _, metadata = connector.put(0, 1, "a", bytes(100))
    future = run(connector.put, 0, 1, "b", bytes(100))
    waiting(connector, 1)
    assert connector.get(0, 1, "a", metadata) is not None
    assert future.result(10)[0] is True


def test_a_cleanup_makes_room_for_a_waiting_put(make: Make) -> None:
    connector, other = make(max_bytes=100, put_timeout_s=30), make()
    connector.put(0, 1, "a", bytes(100))
    future = run(connector.put, 0, 1, "b", bytes(100))
    waiting(connector, 1)
    other.cleanup("a")
    assert future.result(10)[0] is True


def test_waiting_puts_enter_in_their_order(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=30)
    _, _, metadata = connector.put(0, 1, "a", bytes(60))
    large = run(connector.put, 0, 1, "large", bytes(80))
    waiting(connector, 1)
    # It would fit, but the large one came first.
    small = run(connector.put, 0, 1, "small", bytes(10))
    waiting(connector, 2)
    connector.get(0, 1, "a", metadata)
    numbers = [future.result(10)[2]["in_process"]["number"] for future in (large, small)]
    assert numbers == sorted(numbers)


def test_a_put_that_gives_up_lets_the_next_one_in(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=0.2)
    connector.put(0, 1, "a", bytes(60))
    answers = []
    while True not in answers and len(answers) < 5:  # on a busy machine both may find that their time is over
        large = run(connector.put, 0, 1, "large", bytes(80))
        waiting(connector, 1)
        small = run(connector.put, 0, 1, "small", bytes(10))
        assert large.result(10)[0] is False
        answers.append(small.result(10)[0])
    assert answers[-1] is True


def test_without_waiting_the_future_waits_for_room(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=30)
    first = connector.put(0, 1, "a", bytes(100), wait=False)
    assert first.done()
    futures = [connector.put(0, 1, name, bytes(100), wait=False) for name in "bc"]
    assert not any(future.done() for future in futures)
    for future, name in zip([first, *futures], "abc", strict=True):
        ok, _, metadata = future.result(10)
        assert ok
        assert connector.get(0, 1, name, metadata) is not None


def test_a_put_that_is_cancelled_in_the_queue_keeps_nobody_out(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=30)
    _, _, first = connector.put(0, 1, "a", bytes(100))
    second, third = (connector.put(0, 1, name, bytes(100), wait=False) for name in "bc")
    waiting(connector, 2)
    assert third.cancel(), "its turn has not come"
    assert connector.get(0, 1, "a", first) is not None
    assert connector.get(0, 1, "b", second.result(10)[2]) is not None
    assert run(connector.put, 0, 1, "d", bytes(100)).result(10)[0]


def test_a_put_that_close_ends_is_counted_as_an_error(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=30)
    connector.put(0, 1, "a", bytes(100))
    late = run(connector.put, 0, 1, "b", bytes(100))
    waiting(connector, 1)
    connector.close()
    with pytest.raises(ConnectorClosed):
        late.result(10)
    assert connector.health()["errors"] == 1


def test_a_replaced_payload_counts_as_free(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=0, key_lookup=True, namespace="n")
    assert connector.put(0, 1, "r", bytes(80))[0]
    assert connector.put(0, 1, "r", bytes(100))[0]
    assert connector.health()["used_bytes"] == 100
    assert connector.get(0, 1, "r") == (bytes(100), 100)
    assert connector.health()["used_bytes"] == 0


def test_one_more_taker_keeps_the_room(make: Make) -> None:
    connector = make(max_bytes=100, put_timeout_s=0)
    _, _, metadata = connector.put(0, 1, "r", bytes(100), consumers=2)
    connector.get(0, 1, "r", metadata)
    assert connector.health()["live_blocks"] == 1
    connector.get(0, 1, "r", metadata)
    assert connector.health()["live_blocks"] == connector.health()["used_bytes"] == 0
    assert connector.get(0, 1, "r", metadata) is None


def test_without_a_limit(make: Make) -> None:
    assert make().health()["capacity_bytes"] == sys.maxsize


def test_health_has_every_key_that_the_documentation_lists(make: Make) -> None:
    text = (Path(__file__).parents[2] / "docs/health.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    health = make(namespace="mine").health()

    assert listed <= set(health)
    assert (health["connector"], health["namespace"]) == ("InProcessConnector", "mine")


# Several takers and copies


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Data:
    tensor: Any
    more: Any = None


class Record(msgspec.Struct, kw_only=True):
    array: Any
    more: Any = None


def tree() -> dict[Any, Any]:
    return {
        "tensor": torch.arange(4.0),
        "array": np.arange(4),
        ("key", 1): [bytearray(b"abc"), memoryview(bytearray(b"12")), b"fixed", None, 5, "text"],
        "nested": (Point(torch.zeros(2), {"deep": np.ones(3)}), Data(torch.ones(1)), Record(array=np.ones(2))),
        "set": {1, 2},
    }


def leaves_of(value: dict[Any, Any]) -> list[Any]:
    point, data, record = value["nested"]
    return [value["tensor"], value["array"], point.x, point.y["deep"], data.tensor, record.array]


def test_several_takers_get_their_own(make: Make) -> None:
    connector = make()
    sent = tree()
    _, _, metadata = connector.put(0, 1, "r", sent, consumers=2)
    one, other = (taken(connector.get(0, 1, "r", metadata)) for _ in range(2))
    for got in (one, other):
        assert got is not sent
        assert list(got) == list(sent)
        assert [type(part) for part in got["nested"]] == [Point, Data, Record]
    for mine, theirs, original in zip(leaves_of(one), leaves_of(other), leaves_of(sent), strict=True):
        assert mine is not theirs
        if isinstance(mine, np.ndarray):
            assert not mine.flags.writeable
            assert np.shares_memory(mine, original)
            assert original.flags.writeable
        else:
            assert mine.data_ptr() not in (theirs.data_ptr(), original.data_ptr())
            assert torch.equal(mine, original)
    one["key", 1][0][0] = 0
    one["set"].add(3)
    assert other["key", 1][0] == bytearray(b"abc")
    assert sent["set"] == {1, 2}


def test_several_takers_may_have_the_object_itself(make: Make) -> None:
    connector = make()
    sent = tree()
    _, _, metadata = connector.put(0, 1, "r", sent, consumers=2)
    assert taken(connector.get(0, 1, "r", metadata, copy=False)) is sent
    assert taken(connector.get(0, 1, "r", metadata, copy=False)) is sent


def test_copy_gives_own_writable_memory(make: Make) -> None:
    connector = make()
    sent = tree()
    got = taken(connector.get(0, 1, "r", connector.put(0, 1, "r", sent)[2], copy=True))
    for mine, original in zip(leaves_of(got), leaves_of(sent), strict=True):
        mine += 1
        assert not bool((mine == original).any())
    assert got["key", 1][1].obj is not sent["key", 1][1].obj
    got["key", 1][1][0] = 0
    assert bytes(sent["key", 1][1]) == b"12"


def test_a_copy_has_no_gradient_and_no_foreign_storage() -> None:
    weight = torch.ones(3, requires_grad=True)
    result = weight * 2
    view = torch.zeros(1000)[10:12]
    copied = own_copy([result, view, torch.nn.Parameter(torch.ones(2))])
    assert [part.requires_grad for part in copied] == [False, False, False]
    assert copied[1].untyped_storage().nbytes() == 8


def test_shared_and_circular_parts_stay_so() -> None:
    part = [np.ones(2)]
    circle: list[Any] = [part, part]
    circle.append(circle)
    for change in (own_copy, shared_copy):
        got = change(circle)
        assert got[0] is got[1]
        assert got[2] is got
        assert got[0][0] is not part[0]
    assert buffer_bytes(circle) == 16


def test_what_cannot_be_copied_can_be_got_again(make: Make) -> None:
    connector = make()
    sent = [threading.Lock()]
    _, _, metadata = connector.put(0, 1, "r", sent)
    for _ in range(2):
        with pytest.raises(CodecError, match=r"request 'r' on edge 0 -> 1: cannot be copied: .*copy=False"):
            connector.get(0, 1, "r", metadata, copy=True)
    assert connector.health()["errors"] == 2
    assert connector.health()["live_blocks"] == 1
    assert taken(connector.get(0, 1, "r", metadata)) is sent


class Cleaner:
    """Cancels its own request while it is being copied, and then fails."""

    def __init__(self, connector: InProcessConnector) -> None:
        self.connector = connector

    def __deepcopy__(self, memo: Any) -> Any:
        self.connector.cleanup("r")
        raise ValueError("no copy")


def test_cancelled_while_it_is_being_taken(make: Make) -> None:
    connector = make()
    _, _, metadata = connector.put(0, 1, "r", [Cleaner(connector)])
    with pytest.raises(CodecError, match="no copy"):
        connector.get(0, 1, "r", metadata, copy=True)
    assert connector.get(0, 1, "r", metadata) is None
    assert connector.health()["live_blocks"] == 0


@pytest.mark.parametrize("copy", [0, 1, "yes", []])
def test_wrong_copy(make: Make, copy: Any) -> None:
    with pytest.raises(ConfigError, match="copy"):
        make().get(0, 1, "r", {}, copy=copy)


# Devices


def test_tensors_move_and_the_rest_stays(make: Make) -> None:
    connector = make()
    sent = tree()
    got = taken(connector.get(0, 1, "r", connector.put(0, 1, "r", sent)[2], device="meta"))
    for mine, original in zip(leaves_of(got), leaves_of(sent), strict=True):
        if isinstance(original, torch.Tensor):
            assert mine.device.type == "meta"
            assert original.device.type == "cpu"
        else:
            assert mine is original
    assert got is not sent


def test_a_device_that_is_there_already() -> None:
    tensor = torch.ones(2)
    assert moved([tensor], torch.device("cpu"))[0] is tensor


@pytest.mark.parametrize("device", ["nonsense", object(), "cuda:x"])
def test_wrong_devices(make: Make, device: Any) -> None:
    connector = make()
    _, _, metadata = connector.put(0, 1, "r", [torch.ones(2)])
    with pytest.raises(ConfigError, match="device"):
        connector.get(0, 1, "r", metadata, device=device)
    assert connector.get(0, 1, "r", metadata) is not None


@pytest.mark.parametrize(
    ("device", "meant"),
    [
        ("gpu", "cuda"), ("GPU:1", "cuda:1"), ("CPU", "cpu"), ("cuda0", "cuda:0"), ("CUDA:0", "cuda:0"),
        ("cuda:", "cuda"), ("cuda 3", "cuda:3"), ("cdua", "cuda"), ("nvidia", "cuda"), ("host", "cpu"),
        (" cpu ", "cpu"),
    ],
)  # fmt: skip
def test_a_device_that_is_written_differently(make: Make, device: str, meant: str) -> None:
    connector = make()
    _, _, metadata = connector.put(0, 1, "r", [torch.ones(2)])
    said = f"{device!r} (str) is no device of torch; did you mean {meant!r}?"
    with pytest.raises(ConfigError, match=re.escape(f"device: {said}")):
        connector.get(0, 1, "r", metadata, device=device)
    with pytest.raises(ConfigError, match=re.escape(f"device['[0]']: {said}")):
        connector.get(0, 1, "r", metadata, device={"[0]": device})
    assert connector.get(0, 1, "r", metadata) is not None


@pytest.mark.parametrize("device", ["cuda:-1", "cuda:x", "", "no device at all", "cuda0123"])
def test_a_device_that_is_none(device: str) -> None:
    """No guess is better than a wrong one; torch says what is wrong."""
    with pytest.raises(ConfigError, match="is no device of torch: ") as caught:
        check_placement(device)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("device", [True, 1.5, ["cuda"], object()])
def test_what_no_device_can_be(device: Any) -> None:
    """One line: what torch itself says of these is a list of its signatures."""
    with pytest.raises(ConfigError, match="give a text such as 'cuda'") as caught:
        check_placement(device)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"device\['a'\]: .* give a text such as 'cuda'"):
        check_placement({"a": device})


# Sizes


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        (None, 0),
        ("text", 0),
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(np.zeros((2, 3))), 48),
        (np.zeros((2, 3), np.float16), 12),
        (torch.zeros(2, 3, dtype=torch.bfloat16), 12),
        (torch.tensor(True), 1),
        (torch.zeros(0, 5), 0),
        (torch.zeros(100)[::2], 200),
        (torch.eye(3).to_sparse(), 3 * 2 * 8 + 3 * 4),
        (np.broadcast_to(np.zeros(1), (10,)), 80),
        ({"a": {b"key": [(bytes(2),), {bytes(3)}]}}, 8),
        (Data(bytes(4), [Record(array=bytes(5))]), 9),
        ([Point(bytes(1), bytes(2))], 3),
        (object(), 0),
        (Data, 0),
    ],
)
def test_size_is_the_sum_of_buffers(make: Make, payload: Any, size: int) -> None:
    connector = make()
    ok, told, metadata = connector.put(0, 1, "r", payload)
    assert (ok, told, metadata["size"]) == (True, size, size)
    assert connector.get(0, 1, "r", metadata) == (payload, size) or size > 0


def test_size_of_a_deep_payload() -> None:
    deep: Any = bytes(7)
    for _ in range(100_000):
        deep = [deep]
    assert buffer_bytes(deep) == 7
    while isinstance(deep, list):
        deep = deep.pop()


# Waiting and closing


def test_a_waiting_get_ends_when_its_payload_comes(make: Make) -> None:
    connector = make(namespace="n", key_lookup=True)
    future = run(connector.get, 0, 1, "r", timeout=None)
    connector.put(0, 1, "other", "no")
    connector.put(0, 1, "r", "yes")
    assert future.result(10) == ("yes", 0)


@pytest.mark.parametrize("timeout", [None, 1000, 1e300])
def test_close_ends_a_waiting_get(make: Make, timeout: Any) -> None:
    connector = make(namespace="n", key_lookup=True)
    future = run(connector.get, 0, 1, "r", timeout=timeout)
    until(lambda: len(connector._space.changed._waiters) == 1)  # type: ignore[attr-defined]
    connector.close()
    with pytest.raises(ConnectorClosed):
        future.result(10)


def test_close_ends_waiting_puts(make: Make) -> None:
    connector = make(max_bytes=10, put_timeout_s=1000)
    connector.put(0, 1, "a", bytes(10))
    futures = [run(connector.put, 0, 1, "b", bytes(10)), connector.put(0, 1, "c", bytes(10), wait=False)]
    waiting(connector, 2)
    connector.close()
    for future in futures:
        with pytest.raises(ConnectorClosed):
            future.result(10)
    assert connector.health()["used_bytes"] == 0


def test_close_drops_what_is_untaken_and_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make(), make()
    _, _, metadata = producer.put(0, 1, "r", "x")
    _, _, kept = consumer.put(0, 1, "s", "y")
    with caplog.at_level(logging.WARNING):
        producer.close()
        producer.close()
    assert caplog.text.count("closed with 1 payload that") == 1
    assert producer.health()["dropped"] == 1
    assert producer.health()["status"] == "closed"
    assert consumer.get(0, 1, "r", metadata) is None
    assert consumer.get(0, 1, "s", kept) == ("y", 0)


def test_close_lingers_for_a_taker(make: Make) -> None:
    producer, consumer = make(linger_s=30), make()
    _, _, metadata = producer.put(0, 1, "r", "x")
    future = run(producer.close)
    until(lambda: producer._closed)
    with pytest.raises(ConnectorClosed):
        producer.put(0, 1, "r", "y")
    assert not future.done()
    assert consumer.get(0, 1, "r", metadata) == ("x", 0)
    assert future.result(10) is None
    assert producer.health()["dropped"] == 0


def test_lingering_ends(make: Make) -> None:
    producer = make(linger_s=0.05)
    producer.put(0, 1, "r", "x")
    start = time.monotonic()
    producer.close()
    assert 0.05 <= time.monotonic() - start < 5
    assert producer.health()["dropped"] == 1


def test_a_forgotten_connector_drops_its_payloads_without_lingering(make: Make) -> None:
    class Watched:
        pass

    payload = Watched()
    watch = weakref.ref(payload)
    other = make(namespace="n")
    connector = InProcessConnector({"namespace": "n", "linger_s": 1000})
    _, _, metadata = connector.put(0, 1, "r", payload)
    del payload
    assert watch() is not None
    del connector
    gc.collect()
    assert watch() is None
    assert other.get(0, 1, "r", metadata) is None


def test_a_space_dies_with_its_connectors() -> None:
    connector = InProcessConnector({"namespace": "short-lived"})
    space = weakref.ref(connector._space)
    connector.put(0, 1, "r", "x")
    connector.close()
    del connector
    gc.collect()
    assert space() is None


def test_taking_builds_no_reference_cycles(make: Make) -> None:
    connector = make()
    gc.collect()
    gc.disable()
    try:
        array = np.zeros(10)
        watches = [weakref.ref(array)]
        for copy in (None, True):
            got = connector.get(0, 1, "r", connector.put(0, 1, "r", {"a": [array]})[2], copy=copy)
            watches.append(weakref.ref(taken(got)["a"][0]))
            del got
        got = connector.get(0, 1, "r", connector.put(0, 1, "r", {"a": [array]}, consumers=2)[2])
        watches.append(weakref.ref(taken(got)["a"][0]))
        connector.cleanup("r")
        del got, array
        assert [watch() for watch in watches] == [None] * 4
    finally:
        gc.enable()


def test_cleanup_drops_all_edges_of_exactly_one_request(make: Make) -> None:
    connector = make(namespace="n", key_lookup=True)
    for edge in ((0, 1), (0, 2), (1, 2)):
        for name in ("r", "r_1", "1", 1):
            connector.put(*edge, name, "x")
    connector.cleanup("r")
    connector.cleanup("unknown")
    assert connector.get(0, 1, "r") is None
    assert connector.get(1, 2, "r") is None
    assert connector.get(0, 1, "r_1") == ("x", 0)
    connector.cleanup(1)
    assert connector.get(0, 2, "1") is None
    assert connector.get(1, 2, "r_1") == ("x", 0)
    with pytest.raises(ConfigError, match="request_id"):
        connector.cleanup(None)  # type: ignore[arg-type]
    connector.close()
    connector.cleanup("r")


def test_many_threads_on_one_connector(make: Make) -> None:
    connector = make(max_bytes=1000, put_timeout_s=30, namespace="n", key_lookup=True)

    def produce(part: int) -> int:
        return sum(connector.put(0, 1, f"{part}/{i}", bytes(100))[0] for i in range(200))

    def consume(part: int) -> int:
        return sum(taken(connector.get(0, 1, f"{part}/{i}", timeout=30)) == bytes(100) for i in range(200))

    futures = [run(work, part) for part in range(4) for work in (produce, consume)]
    assert [future.result(50) for future in futures] == [200] * 8
    health = connector.health()
    assert (health["puts"], health["gets"], health["live_blocks"], health["used_bytes"]) == (800, 800, 0, 0)


def test_one_of_many_takers_gets_it(make: Make) -> None:
    connector = make()
    for index in range(50):
        _, _, metadata = connector.put(0, 1, index, [index], consumers=2)
        futures = [run(connector.get, 0, 1, index, metadata) for _ in range(4)]
        got = [future.result(10) for future in futures]
        assert sorted(got, key=str) == [([index], 0), ([index], 0), None, None]


# Memory from allocate


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((2, 3), torch.bfloat16, torch.Tensor),
        (5, torch.bool, torch.Tensor),
        ([2, np.int64(3)], np.float32, np.ndarray),
        ((), "<i8", np.ndarray),
        (np.int64(4), np.dtype(bool), np.ndarray),
        (torch.Size([2, 2]), torch.float32, torch.Tensor),
    ],
)
def test_allocate(make: Make, shape: Any, dtype: Any, kind: type) -> None:
    made = make().allocate(shape, dtype)
    assert isinstance(made, kind)
    assert tuple(made.shape) == (tuple(shape) if isinstance(shape, (tuple, list)) else (shape,))
    assert made.dtype == dtype


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (-1, "i4"),
        ((2, -1), "i4"),
        (1.5, "i4"),
        ("ab", "i4"),
        (None, "i4"),
        (True, "i4"),
        ([True], torch.int8),
        (2, "nonsense"),
        (2, object),
        (2, torch),
    ],
)
def test_what_cannot_be_allocated(make: Make, shape: Any, dtype: Any) -> None:
    with pytest.raises(ConfigError):
        make().allocate(shape, dtype)


@pytest.mark.parametrize("dtype", ["f8", torch.float64])
@pytest.mark.parametrize("shape", [(2**50, 2**10), (2**62, 2**62)])
def test_no_memory(make: Make, shape: Any, dtype: Any) -> None:
    with pytest.raises(SegmentError, match="no memory"):
        make().allocate(shape, dtype)


# Processes


def test_it_cannot_be_pickled(make: Make) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dump(make(), io.BytesIO())


def test_another_process_number_means_forked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = make()
    connector.put(0, 1, "r", "x")
    real = os.getpid()
    with connector._space.changed, monkeypatch.context() as patch:
        # The lock is held, as it may be at a fork: nothing below may try to take it from another thread.
        patch.setattr(os, "getpid", lambda: real + 1)
        calls: list[Callable[[], Any]] = [
            lambda: connector.put(0, 1, "r", "x"),
            lambda: connector.get(0, 1, "r", {}),
            lambda: connector.allocate(1, "i4"),
        ]
        for call in calls:
            with pytest.raises(ForkedConnector, match=f"made in process {real}, before the fork"):
                run(call).result(10)
        for quiet in (lambda: connector.cleanup("r"), connector.close, connector.__del__):
            run(quiet).result(10)
        assert run(connector.health).result(10)["status"] == "forked"
    assert connector.health()["status"] == "ok"
    assert connector.health()["live_blocks"] == 1


def test_a_child_has_spaces_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _spaces.this_process()
    assert _spaces.this_process() is mine
    monkeypatch.setattr(_spaces, "_processes", dict(_spaces._processes))
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    child = _spaces.this_process()
    assert child is not mine
    assert child.id != mine.id
    assert child.space("n") is not mine.space("n")
