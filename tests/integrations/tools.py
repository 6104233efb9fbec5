"""What the tests of the integrations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image
from support.codec_tools import same

from .golden import REFUSED


def alike(a: Any, b: Any) -> bool:
    """`same`, also of what carries classes of the host."""
    if isinstance(a, Image.Image):
        return isinstance(b, Image.Image) and (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if type(a).__module__.startswith("vllm") and type(a) is type(b):
        return alike(vars(a), vars(b))
    return same(a, b)


def sent(make: Callable[..., Any], value: Any) -> Any:
    sender, receiver = make(), make(stage_id=1)
    ok, size, metadata = sender.put("0", "1", "r_0_0", value)
    if not ok:
        assert (size, metadata) == (0, None)
        assert receiver.get("0", "1", "r_0_0") is None
        return REFUSED
    got = receiver.get("0", "1", "r_0_0", metadata)
    assert type(got) is tuple
    assert got[1] == size > 0
    assert receiver.get("0", "1", "r_0_0", metadata) is None
    return got[0]
