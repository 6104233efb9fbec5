"""What a reader sees of what was put: one row per kind of payload, as vllm-omni 0.30's serializer answers.

`test_wire.py` holds our connectors to these rows, and the rows to that serializer wherever it is installed.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from PIL import Image

REFUSED = object()


class Row(NamedTuple):
    """What to put, and what to get; `peer` is False where the peer is known to do worse than is promised here."""

    name: str
    sent: Any
    seen: Any
    peer: bool = True


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 7


@dataclasses.dataclass
class Params:
    a: int
    b: Any = None


class Meta(msgspec.Struct, omit_defaults=True):
    finished: Any = None
    codec_streaming: Any = None


class Hidden(msgspec.Struct, omit_defaults=True):
    output: Any = None
    layers: dict[int, Any] | None = None


class Payload(msgspec.Struct, omit_defaults=True):
    meta: Meta | None = None
    hidden_states: Hidden | None = None
    speaker: Any = None


class Point(NamedTuple):
    x: int
    y: int


class Unknown:
    pass


def _plain() -> list[Row]:
    key = uuid.uuid5(uuid.NAMESPACE_DNS, "x")
    return [
        Row("list", [1, [2]], [1, [2]]),
        Row("tuple", (1, (2, [3, (4,)])), [1, [2, [3, [4]]]]),
        Row("set", {1}, [1]),
        Row("frozenset", frozenset({"a"}), ["a"]),
        Row("namedtuple", Point(1, 2), [1, 2]),
        Row("slice", slice(1, None, 2), [1, None, 2]),
        Row("order of a dict", {"z": 1, "a": 2}, {"z": 1, "a": 2}),
        Row("keys keep their type", {1: "a", "1": "b", None: "c", 2.5: "d"}, {1: "a", "1": "b", None: "c", 2.5: "d"}),
        Row("a tuple as a key", {(1, "x"): (1,)}, {(1, "x"): [1]}),
        Row("struct", Payload(Meta(True), Hidden(None, {0: (1,), 24: [2]})),
            {"meta": {"finished": True}, "hidden_states": {"layers": {0: [1], 24: [2]}}}),
        Row("struct with nothing set", Payload(), {}),
        Row("dataclass", Params(1, (2,)), {"a": 1, "b": [2]}),
        Row("dataclass with defaults", [Params(1)], [{"a": 1, "b": None}]),
        Row("enum", {"mode": Mode.FAST}, {"mode": "fast"}),
        Row("int enum", [Level.HIGH], [7]),
        Row("enum as a key", {Mode.FAST: 1}, {"fast": 1}),
        Row("bytes", b"ab", b"ab"),
        Row("many bytes", [b"x" * 100_000], [b"x" * 100_000]),
        Row("bytearray", bytearray(b"ab"), b"ab"),
        Row("large bytearray", bytearray(100_000), bytes(100_000)),
        Row("memoryview", memoryview(b"ab"), b"ab"),
        Row("None", None, None),
        Row("numbers", [True, 0, -(2**63), 2**64 - 1, 1.5, float("inf"), -0.0],
            [True, 0, -(2**63), 2**64 - 1, 1.5, float("inf"), -0.0]),
        Row("text", ["", "é\0", "x" * 100_000], ["", "é\0", "x" * 100_000]),
        Row("long lists of numbers", [list(range(300)), tuple([0.5] * 300)], [list(range(300)), [0.5] * 300]),
        Row("a long list with a dict at its end", [*range(300), {"a": (1,)}], [*range(300), {"a": [1]}]),
        Row("ext", msgspec.msgpack.Ext(5, b"data"), msgspec.msgpack.Ext(5, b"data")),
        Row("ext of a negative code", [msgspec.msgpack.Ext(-3, b"")], [msgspec.msgpack.Ext(-3, b"")]),
        Row("uuid, decimal, dates", [key, decimal.Decimal("1.50"), datetime.date(2024, 1, 2)],
            [str(key), "1.50", "2024-01-02"]),
        Row("a false marker is data", {"__tensor__": False, "x": 1}, {"__tensor__": False, "x": 1}),
        Row("empty", [[], {}, ""], [[], {}, ""]),
    ]  # fmt: skip


def _refused() -> list[Row]:
    return [
        Row("a large int", 2**64, REFUSED),
        Row("a small int", -(2**63) - 1, REFUSED),
        Row("complex", 1j, REFUSED),
        Row("numpy scalar", [np.int64(1)], REFUSED),
        Row("numpy float", [np.float32(1)], REFUSED),
        Row("array of objects", np.array([None], dtype=object), REFUSED),
        Row("unknown class", {"x": [Unknown()]}, REFUSED),
        Row("function", print, REFUSED),
        Row("class", Params, REFUSED),
        Row("half a surrogate pair", ["\ud800"], REFUSED),
        Row("lock in a struct", Payload(speaker=Unknown()), REFUSED),
    ]


def _tensors() -> list[Row]:
    kept = [
        torch.arange(6).view(2, 3), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.5), torch.tensor(True),
        torch.empty(0, 3), torch.zeros(0), torch.ones(2, 2).to(torch.float8_e4m3fn),
        torch.ones(2).to(torch.float8_e5m2),
        torch.tensor([True, False]), torch.tensor([1 + 2j]), torch.ones(70_000, dtype=torch.float16),
        torch.arange(30_000, dtype=torch.int16), torch.full((1, 2048), 0.5, dtype=torch.bfloat16),
        torch.ones(1, 1, 1, 1),
        torch.tensor([1, 2], dtype=torch.uint8),
    ]  # fmt: skip
    rows = [Row(f"tensor {str(t.dtype)[6:]} {tuple(t.shape)}", {"t": t}, {"t": t.clone()}) for t in kept]
    turned = torch.arange(40_000).view(200, 200)
    parameter = torch.nn.Parameter(torch.ones(3))
    twice = torch.ones(4)
    return [
        *rows,
        Row("transposed tensor", [turned.t()], [turned.t().contiguous()]),
        Row("slice of a tensor", [turned[10:20, ::2]], [turned[10:20, ::2].contiguous()]),
        Row("expanded tensor", [torch.ones(1).expand(50)], [torch.ones(50)]),
        Row("tensor with gradient", [torch.ones(2, requires_grad=True)], [torch.ones(2)]),
        Row("result of a graph", [torch.ones(2, requires_grad=True) * 2], [torch.ones(2) * 2]),
        Row("parameter", [parameter], [torch.ones(3)]),
        Row("the same tensor twice", [twice, {"again": (twice,)}], [torch.ones(4), {"again": [torch.ones(4)]}]),
        Row("tensors by layer", {"layers": {0: twice, 24: twice}}, {"layers": {0: torch.ones(4), 24: torch.ones(4)}}),
    ]


def _arrays() -> list[Row]:
    kept = [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=">f4"), np.array(["é", "ab"]),
        np.array(["2020-01-02"], dtype="M8[D]"), np.array([b"ab"]), np.array([True]), np.zeros((0, 2)),
        np.array([1 + 1j]), np.zeros(30_000, dtype=np.float64), np.array(5),
    ]  # fmt: skip
    turned = np.arange(12).reshape(3, 4)
    return [
        *(Row(f"array {a.dtype.str} {a.shape}", {"a": a}, {"a": a.copy()}) for a in kept),
        Row("fortran array", [np.asfortranarray(np.eye(2, 3))], [np.eye(2, 3)]),
        Row("slice of an array", [turned[:, ::2]], [turned[:, ::2].copy()]),
        Row("read-only array", [np.frombuffer(b"abcd", dtype=np.uint8)], [np.frombuffer(b"abcd", dtype=np.uint8)]),
    ]


def _images() -> list[Row]:
    rgb, gray = Image.new("RGB", (3, 2), (1, 2, 3)), Image.new("L", (300, 200), 7)
    alpha = Image.new("RGBA", (2, 2), (1, 2, 3, 4))
    return [
        Row("RGB image", {"image": rgb}, {"image": rgb.copy()}),
        Row("gray image", [gray], [gray.copy()]),
        Row("RGBA image", [alpha], [alpha.copy()]),
        # The peer reads every image as bytes of 8 bits: these arrive there as another picture.
        Row("image of floats", [Image.new("F", (2, 2), 0.5)], [Image.new("F", (2, 2), 0.5)], peer=False),
        Row("image of bits", [Image.new("1", (9, 2), 1)], [Image.new("1", (9, 2), 1)], peer=False),
    ]


ROWS = [*_plain(), *_refused(), *_tensors(), *_arrays(), *_images()]


def _deep() -> Any:
    tree: Any = 1
    for _ in range(400):
        tree = [tree]
    return tree


def _subclass() -> Any:
    class Special(torch.Tensor):
        pass

    return torch.ones(3).as_subclass(Special)


def _marked_tensor() -> dict[str, Any]:
    return {"__tensor__": True, "dtype": "float32", "shape": [2], "data": np.ones(2, np.float32).tobytes()}


# Only with the host's own serializer at hand: what our codec does not know, and dicts that stand for classes of it.
HOST_ROWS: list[tuple[str, Callable[[], Any]]] = [
    ("a tree of 400 levels", _deep),
    ("a subclass of Tensor", _subclass),
    ("a subclass of str", lambda: [type("Text", (str,), {})("x")]),
    ("a tensor written out", lambda: {"x": [_marked_tensor()]}),
    ("an array written out", lambda: {"__ndarray__": 1, "dtype": "<i4", "shape": [1], "data": b"\1\0\0\0"}),
    ("an image written out", lambda: [{"__pil_image__": True, "mode": "L", "shape": [1, 2], "data": b"ab"}]),
    ("a dict like a CompletionOutput", lambda: {
        "o": {"index": 0, "text": "t", "token_ids": [1, 2], "finish_reason": None, "cumulative_logprob": None,
              "logprobs": None, "multimodal_output": {"audio": torch.ones(20_000)}}}),
    ("a dict like a RequestOutput", lambda: [{
        "request_id": "r", "prompt": "p", "prompt_token_ids": [1], "prompt_logprobs": None, "outputs": [],
        "finished": True, "multimodal_output": {"a": torch.ones(3)}}]),
    ("a dict like an OmniRequestOutput", lambda: {
        "finished": True, "final_output_type": "audio", "request_id": "r", "stage_id": 2, "images": []}),
    ("a dict that only has images", lambda: {"images": [1], "x": 2}),
    ("a dict with token ids and nothing else", lambda: {"prompt_token_ids": [1], "finished": torch.tensor(True)}),
    ("finished and images that fit no class", lambda: {"finished": True, "images": [], "prompt": object}),
]  # fmt: skip
