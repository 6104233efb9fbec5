"""put and get within one process: what the code itself costs, without a second core or a wake-up."""

from __future__ import annotations

import gc
from typing import Any

from bench import payloads
from bench.conftest import PLACE
from bench.peers import load_peer

ONE_PROCESS = True  # peers that need two are left out


def test_put_get(benchmark: Any, pinned: int | None, load: str, name: str) -> None:
    benchmark.group = f"same process {load}: {payloads.LOADS[load]}"
    peer = load_peer(name)
    data = payloads.make(load)
    end = peer.open(f"{PLACE}-same", "both", load, 1)

    def once() -> None:
        peer.get(end, peer.put(end, data))

    try:
        difference = payloads.difference(data, peer.get(end, peer.put(end, data)))
        assert difference is None, difference
        gc.collect()
        benchmark.extra_info.update(
            kind="same_process",
            load=load,
            peer=name,
            label=peer.label,
            tensor_bytes=payloads.tensor_bytes(data),
        )
        benchmark(once)
    finally:
        end.close()
