"""Scenes in which one process, the victim, dies at a named place, and another goes on; for test_fault_points.py.

Runs against a core built with OMNI_FASTSHM_FAULTS. Reads one request as JSON per line, ``{"scene", "place", "skip"}``,
plays it in a fork of itself, and answers ``{"error", "died", "passed"}``; `passed` are the places that the victim saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import posix_ipc
from support import leftovers

from omni_fastshm import codec, janitor, segments
from omni_fastshm._core import CONTROL_SIZE, LOCK_OWNER, READER_SLOTS, Segment
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.consumer import open_inbox
from omni_fastshm.keys import edge_hash, request_hash

KIB = 1024
SMALL = {
    "segment_bytes": 64 * KIB,
    "max_bytes": 256 * KIB,
    "put_timeout_s": 0.1,
    "shm_threshold_bytes": 0,
    "orphan_ttl_s": 0.0,
    "idle_segment_s": 0.0,
    "key_lookup": True,
}
SLOW_S = 10.0  # no call of a survivor waits for the dead one: far above what a busy machine adds


def payload(value: int, nbytes: int = 20 * KIB) -> dict[str, Any]:
    return {"n": value, "x": np.full(nbytes // 8, value)}


def unowned(name: str) -> bool:
    """A finished control segment whose producer is dead."""
    fd = segments.open_descriptor(name)
    assert fd is not None
    try:
        finished = Segment.inspect(fd, name)[0] == CONTROL_SIZE and not Segment.locked(fd, name, LOCK_OWNER)
        return finished and os.pread(fd, 8, 0) != bytes(8)
    finally:
        os.close(fd)


def whole(found: Any, value: int) -> bool:
    return bool(found[0]["n"] == value and (found[0]["x"] == value).all())


class World:
    """What survivor and victim share: a namespace, and the survivor's notes."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.kept: list[Any] = []

    def connect(self, **settings: Any) -> SharedMemoryConnector:
        return SharedMemoryConnector({**SMALL, "namespace": self.namespace, **settings})

    def put(self, connector: SharedMemoryConnector, key: str, value: int, nbytes: int = 20 * KIB, **kw: Any) -> None:
        assert connector.put("a", "b", key, payload(value, nbytes), **kw)[0], f"no room for {key}"

    def all_takable_is_whole(self, values: dict[str, tuple[int, ...]]) -> None:
        """Whatever a dead producer left to take, also what no key leads to yet, is a payload that was put."""
        for name in leftovers.names(self.namespace):
            inbox = open_inbox(name) if name.endswith(".ctl") and unowned(name) else None
            for block, sequence, pending, *_ in inbox.blocks() if inbox is not None else ():
                lease = inbox.hold(block, sequence) if pending else None
                if lease is None:
                    continue
                found = codec.decode(lease, source=lease, copy=True), lease.size
                keys = [key for key in values if lease.key == (edge_hash("a", "b"), *request_hash(key))]
                assert keys, "a block under a key that nobody put"
                assert any(whole(found, value) for value in values[keys[0]]), f"{keys[0]} holds something else"
                lease.release()

    def goes_on(self, connector: SharedMemoryConnector) -> None:
        """The survivor's own work: its whole ring is usable, payloads arrive, nothing waits."""
        start = time.monotonic()
        for round_, nbytes in enumerate((20 * KIB, 250 * KIB, 40 * KIB)):
            self.put(connector, "own", round_, nbytes)
            assert whole(connector.get("a", "b", "own", timeout=0.3), round_)
        assert time.monotonic() - start < SLOW_S, "the survivor waited for the dead one"


class Scene:
    """One kind of victim. The survivor calls `before` and `after`, the victim `act`."""

    def before(self, world: World) -> None:
        """Prepare, as the survivor-to-be."""

    def ready(self, world: World) -> None:
        """Prepare, as the victim, without dying yet."""

    def meanwhile(self, world: World) -> None:
        """As the survivor, between the victim's `ready` and its `act`."""

    def act(self, world: World) -> None:
        """What the victim dies in."""
        raise NotImplementedError

    def after(self, world: World, passed: set[str]) -> None:
        """What must hold for the survivor; `passed` are the places that the victim came by."""


class First(Scene):
    """A producer is the first of its namespace: makes everything, puts, replaces, grows, takes, closes."""

    def act(self, world: World) -> None:
        connector = world.connect()
        for value in (1, 2):
            world.put(connector, "x", value)
        for value in range(6):
            world.put(connector, f"more{value}", value, 50 * KIB if value < 3 else KIB)
        for value in range(6):
            assert connector.get("a", "b", f"more{value}") is not None
        connector.health()  # gives idle segments back
        world.put(connector, "x", 3)
        connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        world.all_takable_is_whole({"x": (1, 2, 3), **{f"more{value}": (value,) for value in range(6)}})
        world.kept.append(connector := world.connect())
        found = connector.get("a", "b", "x")
        assert found is None or any(whole(found, value) for value in (1, 2, 3)), "a payload that nobody put"
        world.goes_on(connector)


class Producer(First):
    """The same beside a living endpoint that has the namespace open and waits for the payload."""

    def before(self, world: World) -> None:
        connector = world.connect(orphan_ttl_s=60.0)
        world.kept.append(connector)
        world.put(connector, "mine", 7)
        self.found: list[Any] = []
        self.waiter = threading.Thread(target=lambda: self.found.append(connector.get("a", "b", "awaited", timeout=20)))

    def ready(self, world: World) -> None:
        self.connector = world.connect(orphan_ttl_s=0.4)

    def meanwhile(self, world: World) -> None:
        self.waiter.start()

    def act(self, world: World) -> None:
        world.put(self.connector, "awaited", 9)
        for value in (1, 2):
            world.put(self.connector, "x", value, 50 * KIB)
        assert self.connector.get("a", "b", "x") is not None
        world.put(self.connector, "x", 3)
        deadline = time.monotonic() + 20
        while self.connector._producer.outbox.pending() > 1:  # the waiter is on its way
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        connector = world.kept[0]
        there = "ofs_keys_insert place after" in passed  # the first payload is the awaited one
        if not there:
            world.put(connector, "awaited", 10)
        self.waiter.join(20)
        assert self.found[0] is not None, "the waiting get was not woken"
        assert whole(self.found[0], 9 if there else 10)
        self.found.clear()
        world.all_takable_is_whole({"awaited": (9,), "x": (1, 2, 3)})
        assert whole(connector.get("a", "b", "mine"), 7)
        found = connector.get("a", "b", "x")
        assert found is None or any(whole(found, value) for value in (1, 2, 3))
        world.goes_on(connector)


class Consumer(Scene):
    """Takes one payload and keeps views of it, takes another and lets go."""

    def before(self, world: World) -> None:
        connector = world.connect()
        world.kept.append(connector)
        for n, key in enumerate(("y", "z", "shared")):
            world.put(connector, key, n, consumers=2 if key == "shared" else 1)

    def act(self, world: World) -> None:
        connector = world.connect()
        views = connector.get("a", "b", "y")
        assert whole(views, 0)
        for key in ("shared", "z"):
            connector.get("a", "b", key)
        del views
        connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        connector = world.kept[0]
        takes = [f"ofs_block_take &block->word {side}" for side in ("before", "after")]
        for n, key in enumerate(("y", "shared", "shared", "z")):
            found = connector.get("a", "b", key)
            assert found is None or whole(found, (0, 2, 2, 1)[n])
            if takes[1] not in passed:  # a reader that dies before its take uses nothing up
                assert found is not None, f"{key} is lost"
        del found
        world.goes_on(connector)


class LateComer(Consumer):
    """The same when all reader slots have owners: under the slot that all late-comers share."""

    def before(self, world: World) -> None:
        super().before(world)
        name = next(n for n in leftovers.names(world.namespace) if n.endswith(".ctl"))
        fd = segments.open_descriptor(name)
        assert fd is not None
        for slot in range(READER_SLOTS - 1):
            assert Segment.lock(fd, name, 1 + slot)
        self.descriptor = fd

    def after(self, world: World, passed: set[str]) -> None:
        super().after(world, passed)
        os.close(self.descriptor)


class Canceller(Scene):
    """Cancels a request of another endpoint."""

    def before(self, world: World) -> None:
        connector = world.connect()
        world.kept.append(connector)
        world.put(connector, "keep", 1)
        world.put(connector, "drop", 2)

    def act(self, world: World) -> None:
        connector = world.connect()
        connector.cleanup("drop")
        connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        connector = world.kept[0]
        found = connector.get("a", "b", "drop")
        assert found is None or whole(found, 2)
        assert whole(connector.get("a", "b", "keep"), 1)
        del found
        world.goes_on(connector)


class WaitsForRoom(Scene):
    """A put that waits, with the survivor holding everything."""

    def before(self, world: World) -> None:
        world.kept.append(world.connect())

    def ready(self, world: World) -> None:
        self.connector = world.connect(max_bytes=64 * KIB)
        world.put(self.connector, "full", 5, 60 * KIB)

    def meanwhile(self, world: World) -> None:
        self.view = world.kept[0].get("a", "b", "full")

    def act(self, world: World) -> None:
        self.connector.put("a", "b", "more", payload(6, 60 * KIB))
        self.connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        assert whole(self.view, 5), "a view changed when its producer died"
        del self.view
        world.goes_on(world.kept[0])


class WaitsForArrival(Scene):
    """A get that waits."""

    def before(self, world: World) -> None:
        world.kept.append(world.connect())

    def act(self, world: World) -> None:
        connector = world.connect()
        connector.get("a", "b", "nothing", timeout=0.2)  # long enough to come to wait
        connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        world.goes_on(world.kept[0])


def killed(body: Callable[[], None]) -> None:
    """Run something in a fork that then dies by SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


class Janitor(Scene):
    """Tidies up after a producer that died with untaken payloads and a reader that died with a hold."""

    def before(self, world: World) -> None:
        keep: list[Any] = []

        def produce() -> None:
            keep.append(producer := world.connect(orphan_ttl_s=0.0))
            for n, key in enumerate(("taken", "left", "held")):
                world.put(producer, key, n, 50 * KIB)
            killed(lambda: keep.append(world.connect(orphan_ttl_s=0.0).get("a", "b", "taken")))

        killed(produce)

    def act(self, world: World) -> None:
        janitor.sweep(world.namespace)

    def after(self, world: World, passed: set[str]) -> None:
        world.kept.append(connector := world.connect())
        world.goes_on(connector)


class Reaper(Scene):
    """A producer whose ring is full of what a dead reader held."""

    def before(self, world: World) -> None:
        world.kept.append(world.connect())

    def ready(self, world: World) -> None:
        self.connector = world.connect(max_bytes=64 * KIB)
        world.put(self.connector, "held", 4, 60 * KIB)
        keep: list[Any] = []
        killed(lambda: keep.append(world.connect(max_bytes=64 * KIB).get("a", "b", "held")))

    def act(self, world: World) -> None:
        world.put(self.connector, "next", 5, 60 * KIB)
        self.connector.close()

    def after(self, world: World, passed: set[str]) -> None:
        world.goes_on(world.kept[0])


SCENES: dict[str, type[Scene]] = {
    scene.__name__: scene
    for scene in (
        First, Producer, Consumer, LateComer, Canceller, WaitsForRoom, WaitsForArrival, Janitor, Reaper
    )
}  # fmt: skip


class Names:
    """Places to die at around the calls that make and remove names; the core knows nothing of these."""

    def __init__(self, place: str | None, skip: int, log: str) -> None:
        self.place, self.skip, self.log = place, skip, log
        self.SharedMemory = self.around("name made", posix_ipc.SharedMemory)
        self.unlink_shared_memory = self.around("name removed", posix_ipc.unlink_shared_memory)
        os.fchmod = self.around("mode set", os.fchmod)

    def __getattr__(self, name: str) -> Any:
        return getattr(posix_ipc, name)

    def around(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made = what != "name made" or len(args) > 1
            if made:
                self.at(f"{what} before")
            result = call(*args, **kwargs)
            if made:
                self.at(f"{what} after")
            return result

        return wrapped

    def at(self, place: str) -> None:
        with open(self.log, "a") as file:
            file.write(place + "\n")
        if place == self.place:
            self.skip -= 1
            if self.skip < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def victim(scene: Scene, world: World, place: str | None, skip: int, log: str, say: int, go: int) -> None:
    """Ends by dying at the place, or with 0 when it does not come there."""
    try:
        scene.ready(world)
        os.write(say, b"1")
        os.read(go, 1)
        segments.posix_ipc = Names(place, skip, log)
        os.environ["OMNI_FASTSHM_FAULT_LOG"] = log
        if place is not None:
            os.environ["OMNI_FASTSHM_FAULT"], os.environ["OMNI_FASTSHM_FAULT_SKIP"] = place, str(skip)
        scene.act(world)
    except BaseException:
        traceback.print_exc()
        os._exit(9)
    os._exit(0)


def play(name: str, place: str | None, skip: int, log: str) -> bool:
    """One scene; did the victim die?"""
    world = World(f"fault{os.getpid()}")
    scene = SCENES[name]()
    scene.before(world)
    (hear, say), (wait, go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        victim(scene, world, place, skip, log, say, wait)
    os.close(say)  # or a victim that fails in `ready` would leave us waiting
    assert os.read(hear, 1), "the victim did not get ready"
    scene.meanwhile(world)
    os.write(go, b"1")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the victim ended with {status}"
    scene.after(world, set(passed(log)))
    for connector in world.kept:
        connector.close()
    world.kept.clear()
    deadline = time.monotonic() + 20
    while left := leftovers.names(world.namespace):
        assert time.monotonic() < deadline, f"left behind: {left}"
        janitor.sweep(world.namespace)
    return status != 0


def passed(log: str) -> list[str]:
    try:
        with open(log) as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def answer(request: dict[str, Any], log: str) -> dict[str, Any]:
    """Play a scene in a fork: it may leave threads, leases and locks in whatever state."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        try:
            died: Any = play(request["scene"], request["place"], request["skip"], log)
            error = ""
        except BaseException:
            died, error = None, traceback.format_exc()
            leftovers.remove(f"fault{os.getpid()}")
        os.write(write, json.dumps({"error": error, "died": died}).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else {"error": "the survivor died or hung", "died": None}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "passed")
        for line in sys.stdin:
            open(log, "w").close()
            reply = answer(json.loads(line), log)
            print(json.dumps({**reply, "passed": passed(log)}), flush=True)


if __name__ == "__main__":
    main()
