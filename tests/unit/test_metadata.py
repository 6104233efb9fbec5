"""Metadata whose fields hold anything: it is refused with a MetadataError, and what was sent stays gettable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import MetadataError

PLACE = ["name", "size", "block", "sequence", "from_stage", "to_stage", "request_id", "host"]
FIELDS = [("size",), ("shm",), *(("shm", name) for name in PLACE)]


class Hostile:
    """It can neither be shown nor compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


class Number(int):
    """Not quite an int."""


VALUES = {
    "huge": 10**5000,
    "huge negative": -(10**5000),
    "64 bits": 2**64,
    "63 bits": 2**63,
    "negative": -1,
    "none": None,
    "true": True,
    "float": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "text": "x",
    "empty": "",
    "surrogate": "\ud800",
    "long text": "x" * 100_000,
    "huge path": "/".join("abc"),
    "huge user": f"omnifs.{'9' * 5000}.elsewhere.0000000000000000.ctl",
    "other segment": "omnifs.0.elsewhere.0000000000000000.ctl",
    "bytes": b"x",
    "list": [10**5000],
    "dict": {"a": 10**5000},
    "int subclass": Number(3),
    "numpy": np.int64(1),
    "array": np.arange(3),
    "object": Hostile(),
}


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: connect(SharedMemoryConnector, **settings)


def changed(metadata: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(metadata)
    place = result
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return result


def refused_or_absent(connector: Any, metadata: Any) -> str:
    """The error, after it was shown to be short and printable; empty for None."""
    try:
        got = connector.get("a", "b", "r", metadata)
    except MetadataError as error:
        text = str(error)
        assert len(text) < 1000
        text.encode()
        return text
    assert got is None, "delivered"
    return ""


class TestFields:
    """One field is wrong."""

    @pytest.mark.parametrize("path", FIELDS, ids=".".join)
    def test_any_value_in_shared_memory_metadata(self, make: Any, path: tuple[str, ...]) -> None:
        connector = make()
        _, _, metadata = connector.put("a", "b", "r", np.arange(20_000))
        for what, value in VALUES.items():
            text = refused_or_absent(connector, changed(metadata, path, value))
            numbers = path[-1] in ("size", "block", "sequence")
            assert text or (path[-1] == "name" and what == "other segment"), f"{what} in {path} was no error"
            assert not numbers or path[-1] in text
        assert connector.health()["leases"] == 0
        assert connector.get("a", "b", "r", metadata)[0][19_999] == 19_999

    @pytest.mark.parametrize("what", VALUES)
    @pytest.mark.parametrize("path", ["size", "inline_bytes"])
    def test_any_value_in_inline_metadata(self, make: Any, path: str, what: str) -> None:
        connector = make()
        _, _, metadata = connector.put("a", "b", "r", [1, 2, 3])
        assert refused_or_absent(connector, changed(metadata, (path,), VALUES[what]))
        assert connector.get("a", "b", "r", metadata)[0] == [1, 2, 3]

    @pytest.mark.parametrize("what", VALUES)  # None among them: by key alone, which is an error here as well
    def test_anything_in_place_of_the_whole(self, make: Any, what: str) -> None:
        assert refused_or_absent(make(), VALUES[what])

    def test_odd_keys(self, make: Any) -> None:
        connector = make()
        for odd in (10**5000, None, ("a", 1), "\ud800", b"x", 1.5):
            assert refused_or_absent(connector, {odd: 1})
            assert refused_or_absent(connector, {odd: 1, "shm": {odd: 2}})


class Emptying:
    """Takes the bytes out of the metadata while they are read, as another thread might."""

    metadata: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.data = b"x" * 300_000

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if Emptying.metadata is not None:
            Emptying.metadata.clear()


class TestInline:
    """Bytes that come in other wrappings, as transports hand them out."""

    def test_metadata_that_is_emptied_meanwhile(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        connector = make(shm_threshold_bytes=64 << 20, allow_pickle=True)
        _, size, metadata = connector.put("a", "b", "r", Emptying())
        monkeypatch.setattr(Emptying, "metadata", metadata)
        got = connector.get("a", "b", "r", metadata)
        assert not metadata
        assert (got[0].data, got[1]) == (b"x" * 300_000, size)

    @pytest.fixture
    def sent(self, make: Any) -> tuple[Any, bytes]:
        connector = make()
        return connector, connector.put("a", "b", "r", {"x": np.arange(1000), "y": "text"})[2]["inline_bytes"]

    def got(self, sent: Any, wrapped: Any) -> Any:
        connector, frame = sent
        return connector.get("a", "b", "r", {"inline_bytes": wrapped, "size": len(frame)})[0]

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda f: memoryview(bytearray(f)).toreadonly()])
    def test_contiguous(self, sent: Any, wrap: Any) -> None:
        got = self.got(sent, wrap(sent[1]))
        assert (got["x"][999], got["y"]) == (999, "text")

    @pytest.mark.parametrize("step", [2, -1, 3])
    def test_a_view_with_gaps(self, sent: Any, step: int) -> None:
        frame = sent[1]
        wide = bytearray(len(frame) * abs(step))
        memory = memoryview(wide)[::step]
        memory[: len(frame)] = frame
        assert not memory.c_contiguous
        got = self.got(sent, memory)
        assert (got["x"][999], got["y"]) == (999, "text")

    def test_a_view_of_wider_items(self, sent: Any) -> None:
        connector, frame = sent
        padded = frame + bytes(-len(frame) % 4)
        memory = memoryview(np.frombuffer(padded, np.int32))
        if len(padded) == len(frame):
            assert self.got(sent, memory)["y"] == "text"
        assert refused_or_absent(connector, {"inline_bytes": memory, "size": len(memory)})
