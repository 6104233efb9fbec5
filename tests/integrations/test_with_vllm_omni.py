"""Beside the real vllm-omni 0.30: its serializer, its factory, its plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

from omni_fastshm.integrations._vllm_host import find_host, is_installed

from .golden import HOST_ROWS, REFUSED, ROWS, Row
from .tools import alike, sent

if not is_installed():
    pytest.skip("vllm-omni is not installed: make test-vllm-omni", allow_module_level=True)

by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture
def host() -> Any:
    return find_host()


@by_name
def test_rows_are_what_the_peer_gives(row: Row) -> None:
    host = find_host()
    if not row.peer:
        with contextlib.suppress(Exception):
            assert not alike(host.serializer.deserialize(host.serializer.serialize(row.sent)), row.seen)
        return
    try:
        given = host.serializer.deserialize(host.serializer.serialize(row.sent))
    except Exception:
        given = REFUSED
    assert given is REFUSED if row.seen is REFUSED else alike(given, row.seen)


@pytest.mark.parametrize(("name", "build"), HOST_ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_rows_of_the_host(make: Callable[..., Any], host: Any, name: str, build: Callable[[], Any]) -> None:
    try:
        expected = host.serializer.deserialize(host.serializer.serialize(build()))
    except Exception:
        expected = REFUSED
    got = sent(make, build())
    assert (got is REFUSED) == (expected is REFUSED)
    assert got is REFUSED or alike(got, expected)


def test_results_of_the_host(make: Callable[..., Any], host: Any) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm_omni.outputs import OmniRequestOutput

    inner = CompletionOutput(0, "text", [1, 2], None, None)
    inner.multimodal_output = {"audio": torch.arange(30_000.0)}
    outer = RequestOutput("r", "p", [1, 2], None, [inner], True)
    outer.multimodal_output = {"image": torch.ones(3)}
    diffusion = OmniRequestOutput.from_diffusion("r", [Image.new("RGB", (4, 4), (9, 8, 7))])
    for value in (outer, [outer, {"x": inner}], inner, diffusion, {"engine_inputs": [diffusion, outer]}):
        expected = host.serializer.deserialize(host.serializer.serialize(value))
        assert alike(sent(make, value), expected)
    got = sent(make, outer)
    assert type(got) is RequestOutput
    assert torch.equal(got.outputs[0].multimodal_output["audio"], torch.arange(30_000.0))
    assert torch.equal(got.multimodal_output["image"], torch.ones(3))
