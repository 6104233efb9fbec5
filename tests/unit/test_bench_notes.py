"""The notes of the measurements: each as cheap as it can be, and none of them changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "bench").is_dir(), reason="bench/ is not beside these tests")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    import bench.notes

    return bench.notes


@pytest.mark.parametrize(
    ("note", "kind", "arrives"),
    [
        (b"raw", "BYTES", b"raw"),
        (b"", "BYTES", b""),
        (("r", {"inline_bytes": b"x", "size": 1}), "MSGPACK", ["r", {"inline_bytes": b"x", "size": 1}]),
        (7, "MSGPACK", 7),
        (None, "MSGPACK", None),
        (1 << 80, "PICKLE", 1 << 80),
        ((1, 2 + 3j), "PICKLE", (1, 2 + 3j)),
    ],
)
def test_a_note_arrives(notes: Any, note: Any, kind: str, arrives: Any) -> None:
    used, message = notes.pack(note)

    assert used == getattr(notes, kind)
    got = notes.unpack(used, memoryview(message))
    assert (type(got), got) == (type(arrives), arrives)
