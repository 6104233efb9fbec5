"""Target `metadata`: what `get` does with a dict that did not come from `put` like that."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from fuzz.chance import Chance
from fuzz.frames import Maker
from fuzz.shared import MOUNT, own_namespace

from omni_fastshm import segments
from omni_fastshm.connectors.in_process import InProcessConnector
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.directory import leave_directory, open_directory

EDGE = ("a", "b", "r")
STRANGE = ["0" * 16, "f" * 16, "G" * 16, "\u0660" * 16]


def nested(depth: int) -> Any:
    made: Any = []
    for _ in range(depth):
        made = {"shm": made}
    return made


class Metadata:
    """Real metadata of every kind, with something else in some of its places."""

    def __init__(self) -> None:
        small = {**own_namespace(), "segment_bytes": 1 << 20}
        self._payload = np.arange(9000)
        self._producer = SharedMemoryConnector(small)
        self._consumer = SharedMemoryConnector(own_namespace())
        self._local = InProcessConnector(own_namespace())
        self._gone = SharedMemoryConnector(small)
        self._stale = self._gone.put(*EDGE, self._payload)[2]
        self._gone.close()
        self._foreign = SharedMemoryConnector({**small, "namespace": self._neighbour()})
        self._abroad = self._foreign.put(*EDGE, self._payload)[2]["shm"]["name"]
        self._control = self._producer.put(*EDGE, self._payload)[2]["shm"]["name"]
        self._frames = Maker()
        self._directory = open_directory(own_namespace()["namespace"])
        self._values = self._hostile()

    @staticmethod
    def _neighbour() -> str:
        return str(own_namespace()["namespace"]) + "-n"

    def _hostile(self) -> list[Any]:
        stem, uid = self._control.removesuffix(".ctl"), os.geteuid()
        names = [
            stem, stem + ".d0", stem + ".ctl\0", stem + ".ctl/", "/" + self._control, f"{stem}.CTL",
            self._control + "\n", self._abroad,
            self._control.replace(f".{uid}.", f".{uid + 1}."), self._control.replace(f".{uid}.", f".0{uid}."),
            self._control.replace(f".{uid}.", ".\u0660."), f"omnifs.{'9' * 5000}.x.{'0' * 16}.ctl", "omnifs.0..ctl",
            segments.directory_name(own_namespace()["namespace"]), f"../..{MOUNT}/{self._control}",
            *(f"omnifs.{uid}.{own_namespace()['namespace']}.{strange}.ctl" for strange in STRANGE), "a" * 10**6,
        ]  # fmt: skip
        return [
            *names, None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**5000, 0.0,
            1e308, float("nan"),
            float("inf"), b"", b"x", bytearray(b"abc"), dict, list, (), set, lambda: nested(3), lambda: nested(2000),
            segments.host_identity(),
            "//", "\ud800", "\0", "é" * 300, memoryview(b"abc"), memoryview(b"abcdef")[::2], EDGE, 1j,
        ]  # fmt: skip

    def _value(self, chance: Chance) -> Any:
        value = chance.pick(self._values)
        return value() if callable(value) else value  # what can be changed is made anew each time

    def _sent(self, chance: Chance) -> tuple[Any, Any]:
        """Fresh metadata and the connector that is to read it."""
        kind = chance.randrange(8)
        if kind < 3:
            return self._producer.put(*EDGE, self._payload, consumers=chance.pick((1, 2)))[2], self._consumer
        if kind == 3:
            return self._producer.put(*EDGE, {"k": [1, (2, "x")], "a": np.ones(5)})[2], self._consumer
        if kind == 4:
            frame = self._frames.make(chance)[0]
            return {"inline_bytes": frame, "size": len(frame)}, self._consumer
        if kind == 5:
            return copy.deepcopy(self._stale), self._consumer
        return self._local.put(*EDGE, self._payload)[2], self._local

    def _changed(self, metadata: Any, chance: Chance) -> Any:
        for _ in range(chance.pick((0, 1, 1, 1, 2, 4))):
            holder = {"": metadata}
            container, key = chance.pick(list(_places(holder)))
            kind = chance.randrange(8)
            if kind == 0:
                del container[key]
            elif kind == 1:
                container[
                    chance.pick(("shm", "inline_bytes", "size", "in_process", "name", chance.text(), 7, None))
                ] = self._value(chance)
            elif kind == 2 and type(container[key]) is int:
                container[key] = chance.near(container[key] & (1 << 64) - 1, 64)
            elif kind == 3 and type(container[key]) is str:
                container[key] = chance.pick(
                    (chance.text(), container[key][:-1], container[key] + "\0", container[key].upper())
                )
            elif kind == 4 and type(container[key]) in (bytes, bytearray):
                container[key] = chance.changed(bytes(container[key]))
            else:
                container[key] = self._value(chance)
            metadata = holder.get("", self._value(chance))
        return metadata

    def run(self, chance: Chance) -> str:
        real, connector = self._sent(chance)
        before = copy.deepcopy(real)
        metadata = self._changed(real, chance)
        if chance.one_in(20):
            connector = chance.pick((self._consumer, self._local, self._producer))
        call = (
            EDGE
            if not chance.one_in(10)
            else chance.pick((("a", "b", "x"), ("b", "a", "r"), ("", "b", "r"), (0, 1, 2)))
        )
        got = connector.get(*call, metadata, copy=chance.pick((None, True, False)))
        if got is None:
            return "none"
        if "inline_bytes" not in before and "inline_bytes" not in metadata:
            assert type(got[0]) is np.ndarray, "somebody else's payload"
            assert np.array_equal(got[0], self._payload), "wrong bytes"
        return "read"

    def check(self) -> None:
        self._producer.cleanup("r")
        self._local.cleanup("r")
        for connector in (self._producer, self._consumer, self._local):
            assert not connector.health()["leases"], "a lease is left"

    def describe(self, chance: Chance) -> str:
        metadata = self._changed(self._sent(chance)[0], chance)
        return json.dumps(metadata, default=repr, indent=1, skipkeys=True)[:4000]

    def close(self) -> None:
        for connector in (self._producer, self._consumer, self._local, self._foreign):
            connector.close()
        if self._directory is not None:
            leave_directory(self._directory)


def _places(node: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    todo = [node]
    while todo:
        container = todo.pop()
        for key, inner in container.items():
            yield container, key
            if type(inner) is dict and len(todo) < 50:
                todo.append(inner)
