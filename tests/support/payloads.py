"""Payloads for tests, and a comparison that also looks at types."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import numpy as np

KIB = 1 << 10
MIB = 1 << 20


def array(nbytes: int, seed: int = 0) -> np.ndarray:
    """An int64 array of about `nbytes` in which every element depends on `seed`."""
    return np.arange(max(1, nbytes // 8), dtype=np.int64) * 3 + seed


def big(seed: int = 0) -> dict[str, Any]:
    """A tensor of 1 MiB, above the default threshold."""
    import torch

    return {"t": torch.arange(262144.0) + seed}


def tree(seed: int = 0) -> dict[str, Any]:
    """A payload with every kind of node that stages send, with large and small leaves."""
    import torch

    return {
        "ids": list(range(seed, seed + 50)),
        "shape": (1, (2, [3, (4,)])),
        "flags": {True, "a", 3},
        "cut": slice(1, None, 2),
        "raw": b"\x00\xff" * 40,
        "long raw": bytes(range(256)) * 400,
        "none": None,
        "whole": 2**70 + seed,
        "negative": -(2**65),
        "fraction": 0.1 + seed,
        "nan": float("nan"),
        "text": "Grüße ✓\n\x00",
        7: "int key",
        (1, "a"): "tuple key",
        None: "none key",
        "scalar": np.float32(1.5),
        "large": array(200_000, seed),
        "small": array(64, seed),
        "half": torch.arange(60_000).to(torch.bfloat16) + seed,
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3j]),
        "0-dim": torch.tensor(3.5),
        "no elements": torch.empty(0, 4),
        "nested": [{"a": [array(80_000, seed + 1), ()]}, [], {}],
    }


def same(left: Any, right: Any) -> bool:
    """Equal in type, shape, dtype and value, all the way down; NaN equals NaN."""
    if hasattr(left, "detach") or hasattr(right, "detach"):
        return _same_tensors(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def _same_tensors(left: Any, right: Any) -> bool:
    import torch

    if type(left) is not type(right) or left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.resolve_conj().contiguous(), right.resolve_conj().contiguous()
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
