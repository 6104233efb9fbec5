"""The contract of December 2025: put's metadata leads to the data, and carries it where it is small."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

Make = Callable[..., Any]


@pytest.fixture
def make(make_told: Make) -> Make:
    return make_told


def padded(make: Make, total: int) -> bytes:
    """Bytes whose payload is serialized to exactly `total` bytes."""
    # Not `with`: the host's class of that generation is none to use so.
    extra = make().put("0", "1", "probe", bytes(total // 2))[1] - total // 2
    return bytes(total - extra)


def test_small_payloads_travel_inside_the_metadata(make: Make) -> None:
    sender, receiver = make(), make()
    ok, size, metadata = sender.put(from_stage="0", to_stage="1", request_id="r", data={"a": (1, 2)})
    assert ok is True
    assert set(metadata) == {"inline_bytes", "size"}
    assert type(metadata["inline_bytes"]) is bytes
    assert len(metadata["inline_bytes"]) == metadata["size"] == size
    carried = pickle.loads(pickle.dumps(metadata))
    assert receiver.get("0", "1", "r", metadata=carried) == ({"a": [1, 2]}, size)
    assert sender.health()["inline_writes"] == 1


def test_at_exactly_the_threshold_it_is_inline(make: Make) -> None:
    sender, receiver = make(), make()
    assert sender.threshold == sender.health()["threshold"] == 65536
    at = padded(make, 65536)
    for data, place in ((at, "inline_bytes"), (at + b"x", "shm")):
        ok, size, metadata = sender.put("0", "1", "r", data)
        assert ok
        assert size == 65536 + (place == "shm")
        assert place in metadata
        assert receiver.get("0", "1", "r", metadata) == (data, size)
    assert (sender.health()["shm_writes"], sender.health()["inline_writes"]) == (1, 1)


def test_large_payloads_go_to_shared_memory_once(make: Make) -> None:
    sender, receiver = make(), make()
    ok, size, metadata = sender.put("0", "1", "r", {"t": torch.ones(100_000)})
    assert ok
    assert metadata["size"] == metadata["shm"]["size"] == size
    assert len(pickle.dumps(metadata)) < 4096
    got, said = receiver.get("0", "1", "r", pickle.loads(pickle.dumps(metadata)))
    assert said == size
    assert bool((got["t"] == 1).all())
    got["t"].zero_()
    assert receiver.get("0", "1", "r", metadata) is None


def test_two_edges_of_one_request_do_not_meet(make: Make) -> None:
    """The orchestrator's adapter uses the bare request id on every edge."""
    sender, receiver = make(), make()
    _, _, first = sender.put("0", "1", "r", {"t": torch.zeros(100_000)})
    _, _, second = sender.put("1", "2", "r", {"t": torch.ones(100_000)})
    assert bool((receiver.get("1", "2", "r", second)[0]["t"] == 1).all())
    assert bool((receiver.get("0", "1", "r", first)[0]["t"] == 0).all())


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"other": 1}, "text", 5, [1], {"shm": 1}, {"shm": {"name": "psm_x", "size": 5}, "size": 5},
     {"inline_bytes": 5, "size": 5}, {"inline_bytes": b"damaged", "size": 7}, {"shm": {"name": "../x"}, "size": 1}],
    ids=str,
)  # fmt: skip
def test_foreign_metadata_gives_none_and_one_line(make: Make, metadata: Any, errors: Callable[[], list[str]]) -> None:
    sender, receiver = make(), make()
    sender.put("0", "1", "r", {"t": torch.ones(100_000)})
    assert receiver.get("0", "1", "r", metadata) is None
    assert len(errors()) == 1


def test_the_legacy_form_is_read(make: Make) -> None:
    receiver = make()
    thing = {"a": 1}
    assert receiver.get("0", "1", "r", {"inline": thing, "size": 9}) == (thing, 9)
    assert receiver.get("0", "1", "r", {"inline": thing})[0] is thing


def test_under_ray_everything_is_inline(make: Make, shm_names: Callable[[], list[str]]) -> None:
    sender, receiver = make(shm_threshold_bytes=sys.maxsize), make(shm_threshold_bytes=sys.maxsize)
    ok, size, metadata = sender.put("0", "1", "r", {"t": torch.ones(1_000_000)})
    assert ok
    assert len(metadata["inline_bytes"]) == size
    assert bool((receiver.get("0", "1", "r", metadata)[0]["t"] == 1).all())
    assert not shm_names()


def test_failures_answer_and_do_not_raise(make: Make, errors: Callable[[], list[str]]) -> None:
    sender = make(max_bytes=1 << 20, segment_bytes=1 << 20)
    assert sender.put("0", "1", "r", 1j) == (False, 0, None)
    assert sender.put("0", "1", "r", bytes(2 << 20)) == (False, 0, None)
    assert len(errors()) == 2
    assert sender.health()["status"] == "healthy"


def test_unread_payloads_can_be_cleaned_up(make: Make) -> None:
    sender, receiver = make(), make()
    _, _, metadata = sender.put("0", "1", "r", bytes(100_000))
    _, _, other = sender.put("0", "1", "r1", bytes(100_000))
    assert sender.cleanup("r") is None
    assert receiver.get("0", "1", "r", metadata) is None
    assert receiver.get("0", "1", "r1", other)[0] == bytes(100_000)


def test_after_close(make: Make, errors: Callable[[], list[str]]) -> None:
    sender = make()
    _, _, metadata = sender.put("0", "1", "r", 1)
    sender.close()
    sender.close()
    assert sender.put("0", "1", "r", 1) == (False, 0, None)
    assert sender.get("0", "1", "r", metadata) is None
    assert sender.cleanup("r") is None
    assert not errors()
