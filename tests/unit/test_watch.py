"""Looking by key without taking, and waiting for arrivals."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from omni_fastshm import ConfigError, SharedMemoryConnector
from omni_fastshm.segments import MOUNT


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: connect(SharedMemoryConnector, key_lookup=True)


def test_has_takes_nothing(make: Callable[..., Any]) -> None:
    sender, receiver = make(), make()
    watch, other = receiver.watch("a", "b"), receiver.watch("a", "c")
    assert not watch.has("k")
    sender.put("a", "b", "k", 1)
    assert watch.has("k")
    assert watch.has("k")
    assert not other.has("k")
    assert not watch.has("kk")
    assert receiver.get("a", "b", "k")[0] == 1
    assert not watch.has("k")


def test_a_cancel_counts(make: Callable[..., Any]) -> None:
    sender, receiver = make(), make()
    sender.put("a", "b", "k", 1)
    sender.put("a", "c", "k", 1)
    sender.put("a", "b", "k2", 1)
    assert receiver.cancel("k") == 2
    assert receiver.cancel("k") == 0
    assert receiver.watch("a", "b").has("k2")
    receiver.close()
    assert receiver.cancel("k2") == 0


def test_the_generation_counts_arrivals(make: Callable[..., Any], run_thread: Callable[..., Any]) -> None:
    sender, receiver = make(), make()
    watch = receiver.watch("a", "b")
    before = watch.generation()
    assert not watch.wait(before, 0.01)
    assert not watch.wait(before, -1)
    waiting = run_thread(watch.wait, before, 30)
    sender.put("a", "b", "k", 1)
    assert waiting.result(30)
    assert watch.generation() != before
    assert watch.wait(before, 0)


def test_a_listener_hears_its_own_name_alone(make: Callable[..., Any]) -> None:
    sender, receiver = make(), make()
    listening, ringing = receiver.watch("a", "b", "me"), sender.watch("a", "b")
    before = listening.generation()
    sender.put("a", "b", "k", 1)
    assert not listening.wait(before, 0.01)
    assert listening.has("k")
    ringing.ring("somebody")
    assert not listening.wait(before, 0.01)
    ringing.ring("me")
    assert listening.wait(before, 30)


def test_it_goes_on_where_the_directory_was_removed(
    make: Callable[..., Any], shm_names: Callable[[], list[str]]
) -> None:
    receiver = make()
    watch = receiver.watch("a", "b")
    before = watch.generation()
    os.unlink(f"{MOUNT}/{shm_names()[0]}")
    assert watch.wait(before, 20)  # a new one: whatever arrived in between is not told by the old one's bell
    assert make().put("a", "b", "k", 1)[0]
    assert watch.has("k")


def test_after_close(make: Callable[..., Any], run_thread: Callable[..., Any]) -> None:
    receiver = make()
    watch = receiver.watch("a", "b")
    before = watch.generation()
    waiting = run_thread(watch.wait, before, 30)
    receiver.close()
    waiting.result(20)
    assert watch.generation() is None
    assert not watch.has("k")
    assert not watch.wait(before, 30)
    watch.ring("x")


def test_an_edge_that_is_none(make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError):
        make().watch("a", "a")
