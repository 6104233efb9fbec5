"""A payload replaces another under the same key while somebody looks, and while its producer dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.child import ChildError, Children

from omni_fastshm import consumer
from omni_fastshm.connectors import shared_memory
from omni_fastshm.keys import stage_hash

SETTINGS = {"key_lookup": True, "shm_threshold_bytes": 0, "segment_bytes": 1 << 20, "max_bytes": 4 << 20}


@pytest.fixture
def ends(make: Any, namespace: str) -> tuple[Any, Any]:
    return make(**SETTINGS, namespace=namespace), make(**SETTINGS, namespace=namespace)


def test_a_look_that_missed_both_is_made_again(ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk through the table passes the new entry's place before it is made, and finds the old one cancelled."""
    producer, getter = ends
    producer.put("a", "b", "k", 1)
    real, looks = consumer.Consumer.find, []

    def find(self: Any, *args: Any) -> Any:
        looks.append(1)
        if len(looks) > 1:
            return real(self, *args)
        with monkeypatch.context() as patch:
            patch.setattr(consumer.Consumer, "find", real)
            producer.put("a", "b", "k", 2)
        return None

    monkeypatch.setattr(consumer.Consumer, "find", find)
    assert getter.get("a", "b", "k") == (2, producer.health()["bytes_transferred"] // 2)
    assert len(looks) == 2


def test_so_is_one_in_a_single_step(ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a reader that has a slot already, and finds and takes in one."""
    producer, getter = ends
    producer.put("a", "b", "k", 0)
    assert getter.get("a", "b", "k")[0] == 0
    producer.put("a", "b", "k", 1)
    real, looks = shared_memory.receive_newest, []

    def receive_newest(*args: Any) -> Any:
        looks.append(1)
        if len(looks) > 1:
            return real(*args)
        producer.put("a", "b", "k", 2)
        return None

    monkeypatch.setattr(shared_memory, "receive_newest", receive_newest)
    assert getter.get("a", "b", "k")[0] == 2
    assert len(looks) == 2


def test_other_payloads_of_its_stage_do_not_keep_a_get_for_ever(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, getter = ends
    producer.put("a", "b", "other", 0)
    real, looks = consumer.Consumer.producers, []

    def producers(self: Any, *args: Any) -> Any:
        looks.append(1)
        producer._directory.ring(stage_hash("b"))
        return real(self, *args)

    monkeypatch.setattr(consumer.Consumer, "producers", producers)
    assert getter.get("a", "b", "nothing") is None
    assert 1 < len(looks) <= 100


def test_what_a_dead_put_did_not_cancel_goes_when_its_successor_is_taken(
    make: Any, children: Children, namespace: str
) -> None:
    """The producer dies after it published the new payload and before it cancelled the old one."""
    settings = {**SETTINGS, "namespace": namespace}
    child = children.with_connector(**settings)
    getter = make(**settings)
    child.run(
        "import os, signal\n"
        "from omni_fastshm import consumer\n"
        "c.put('a', 'b', 'k', 1)\n"
        "consumer.Consumer.producers = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
    )
    child.killed = True
    with pytest.raises(ChildError, match="died"):
        child.run("c.put('a', 'b', 'k', 2)")
    assert getter.get("a", "b", "k")[0] == 2
    assert getter.get("a", "b", "k") is None, "the old payload after the new one"
    getter.close()
    make(**settings).close()  # its start runs the janitor


def test_what_is_replaced_among_several_producers(make: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "namespace": namespace}
    one, two, getter = make(**settings), make(**settings), make(**settings)
    with monkeypatch.context() as patch:
        patch.setattr(consumer.Consumer, "producers", lambda *_: ())  # neither put finds the other's payload
        one.put("a", "b", "k", np.full(9000, 1))
        two.put("a", "b", "k", np.full(9000, 2))
    assert (getter.get("a", "b", "k")[0] == 2).all()
    assert getter.get("a", "b", "k") is None
    assert one._producer.outbox.pending() == two._producer.outbox.pending() == 0
