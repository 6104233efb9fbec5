"""Names that somebody else takes off the mount while they are in use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children

from omni_fastshm.connectors import shared_memory
from omni_fastshm.errors import SegmentError
from omni_fastshm.producer import Producer

SMALL = {"segment_bytes": 1 << 20, "max_bytes": 8 << 20, "shm_threshold_bytes": 0}
LOOKS = 8  # a single name is looked at every so many payloads


def remove(names: list[str]) -> None:
    assert names
    for name in names:
        os.unlink(leftovers.MOUNT / name)
    time.sleep(0.001)  # not to synchronise: looks are up to a tenth of this apart, and the next one shall be due


def values(nbytes: int = 100_000, value: int = 1) -> np.ndarray[Any, Any]:
    return np.full(nbytes // 8, value)


@pytest.mark.parametrize("end", [".ctl", ".d0", ".dir"])
@pytest.mark.parametrize("key_lookup", [False, True])
def test_each_single_name_is_missed_within_some_payloads(
    make: Any, namespace: str, shm_names: Callable[[], list[str]], end: str, key_lookup: bool
) -> None:
    producer = make(**SMALL, key_lookup=key_lookup, namespace=namespace)
    consumer = make(**SMALL, key_lookup=key_lookup, namespace=namespace)
    consumer.get("a", "b", "0", producer.put("a", "b", "0", values())[2])
    remove([name for name in shm_names() if name.endswith(end)])
    for n in range(LOOKS):
        ok, _, metadata = producer.put("a", "b", n, values(value=n))
        assert ok
        consumer.get("a", "b", n, metadata)
        time.sleep(0.0002)  # not to synchronise: looks are a tenth of a millisecond apart
    assert any(name.endswith(end) for name in shm_names()), "no new one was made"


def test_what_was_put_before_stays_takable_for_who_knows_it(make: Any, shm_names: Callable[[], list[str]]) -> None:
    producer, consumer = make(**SMALL), make(**SMALL)
    views = consumer.get("a", "b", "first", producer.put("a", "b", "first", values(value=1))[2])[0]
    waiting = producer.put("a", "b", "second", values(value=2))[2]
    stranger = make(**SMALL)
    remove(shm_names())
    assert producer.put("a", "b", "third", values(value=3))[0]

    assert producer.health()["live_blocks"] == 3
    assert (views == 1).all()
    assert (consumer.get("a", "b", "second", waiting)[0] == 2).all()
    assert stranger.get("a", "b", "second", waiting) is None
    del views
    health = producer.health()
    assert health["live_blocks"] == 1
    assert health["capacity_bytes"] <= 1 << 20, "the old memory is given back once unused"


def test_cleanup_reaches_what_lies_under_removed_names(make: Any, shm_names: Callable[[], list[str]]) -> None:
    producer, consumer = make(**SMALL), make(**SMALL)
    consumer.get("a", "b", "0", producer.put("a", "b", "0", values())[2])
    metadata = producer.put("a", "b", "old", values())[2]
    remove(shm_names())
    producer.put("a", "b", "new", values())
    producer.cleanup("old")
    assert consumer.get("a", "b", "old", metadata) is None


def test_a_waiting_get_by_key_moves_to_the_new_directory(
    make: Any, namespace: str, shm_names: Callable[[], list[str]], run_thread: Any
) -> None:
    settings = {**SMALL, "key_lookup": True, "namespace": namespace}
    producer, consumer = make(**settings), make(**settings)
    producer.put("a", "b", "0", values())
    future = run_thread(consumer.get, "a", "b", "later", timeout=10)
    remove(shm_names())
    for n in range(LOOKS):
        producer.put("a", "b", f"other{n}", values())
        time.sleep(0.0002)  # as above
    assert producer.put("a", "b", "later", values(value=7))[0]
    assert (future.result(10)[0] == 7).all()


def test_a_loan_in_removed_memory_is_refused_and_the_next_one_is_fine(
    make: Any, shm_names: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make(**SMALL), make(**SMALL)
    loan = producer.allocate(20_000, np.int64)
    loan[:] = 5
    remove(shm_names())
    assert producer.put("a", "b", "lost", loan) == (False, 0, None)
    assert "lost" in caplog.text
    assert producer.health()["refused"] == 1
    ok, _, metadata = producer.put("a", "b", "again", loan)
    assert ok, "it is copied now"
    assert (consumer.get("a", "b", "again", metadata)[0] == 5).all()


def test_a_new_process_reaches_what_is_put_after_everything_was_removed(
    make: Any, namespace: str, children: Children, shm_names: Callable[[], list[str]]
) -> None:
    settings = {**SMALL, "key_lookup": True, "namespace": namespace}
    producer = make(**settings)
    producer.put("a", "b", "before", values())
    remove(shm_names())
    ok, _, metadata = producer.put("a", "b", "after", values(value=4))
    assert ok
    child = children.with_connector(**settings)
    assert child.run("result = int(c.get('a', 'b', 'after')[0][0])") == 4
    assert child.run("result = c.get('a', 'b', 'after', md)", md=metadata) is None, "it was taken by its key"


def test_putting_threads_all_move_on(make: Any, shm_names: Callable[[], list[str]], run_thread: Any) -> None:
    # One segment: what the consumer has mapped is all there is. No payload is lost with a name it does not know yet.
    one = {**SMALL, "max_bytes": SMALL["segment_bytes"]}
    producer, consumer = make(**one, put_timeout_s=60), make(**SMALL)
    consumer.get("a", "b", "0", producer.put("a", "b", "0", values())[2])  # it has the old memory mapped

    def pump(thread: int) -> int:
        taken = 0
        for n in range(200):
            ok, _, metadata = producer.put("a", "b", f"{thread}-{n}", values(value=n))
            assert ok
            found = consumer.get("a", "b", f"{thread}-{n}", metadata)
            taken += found is not None and bool((found[0] == n).all())
        return taken

    futures = [run_thread(pump, thread) for thread in range(4)]
    remove(shm_names())
    assert sum(future.result(100) for future in futures) == 4 * 200


def test_allocate_moves_to_new_names(make: Any, shm_names: Callable[[], list[str]]) -> None:
    """A stage that only ever fills loans never comes to the look that `put` has."""
    producer, consumer = make(**SMALL), make(**SMALL)
    producer.put("a", "b", "0", values())
    remove(shm_names())
    loan = producer.allocate(20_000, np.int64)
    loan[:] = 5
    ok, _, metadata = producer.put("a", "b", "loan", loan)
    assert ok
    assert (consumer.get("a", "b", "loan", metadata)[0] == 5).all()


def test_a_directory_that_cannot_be_made_anew_is_tried_again(
    make: Any, namespace: str, shm_names: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "key_lookup": True, "namespace": namespace}
    getter = make(**settings)
    remove(shm_names())
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "open_directory", full)
        with pytest.raises(SegmentError, match="full"):
            getter.get("a", "b", "r")
    producer = make(**settings)
    producer.put("a", "b", "r", values(value=3))
    assert (getter.get("a", "b", "r")[0] == 3).all()


def full(*_: Any, **__: Any) -> Any:
    raise SegmentError("the mount is full", op="make")


def test_a_put_whose_producer_another_thread_gave_up_takes_the_new_one(
    make: Any, shm_names: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make(**SMALL)
    producer.put("a", "b", "0", values())
    producer.cleanup("0")
    old, real = producer._producer, Producer.room

    def room(self: Producer, size: int, timeout_s: float) -> Any:
        if self is old and not self.closed:
            producer._give_up(self)  # as another thread does, between the look at `_producer` and this call
            assert self.closed
        return real(self, size, timeout_s)

    monkeypatch.setattr(Producer, "room", room)
    assert producer.put("a", "b", "1", values(), consumers=2)[0]  # the everyday way does not ask for room
    assert producer._producer is not old


def test_a_put_whose_producer_was_given_up_on_its_everyday_way_takes_the_new_one(make: Any) -> None:
    producer = make(**SMALL)
    producer.put("a", "b", "0", values())
    producer.cleanup("0")
    old = producer._producer
    producer._give_up(old)  # as another thread does
    assert old.closed
    producer._path.producer = old  # as a put knows it that has looked at it before
    assert producer.put("a", "b", "1", values())[0]
    assert producer._producer is not old


def test_an_interrupt_while_one_lingers_still_removes_the_names_of_all(
    make: Any, shm_names: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = make(**SMALL, linger_s=5)
    connector.put("a", "b", "0", values())
    remove(shm_names())
    connector.put("a", "b", "1", values())
    assert len(connector._producers()) == 2

    real, lingered = Producer._linger, []

    def interrupted(self: Producer, deadline: float) -> None:
        lingered.append(self)
        if len(lingered) == 1:
            raise KeyboardInterrupt
        real(self, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(Producer, "_linger", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connector.close()
    assert shm_names() == []
