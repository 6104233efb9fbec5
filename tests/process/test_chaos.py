"""Processes that come, die and hold on to views, in random order: what anyone still looks at never changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.child import Child, Children

SMALL = {
    "segment_bytes": 1 << 20,
    "max_bytes": 4 << 20,
    "put_timeout_s": 0.05,
    "shm_threshold_bytes": 0,
    "orphan_ttl_s": 0.2,
    "idle_segment_s": 0,
}

STEPS = """
import logging
from omni_fastshm.errors import SegmentError
logging.getLogger("omni_fastshm").addHandler(logging.NullHandler())
held = {}

def put(rid, value, count, takers, lend):
    try:
        data = c.allocate(count, np.int64) if lend else np.empty(count, np.int64)
    except SegmentError:
        return None
    data[:] = value
    return c.put("a", "b", rid, {"n": value, "x": data, "small": np.full(5, value)}, consumers=takers)[2]

def take(rid, metadata):
    answer = c.get("a", "b", rid, metadata)
    if answer is not None:
        held[rid] = answer[0]
    return answer is not None

def wrong():
    return [(rid, int(v["n"])) for rid, v in held.items()
            if not (v["x"] == v["n"]).all() or not (v["small"] == v["n"]).all()]

def drop(rng):
    for rid in [r for r in held if rng.random() < 0.5]:
        del held[rid]
"""


class Zoo:
    """Some processes, each of which may send and receive, and what is on its way between them."""

    def __init__(self, children: Children, seed: int) -> None:
        self.children = children
        self.rng = random.Random(seed)
        self.members = [self.born() for _ in range(3)]
        self.on_the_way: list[tuple[str, Any, int]] = []
        self.taken = self.refused = self.lost = self.count = 0

    def born(self) -> Child:
        child = self.children.with_connector(**SMALL)
        child.run(STEPS)
        return child

    def send(self) -> None:
        self.count += 1
        takers = self.rng.choice([1, 1, 1, 2, 3])
        metadata = self.rng.choice(self.members).run(
            "result = put(rid, value, size, takers, lend)",
            rid=f"r{self.count}",
            value=self.count,
            size=self.rng.choice([10, 600, 9000, 30_000, 60_000, 200_000]),
            takers=takers,
            lend=self.rng.random() < 0.3,
        )
        if metadata is None:
            self.refused += 1
        else:
            self.on_the_way.append((f"r{self.count}", metadata, takers))

    def receive(self) -> None:
        if not self.on_the_way:
            return
        rid, metadata, takers = self.on_the_way.pop(self.rng.randrange(len(self.on_the_way)))
        if self.rng.choice(self.members).run("result = take(rid, md)", rid=rid, md=metadata):
            self.taken += 1
            if takers > 1:
                self.on_the_way.append((rid, metadata, takers - 1))
        else:
            self.lost += 1

    def cancel(self) -> None:
        if self.on_the_way:
            rid = self.rng.choice(self.on_the_way)[0]
            self.rng.choice(self.members).run("c.cleanup(rid)", rid=rid)

    def let_go(self) -> None:
        self.rng.choice(self.members).run("drop(rng)", rng=self.rng)

    def kill(self) -> None:
        self.members.pop(self.rng.randrange(len(self.members))).kill()
        self.members.append(self.born())

    def check(self) -> None:
        for member in self.members:
            assert member.run("result = wrong()") == [], f"after {self.count} payloads"


@pytest.mark.parametrize("seed", [1, 2])
def test_what_anyone_looks_at_never_changes(children: Children, shm_names: Any, seed: int) -> None:
    zoo = Zoo(children, seed)
    acts = [zoo.send, zoo.receive, zoo.cancel, zoo.let_go, zoo.kill]
    for step in range(500):
        zoo.rng.choices(acts, weights=[40, 40, 3, 15, 2])[0]()
        if step % 20 == 19:
            zoo.check()
    assert zoo.taken > 100, (zoo.taken, zoo.lost, zoo.refused)
    for member in zoo.members:
        member.run("held.clear(); c.close()")
    children.with_connector(orphan_ttl_s=0).run(
        "import time; time.sleep(0.3)  # the orphans' own time runs out\n"
        "c.close(); c = SharedMemoryConnector({}); c.close()"
    )
    assert shm_names() == []
