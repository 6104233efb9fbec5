"""Any order of sending, receiving, device work, helper thread, errors, interrupts, cleanup and close: nothing is left,
nothing is seen half-made. Threads and devices move only when the machine says so.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import os
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import leftovers
from support.fake_device import REFUSED, FakeDevices

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ConnectorClosed, DeviceError
from omni_fastshm.staging import devices, parked, pins

pytestmark = pytest.mark.time_limit(300)

KIB = 1 << 10
NUMBERS = itertools.count()
PLACES = ("host", "0", "1")


class Hand:
    """An executor whose thread is whoever calls `step`."""

    def __init__(self) -> None:
        self.jobs: collections.deque[tuple[Future[Any], Any]] = collections.deque()

    def submit(self, send: Any, **how: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: send(**how)))
        return future

    def step(self) -> None:
        future, send = self.jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(send())
            except BaseException as error:
                future.set_exception(error.with_traceback(None))

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        while self.jobs:
            self.jobs.popleft()[0].cancel()


def leaf(number: int, index: int, size: int) -> Any:
    return torch.full((size // 4,), number * 100 + index, dtype=torch.int32)


class Interleavings(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 999), chunk=st.sampled_from([64 * KIB, 300_000, 1 << 20]), pin=st.booleans())
    def begin(self, seed: int, chunk: int, pin: bool) -> None:
        self.namespace = f"{os.environ['OMNI_FASTSHM_NAMESPACE']}-{next(NUMBERS)}"
        self.fake = FakeDevices(seed=seed)
        devices.use(self.fake)
        parked._helper = False
        self.chunk, pins._chunk_bytes, pins._warned = pins._chunk_bytes, chunk, True
        self.producer = self.build(pin)
        self.consumer = self.build(pin)
        self.shapes: dict[int, list[int]] = {}
        self.futures: dict[int, Future[Any]] = {}
        self.open: set[int] = set()  # ids that may be got
        self.held: list[tuple[int, Any]] = []
        self.number = 0

    def build(self, pin: bool) -> Any:
        made = SharedMemoryConnector(
            {
                "namespace": self.namespace,
                "key_lookup": True,
                "segment_bytes": 256 * KIB,
                "max_bytes": 1 << 20,
                "put_timeout_s": 0,
                "idle_segment_s": 0,
                "pin": pin or "auto",
            }
        )
        made._later._executor = Hand()  # type: ignore[assignment]
        return made

    # -- sending

    def payload(self, leaves: list[tuple[str, int]]) -> list[Any]:
        self.number += 1
        self.shapes[self.number] = [size for _, size in leaves]
        made = [leaf(self.number, index, size) for index, (_, size) in enumerate(leaves)]
        self.open.add(self.number)
        return [
            each if place == "host" else self.fake.tensor(each, int(place))
            for each, (place, _) in zip(made, leaves, strict=True)
        ]

    leaves = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from([0, 4, 5 * KIB, 90_000, 250_000])), max_size=4)

    @rule(leaves=leaves)
    def put(self, leaves: list[tuple[str, int]]) -> None:
        ok, _, _ = self.producer.put("a", "b", self.number + 1, self.payload(leaves))
        if not ok:
            self.open.discard(self.number)

    @rule(leaves=leaves)
    def put_later(self, leaves: list[tuple[str, int]]) -> None:
        self.futures[self.number] = self.producer.put("a", "b", self.number + 1, self.payload(leaves), wait=False)

    @rule(leaves=leaves, fault=st.sampled_from(["fail_copies", "fail_enqueue", "interrupt"]), later=st.booleans())
    def put_that_fails(self, leaves: list[tuple[str, int]], fault: str, later: bool) -> None:
        payload = self.payload(leaves)
        setattr(self.fake, fault, True)
        try:
            answer = self.producer.put("a", "b", self.number, payload, wait=not later)
            if later:
                while self.producer._later._executor.jobs:
                    self.step_helper()
                answer.result(0)
        except (DeviceError, KeyboardInterrupt, CancelledError) as error:
            self.open.discard(self.number)
            error.__traceback__ = None
        setattr(self.fake, fault, False)

    @precondition(lambda self: self.producer._later._executor.jobs)
    @rule()
    def step_helper(self) -> None:
        self.producer._later._executor.step()

    @precondition(lambda self: self.futures)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.futures)))
        if self.futures.pop(number).cancel():
            self.open.discard(number)

    # -- devices

    @rule(steps=st.integers(1, 6))
    def devices_work(self, steps: int) -> None:
        self.fake.step(steps)

    @rule()
    def poll(self) -> None:
        parked.poll()

    @rule(good=st.integers(0, 2))
    def the_driver_refuses(self, good: int) -> None:
        self.fake.refuse = [*[0] * good, REFUSED]

    # -- receiving

    @precondition(lambda self: self.open)
    @rule(data=st.data(), device=st.sampled_from([None, "meta", "meta:1", {"[0]": "meta", "[2]": "meta:1"}]))
    def get(self, data: Any, device: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        got = self.consumer.get("a", "b", number, device=device)
        if got is None:
            return
        self.open.discard(number)
        self.futures.pop(number, None)
        for index, each in enumerate(got[0]):
            if each.is_cpu:  # at once: nothing may be missing
                assert torch.equal(each, leaf(number, index, self.shapes[number][index]))
        self.held.append((number, got[0]))

    @precondition(lambda self: self.held)
    @rule(look=st.booleans())
    def let_go(self, look: bool) -> None:
        number, got = self.held.pop(0)
        if look:
            self.compare(number, got)

    def compare(self, number: int, got: list[Any]) -> None:
        for index, each in enumerate(got):
            here = each if each.is_cpu or not each.numel() else self.fake.read(each)
            if each.numel():
                assert torch.equal(here, leaf(number, index, self.shapes[number][index]))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cleanup(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.consumer.cleanup(number)

    # -- ends

    @rule(pin=st.booleans())
    def close_producer(self, pin: bool) -> None:
        self.producer.close()
        with contextlib.suppress(ConnectorClosed):
            self.producer.put("a", "b", "late", [1], wait=False)
            raise AssertionError("a closed connector took something")
        self.producer = self.build(pin)
        self.open.clear()

    @rule(pin=st.booleans())
    def close_consumer(self, pin: bool) -> None:
        self.consumer.close()
        self.consumer = self.build(pin)

    @invariant()
    def the_driver_has_seen_nothing_wrong(self) -> None:
        assert not getattr(self, "fake", None) or not self.fake.violations

    def teardown(self) -> None:
        if not hasattr(self, "fake"):
            return
        try:
            while self.producer._later._executor.jobs:
                self.producer._later._executor.step()
            for number, got in self.held:
                self.compare(number, got)
            self.held.clear()
            got = None  # type: ignore[assignment]
            self.fake.run_all()
            parked.poll()
            assert not len(parked)
            gc.collect()
            assert self.consumer.health()["leases"] == 0
            for number in self.shapes:
                self.consumer.cleanup(number)
            health = self.producer.health()
            assert (health["used_bytes"], health["live_blocks"]) == (0, 0)
            for connector in (self.producer, self.consumer):
                connector.close()
            self.futures.clear()
            del self.producer, self.consumer, connector
            gc.collect()
            assert not self.fake.registered
            assert self.fake.registrations == self.fake.unregistrations
            assert not self.fake.violations
            assert not self.fake.pending
            assert pins.total == 0
            assert not leftovers.names(self.namespace)
        finally:
            parked._helper = True
            pins._chunk_bytes, pins._warned = self.chunk, False
            devices.drop("meta")


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
