"""The hand-made baseline: a new shared memory segment per message, holding one msgpack message.

Written as lean as this way allows, so that ratios to it are lower bounds: tensors enter the message without a
copy of their own, the reader copies the message out once, and the tensors it returns are views into that
copy. What remains is what this way cannot avoid: a file per message, its fresh pages, and two trips through
msgpack's buffer.
"""

from __future__ import annotations

import itertools
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import msgspec
import torch

from bench import payloads

label = "new segment per message, msgpack"
differs = "The hand-made baseline of this project: a file and its fresh pages per message, copied out by the reader."

TENSOR = 1
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


class Channel:
    def __init__(self, place: str) -> None:
        self.names = (f"{place}-new-{number}" for number in itertools.count())
        self.encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
        self.decoder = msgspec.msgpack.Decoder(ext_hook=lambda code, data: data)

    def close(self) -> None:
        """Nothing is kept: each reader unlinked what it read."""


def open(place: str, side: str, load: str, depth: int) -> Channel:
    return Channel(place)


def put(end: Channel, data: Any) -> tuple[str, int]:
    message = end.encoder.encode(data)
    segment = SharedMemory(next(end.names), create=True, size=len(message))
    payloads.buffer_of(segment)[: len(message)] = message
    segment.close()
    return segment.name, len(message)


def get(end: Channel, note: tuple[str, int]) -> Any:
    name, size = note
    segment = SharedMemory(name)
    message = bytearray(payloads.buffer_of(segment)[:size])
    segment.close()
    segment.unlink()
    return _tensors(end.decoder.decode(message))


def _encode(tensor: torch.Tensor) -> dict[str, Any]:
    data = msgspec.msgpack.Ext(TENSOR, payloads.raw(tensor).data)
    return {"__tensor__": str(tensor.dtype), "shape": list(tensor.shape), "data": data}


def _tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        if "__tensor__" in tree:
            return torch.frombuffer(tree["data"], dtype=DTYPES[tree["__tensor__"]]).reshape(tree["shape"])
        return {key: _tensors(value) for key, value in tree.items()}
    if isinstance(tree, list) and not (tree and isinstance(tree[0], int)):
        return [_tensors(value) for value in tree]
    return tree
