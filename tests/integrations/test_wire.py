"""A reader sees what vllm-omni's serializer would show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from .golden import REFUSED, ROWS, Row
from .tools import alike, sent

by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@by_name
def test_rows(make: Callable[..., Any], row: Row) -> None:
    got = sent(make, row.sent)
    assert got is REFUSED if row.seen is REFUSED else alike(got, row.seen)


@by_name
def test_rows_of_december(make_told: Callable[..., Any], row: Row) -> None:
    sender, receiver = make_told(), make_told()
    ok, size, metadata = sender.put("0", "1", "r", row.sent)
    assert ok is (row.seen is not REFUSED)
    if ok:
        got = receiver.get("0", "1", "r", metadata)
        assert got[1] == size
        assert alike(got[0], row.seen)


# ---- what is received is the receiver's own


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def test_tensors_are_writable_and_independent(make: Callable[..., Any]) -> None:
    sender, receiver = make(), make()
    large, small = torch.arange(100_000.0), torch.tensor(False)
    sender.put("0", "1", "k", {"a": large, "b": large, "flags": [small, small]})
    large.fill_(-1)  # CUDA graphs reuse their buffers
    ((got, _),) = [receiver.get("0", "1", "k")]
    assert torch.equal(got["a"], torch.arange(100_000.0))
    every = tensors_of(got)
    storages = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in every]
    for index, (start, nbytes) in enumerate(storages):
        assert nbytes == every[index].numel() * every[index].element_size()
        assert all(start + nbytes <= a or a + n <= start for i, (a, n) in enumerate(storages) if i != index)
    got["a"].zero_()
    got["flags"][0].fill_(True)
    assert torch.equal(got["b"], torch.arange(100_000.0))
    assert not got["flags"][1]
    assert torch.cat([got["a"], got["b"]]).shape == (200_000,)


def test_what_is_kept_survives_everything(make: Callable[..., Any], errors: Callable[[], list[str]]) -> None:
    sender, receiver = make(segment_bytes=1 << 20), make()
    kept = []
    for number in range(12):
        assert sender.put("0", "1", f"k{number}", {"t": torch.full((100_000,), float(number))})[0]
        kept.append(receiver.get("0", "1", f"k{number}")[0]["t"])
    sender.cleanup("k0")
    sender.close()
    receiver.close()
    del sender, receiver
    for number, tensor in enumerate(kept):
        assert bool((tensor == number).all())
        tensor.add_(1)
    kept.clear()
    assert not errors()


def test_a_small_tensor_does_not_pin_a_large_one(make: Callable[..., Any]) -> None:
    sender, receiver = make(), make()
    sender.put("0", "1", "k", {"large": torch.ones(1_000_000), "flag": torch.tensor(True), "row": torch.ones(16, 1000)})
    got = receiver.get("0", "1", "k")[0]
    assert receiver.health()["leases"] == 1
    flag, row = got["flag"], got["row"]
    del got
    assert receiver.health()["leases"] == 0
    assert bool(flag)
    assert bool((row == 1).all())


def test_arrays_are_contiguous_and_can_be_written_to(make: Callable[..., Any]) -> None:
    got = sent(make, {"a": np.asfortranarray(np.ones((300, 300))), "b": np.frombuffer(b"ab", dtype=np.uint8)})
    for array in got.values():
        assert array.flags.c_contiguous
        array.fill(3)


def test_where_the_mount_is_crowded_copies_are_handed_out(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_fastshm import segments

    sender, receiver = make(), make()
    sender.put("0", "1", "k", torch.ones(1_000_000))
    monkeypatch.setattr(segments, "mount_free", lambda: segments.mount_size() // 8)
    got = receiver.get("0", "1", "k")[0]
    assert receiver.health()["leases"] == 0
    assert bool((got == 1).all())
