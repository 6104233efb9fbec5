"""FastMooncakeConnector: the same contract on a real store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omni_fastshm.integrations.vllm_omni import connector_class

SETTINGS: dict[str, Any] = {"master": "$OMNI_FASTSHM_TEST_MASTER", "host": "127.0.0.1", "segment": "64MB"}
OTHER = {**SETTINGS, "localbuf": "65MB"}  # another client: what it gets crosses the network


@pytest.fixture(autouse=True)
def _nothing_left_behind(namespace: str) -> None:
    """The store's client keeps threads and sockets for as long as it likes; its own tests look at what is left."""


@pytest.fixture
def pair(mooncake_master: Any, host: Any, namespace: str) -> Iterator[tuple[Any, Any]]:
    cls = connector_class("FastMooncakeConnector", keyed=True, host=host)
    with cls({**SETTINGS, "stage_id": 0}) as sender, cls({**OTHER, "stage_id": 1}) as receiver:
        yield sender, receiver


def test_the_key_leads_across(pair: tuple[Any, Any], errors: Callable[[], list[str]]) -> None:
    sender, receiver = pair
    assert (sender.stage_id, receiver.stage_id) == (0, 1)
    start = time.monotonic()
    for _ in range(10):
        assert receiver.get("0", "1", "r_0_0", {"source_host": "h", "source_port": 1}) is None
    assert time.monotonic() - start < 5  # the peer's sleeps a second for each
    data = {"t": torch.arange(100_000), "flag": torch.tensor(True), "ids": (1, 2)}
    ok, size, metadata = sender.put(from_stage="0", to_stage="1", put_key="r_0_0", data=data)
    assert ok
    assert set(metadata) == {"shm", "size"}
    got, said = receiver.get("0", "1", "r_0_0", metadata)
    assert (said, got["ids"], bool(got["flag"])) == (size, [1, 2], True)
    assert torch.equal(got["t"], data["t"])
    got["t"].zero_()
    assert receiver.get("0", "1", "r_0_0", metadata) is None
    sender.put("0", "1", "r_0_1", 1)
    assert receiver.get_with_deadline("0", "1", "r_0_1", None, deadline=time.monotonic() + 20)[0] == 1
    assert receiver.get_wakeup_generation() is None
    sender.put("0", "1", "r_0_2", 1)
    sender.cleanup("r_0_2")
    assert receiver.get("0", "1", "r_0_2") is None
    assert sender.put("0", "1", "r_0_3", {"x": object()}) == (False, 0, None)
    assert len(errors()) == 1
    assert sender.health()["status"] == "healthy"
    for connector in pair:
        connector.close()
        assert connector.put("0", "1", "k", 1) == (False, 0, None)
        assert connector.get("0", "1", "k") is None
        assert connector.health()["status"] == "closed"


def test_metadata_leads_across_in_december(mooncake_master: Any, namespace: str) -> None:
    cls = connector_class("FastMooncakeConnector", keyed=False)
    with cls(SETTINGS) as sender, cls(OTHER) as receiver:
        for data in (b"x" * 100, b"x" * 100_000):
            ok, size, metadata = sender.put("0", "1", "r", data)
            assert ok
            assert receiver.get("0", "1", "r", metadata) == (data, size)
