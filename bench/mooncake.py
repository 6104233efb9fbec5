"""MooncakeConnector beside the bare store: the same bytes, the same master, two processes, turn by turn.

``python -m bench.mooncake`` starts a master on this machine, measures, and prints the table. With ``--publish`` the
figures become ``bench/results/mooncake/tcp.json`` and the table goes into ``docs/mooncake.md``; ``--check`` says
whether those two agree. The store is used at its best: put from the tensors' own memory into the own segment
(``put_from`` for one tensor, the gathering call for several), ``get_buffer`` with views over the handle, and a forced
remove, without which the store would be full soon. Neither side has to touch fresh memory in what is timed: before,
both fill their segments and local buffers once. Processes and clients are made anew `PASSES` times, for where memory
lies has its part in the figures; each figure is the median of the passes' medians.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.documents import check, with_table
from bench.payloads import leaves, make
from omni_fastshm.connectors.mooncake import MooncakeConnector

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "results" / "mooncake" / "tcp.json"
DOCUMENT = HERE.parent / "docs" / "mooncake.md"
BEGIN, END = "<!-- figures: begin, written by bench/mooncake.py -->", "<!-- figures: end -->"

LOADS: dict[str, tuple[str, int]] = {  # label, rounds
    "4 KiB": ("one float32 tensor", 400),
    "1 MiB": ("one float32 tensor", 200),
    "28.7 MB": ("thinker→talker tree", 40),
    "256 MiB": ("one float32 tensor", 12),
}
PASSES = 3
SEGMENT = LOCALBUF = 640 << 20
FILLING = (200 << 20,) * 3  # bytes of what touches nearly all of both; the store rounds up, to 208 MiB each
GOAL = 1.15


def payload(load: str) -> Any:
    """What is sent; the same bytes in every process."""
    if load == "28.7 MB":
        return make("S7")
    return {"x": torch.arange({"4 KiB": 1 << 10, "1 MiB": 1 << 18, "256 MiB": 1 << 26}[load], dtype=torch.float32)}


class Ours:
    def __init__(self, master: str) -> None:
        settings = {"master": master, "segment": SEGMENT, "localbuf": LOCALBUF, "shm_threshold_bytes": 0}
        self._connector = MooncakeConnector(settings)

    def put(self, load: str, data: Any, request: str) -> Any:
        ok, _, metadata = self._connector.put("thinker", "talker", request, data)
        assert ok
        return metadata

    def get(self, load: str, note: Any, request: str) -> Any:
        got = self._connector.get("thinker", "talker", request, note)
        assert got is not None
        return got[0]

    def close(self) -> None:
        self._connector.close()


class Bare:
    """No header, no names, no checks: the tensors' bytes at offsets that both sides know."""

    def __init__(self, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store = MooncakeDistributedStore()
        assert not self._store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, LOCALBUF, "tcp", "", master)
        self._config = ReplicateConfig()
        self._config.with_hard_pin = True
        self._config.preferred_segment = self._store.get_hostname()
        self._places: dict[str, list[tuple[torch.dtype, Any, int]]] = {}

    def put(self, load: str, data: Any, request: str) -> Any:
        tensors = list(leaves(data))
        sizes = [t.numel() * t.element_size() for t in tensors]
        key = f"bare/{load}/{request}"
        if len(tensors) == 1:
            code = self._store.put_from(key, tensors[0].data_ptr(), sizes[0], self._config)
        else:
            (code,) = self._store.batch_put_from_multi_buffers(
                [key], [[t.data_ptr() for t in tensors]], [sizes], self._config
            )
        assert code == 0
        return None

    def get(self, load: str, note: Any, request: str) -> Any:
        key = f"bare/{load}/{request}"
        if load not in self._places:
            self._places[load] = [(t.dtype, t.shape, t.numel()) for t in leaves(payload_or_filling(load))]
        handle = self._store.get_buffer(key)
        views, at = [], 0
        for dtype, shape, count in self._places[load]:
            views.append(torch.frombuffer(handle, dtype=dtype, count=count, offset=at).view(shape))
            at += count * dtype.itemsize
        assert self._store.remove(key, True) == 0
        return views

    def close(self) -> None:
        self._store.close()


PEERS: dict[str, Callable[[str], Any]] = {"bare": Bare, "ours": Ours}


def payload_or_filling(load: str) -> Any:
    return {"x": torch.zeros(int(load[7:]), dtype=torch.uint8)} if load.startswith("filling") else payload(load)


def consume(pipe: Any, master: str) -> None:
    """The other process: gets what it is told to, and answers with the seconds that took."""
    peers = {name: make_peer(master) for name, make_peer in PEERS.items()}
    kept = []
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        name, load, note, request, keep = job
        start = time.perf_counter()
        got = peers[name].get(load, note, request)
        took = time.perf_counter() - start
        if request in ("0", "1"):  # once the content, too, outside of what is timed
            for mine, theirs in zip(leaves(payload_or_filling(load)), leaves(got), strict=True):
                assert torch.equal(mine, theirs)
        kept = [*kept, got] if keep else []
        del got
        pipe.send(took)


def fill(pipe: Any, peers: dict[str, Any]) -> None:
    """Touch the memory of all segments and local buffers, with payloads that lie there together."""
    for name, peer in peers.items():
        loads = [f"filling{size}" for size in FILLING]
        notes = [peer.put(load, payload_or_filling(load), str(n)) for n, load in enumerate(loads)]
        for n, load in enumerate(loads):
            pipe.send((name, load, notes[n], str(n), True))
            pipe.recv()


def measure(master: str, *, smoke: bool = False) -> dict[str, dict[str, float]]:
    """One pass: medians in µs by load, peer and step."""
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    other = context.Process(target=consume, args=(far, master), daemon=True)
    other.start()
    peers = {name: make_peer(master) for name, make_peer in PEERS.items()}
    assert pipe.recv() == "ready"
    if not smoke:
        fill(pipe, peers)
    figures: dict[str, dict[str, float]] = {}
    for load, (_, rounds) in LOADS.items():
        data = payload(load)
        times: dict[str, list[float]] = {f"{name} {step}": [] for name in PEERS for step in ("put", "get")}
        for number in range(rounds + 4):
            request = str(number)
            for name in PEERS if number % 2 else reversed(PEERS):  # neither always follows the other
                start = time.perf_counter()
                note = peers[name].put(load, data, request)
                put_s = time.perf_counter() - start
                pipe.send((name, load, note, request, False))
                get_s = pipe.recv()
                if number >= 4:
                    times[f"{name} put"].append(put_s)
                    times[f"{name} get"].append(get_s)
        figures[load] = {key: statistics.median(values) * 1e6 for key, values in times.items()}
    pipe.send(None)
    other.join(20)
    for peer in peers.values():
        peer.close()
    return figures


def medians(passes: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of the passes' figures, one by one."""
    return {
        load: {key: round(statistics.median(one[load][key] for one in passes), 1) for key in row}
        for load, row in passes[0].items()
    }


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| payload | put, bare store (µs) | put, ours (µs) | ours ÷ bare | get, bare store (µs) | get, ours (µs) "
        "| ours ÷ bare |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load, (what, _) in LOADS.items():
        row = figures["loads"][load]
        cells = [f"{load}, {what}"]
        for step in ("put", "get"):
            bare, ours = row[f"bare {step}"], row[f"ours {step}"]
            cells += [f"{bare:,.0f}", f"{ours:,.0f}", f"{ours / bare:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    machine = figures["machine"]
    lines += [
        "",
        f"Medians; {figures['date']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {machine['mooncake']}, TCP over loopback.",
    ]
    return "\n".join(lines)


def facts() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "mooncake": "mooncake-transfer-engine-non-cuda "
        + importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help="keep the figures, and put the table into the document")
    parser.add_argument("--check", action="store_true", help="compare the document with the figures kept")
    parser.add_argument("--smoke", action="store_true", help="a few rounds, to see that it runs")
    options = parser.parse_args()
    if options.check:
        return check(DOCUMENT, BEGIN, END, table(json.loads(FIGURES.read_text())))
    if options.smoke:
        for load, (what, _) in LOADS.items():
            LOADS[load] = (what, 2)
    if "MOONCAKE_MASTER" not in os.environ:
        up = [sys.executable, "-m", "omni_fastshm", "mooncake", "up", "--"]
        return subprocess.call([*up, sys.executable, "-m", "bench.mooncake", *sys.argv[1:]])
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    passes = 1 if options.smoke else PASSES
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": facts(),
        "loads": medians([measure(os.environ["MOONCAKE_MASTER"], smoke=options.smoke) for _ in range(passes)]),
    }
    print(table(figures))
    if options.publish:
        FIGURES.parent.mkdir(parents=True, exist_ok=True)
        FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        DOCUMENT.write_text(with_table(DOCUMENT, BEGIN, END, table(figures)))
    worst = max(
        row[f"ours {step}"] / row[f"bare {step}"] for row in figures["loads"].values() for step in ("put", "get")
    )
    print(f"worst ratio {worst:.2f}, goal {GOAL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
