"""The eight loads that every measurement uses, each a function of its name alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

KIB = 1024
MIB = 1024 * KIB

# One line per load, for tables.
LOADS: dict[str, str] = {
    "S1": "dict of scalars, 300 B",
    "S2": "4 KiB float32",
    "S3": "64 KiB float32",
    "S4": "1 MiB float32",
    "S5": "16 MiB float32",
    "S6": "64 MiB float32",
    "S7": "thinker→talker tree, 28.7 MB",
    "S8": "64 x 16 KiB float32",
}
# The bytes of those that hold one tensor and little else.
ONE_TENSOR: dict[str, int] = {"S2": 4 * KIB, "S3": 64 * KIB, "S4": MIB, "S5": 16 * MIB, "S6": 64 * MIB}
# What is large enough to travel through shared memory with the default threshold.
THROUGH_SHARED_MEMORY = tuple(name for name in LOADS if name not in ("S1", "S2"))


def make(load: str) -> dict[str, Any]:
    """Build a load; the same name gives the same bytes in every process.

    Args:
        load: one of `LOADS`.

    Returns:
        The payload. Its tensors are private, contiguous and on the CPU.

    Raises:
        KeyError: there is no such load.
    """
    return MAKERS[load](torch.Generator().manual_seed(int(load[1:])))


def leaves(data: Any) -> Iterator[torch.Tensor]:
    """All tensors of a payload, depth first, in the order of the dicts and lists that hold them."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from leaves(value)
    elif isinstance(data, (list, tuple)):
        if data and isinstance(data[0], int):
            return  # a list of token ids: nothing to find, and two thousand steps to find it
        for value in data:
            yield from leaves(value)


def raw(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's own bytes as a flat array, no copy."""
    flat = tensor.reshape(-1).view(torch.uint8)
    array: np.ndarray[Any, np.dtype[np.uint8]] = flat.numpy()
    return array


def tensor_bytes(data: Any) -> int:
    """Bytes in all tensors of a payload together."""
    return sum(t.numel() * t.element_size() for t in leaves(data))


def read_all(data: Any) -> int:
    """Read every byte of every tensor once, on this core, as its user would have to.

    Returns:
        A sum over the bytes, so that nothing can leave the reading out.
    """
    total = 0
    for tensor in leaves(data):
        array = raw(tensor)
        words = array.size // 8 * 8
        total += int(np.add.reduce(array[:words].view(np.int64))) + int(np.add.reduce(array[words:]))
    return total


def difference(sent: Any, got: Any, path: str = "payload") -> str | None:
    """Where two payloads differ, or None when they are equal in type, dtype, shape and every byte."""
    if type(sent) is not type(got):
        return f"{path}: {type(sent).__name__} came as {type(got).__name__}"
    if isinstance(sent, torch.Tensor):
        if sent.dtype != got.dtype or sent.shape != got.shape:
            return f"{path}: {sent.dtype}{list(sent.shape)} came as {got.dtype}{list(got.shape)}"
        return None if np.array_equal(raw(sent), raw(got)) else f"{path}: the bytes differ"
    if isinstance(sent, dict):
        if list(sent) != list(got):
            return f"{path}: keys {list(sent)} came as {list(got)}"
        return next((d for k in sent if (d := difference(sent[k], got[k], f"{path}.{k}"))), None)
    if isinstance(sent, (list, tuple)):
        if len(sent) != len(got):
            return f"{path}: {len(sent)} items came as {len(got)}"
        pairs = enumerate(zip(sent, got, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}[{i}]"))), None)
    return None if sent == got else f"{path}: {sent!r} came as {got!r}"


def buffer_of(segment: SharedMemory) -> memoryview:
    """The bytes of an open segment; optional for the standard library because closed ones have none."""
    assert segment.buf is not None
    return segment.buf


def _floats(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(size // 4, generator=generator)


def _one(size: int) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {"request_id": "request-0", "step": 7, "x": _floats(size, generator)}


def _scalars(_: torch.Generator) -> dict[str, Any]:
    return {
        "request_id": "chatcmpl-5f0c1f5e-74bb-4a2f-9f0e-0c6a3d2b7e11",
        "prompt": "What can be heard in this recording, and who is speaking?",
        "finished": False,
        "stage": 1,
        "step": 4711,
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 40,
        "max_tokens": 2048,
        "seed": 20250926,
        "stop": ["<|im_end|>", "<|endoftext|>"],
        "speaker": "chelsie",
        "language": None,
        "arrival_time": 1758880000.125,
        "priority": 0,
    }


def _thinker_to_talker(generator: torch.Generator) -> dict[str, Any]:
    def hidden() -> torch.Tensor:
        return torch.randn(2000, 3584, generator=generator).to(torch.bfloat16)

    ids = torch.randint(0, 151_936, (2000,), generator=generator).tolist()
    return {
        "request_id": "chatcmpl-5f0c1f5e-74bb-4a2f-9f0e-0c6a3d2b7e11",
        "engine_inputs": [
            {
                "prompt_token_ids": ids,
                "additional_information": {"prefill": hidden(), "output": hidden(), "speaker": "chelsie"},
            }
        ],
        "sampling_params": {
            "temperature": 0.9,
            "top_p": 0.8,
            "top_k": 40,
            "max_tokens": 2048,
            "seed": 42,
            "stop_token_ids": [8294],
            "repetition_penalty": 1.05,
            "detokenize": False,
        },
        "metadata": {
            "from_stage": 0,
            "to_stage": 1,
            "finished": True,
            "sent_ts": 1758880000.125,
            "mm_hash": None,
        },
    }


def _many(generator: torch.Generator) -> dict[str, Any]:
    return {f"layer_{i}": _floats(16 * KIB, generator) for i in range(64)}


MAKERS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "S1": _scalars,
    **{load: _one(size) for load, size in ONE_TENSOR.items()},
    "S7": _thinker_to_talker,
    "S8": _many,
}
