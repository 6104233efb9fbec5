"""vllm-omni's own SharedMemoryConnector beside ours: the same payloads, two processes, turn by turn.

``make bench-vllm-omni`` runs it where vllm-omni is installed. With ``--publish`` the figures become
``bench/results/vllm_omni/0.30.json``, and the tables go into ``docs/vllm-omni.md``; ``--check`` says whether both
agree.

What is timed, on one clock for both processes: *one way*, from the call of put to the return of the get that finds the
payload, the reader polling without a pause; *and read*, the same until every byte of it was read once. Their decoder
has made a copy of all of it by the time get returns; ours hands out views, whose bytes come into the reader's caches
only when they are read.
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
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.documents import check, with_table

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "results" / "vllm_omni" / "0.30.json"
DOCUMENT = HERE.parent / "docs" / "vllm-omni.md"
BEGIN, END = "<!-- figures: begin, written by bench/vllm_omni.py -->", "<!-- figures: end -->"

NAMES = {"theirs": "SharedMemoryConnector", "ours": "FastSharedMemoryConnector"}
PREFILLS = {"prefill 5 MB": 600, "prefill 30 MB": 3660, "prefill 131 MB": 16000}  # tokens
STEPS = ("decode step", "codec chunk 0.7 KB", "codec chunk 13 KB", "end mark")
ROUNDS = {"prefill 5 MB": 60, "prefill 30 MB": 24, "prefill 131 MB": 10, **dict.fromkeys(STEPS, 20)}
RUN = 32
GOALS = {**dict.fromkeys(PREFILLS, 10.0), "decode step": 5.0, "codec chunk 0.7 KB": 5.0, "codec chunk 13 KB": 5.0}
EMPTY_POLL_GOAL_US, CPU_GOAL = 1.5, 5.0
REQUESTS, STEP_S, LOOP_S, BACK_OFF_S = 64, 0.010, 6.0, 0.001


def payload(load: str) -> Any:
    """As the stages of Qwen3-Omni send it."""
    from vllm_omni.data_entry_keys import CodesStruct, EmbeddingsStruct, HiddenStatesStruct, IdsStruct, MetaStruct
    from vllm_omni.data_entry_keys import OmniPayloadStruct as Payload

    meta = MetaStruct(finished=torch.tensor(False), is_segment_finished=torch.tensor(False))
    if load in PREFILLS:
        tokens = PREFILLS[load]
        row = torch.randn(1, 1, 2048).to(torch.bfloat16)
        embed = EmbeddingsStruct(
            prefill=torch.randn(tokens, 2048).to(torch.bfloat16), tts_bos=row, tts_eos=row.clone(), tts_pad=row.clone()
        )
        hidden = HiddenStatesStruct(output=torch.randn(tokens, 2048).to(torch.bfloat16))
        ids = IdsStruct(all=list(range(tokens + 1)), prompt=list(range(tokens)))
        return Payload(embed=embed, hidden_states=hidden, ids=ids, meta=meta, speaker=["ethan"])
    if load == "decode step":
        return Payload(embed=EmbeddingsStruct(decode=torch.randn(1, 2048).to(torch.bfloat16)), meta=meta, speaker="e")
    if load == "end mark":
        return Payload(meta=meta)
    codes = torch.arange((4 if "0.7" in load else 97) * 16)
    return Payload(codes=CodesStruct(audio=codes), meta=meta)


def read_all(tree: Any) -> None:
    """Every byte of every tensor once, by whole words."""
    if isinstance(tree, torch.Tensor):
        flat = tree.contiguous().view(-1)
        if flat.numel() * flat.element_size() % 8 == 0 and flat.numel() > 64:
            flat.view(torch.int64).sum()
    elif isinstance(tree, dict):
        for value in tree.values():
            read_all(value)


def connectors() -> dict[str, Any]:
    from vllm_omni.distributed.omni_connectors import ConnectorSpec, OmniConnectorFactory

    from omni_fastshm.integrations.vllm_omni import register

    torch.set_num_threads(1)
    register()
    return {
        peer: OmniConnectorFactory.create_connector(ConnectorSpec(name, {"stage_id": 1}))
        for peer, name in NAMES.items()
    }


def stay(place: int) -> None:
    """On a core of its own, the first or the last: two that poll on one core wait for the scheduler's ticks."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place]})


def serve(pipe: Any, taken: Any) -> None:
    """The stage that receives."""
    stay(-1)
    peers = connectors()
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        what, peer, *rest = job
        pipe.send({"take": take, "loop": receive_loop, "poll": empty_polls}[what](peers[peer], pipe, taken, *rest))
    for connector in peers.values():
        connector.close()


def take(connector: Any, pipe: Any, taken: Any, prefix: str, count: int) -> list[tuple[float, float, int]]:
    """Payloads one after the other: when each was there, when it was read, and its bytes."""
    found = []
    pipe.send("listening")
    for number in range(count):
        key = f"{prefix}_{number}"
        while (got := connector.get("0", "1", key, None)) is None:
            pass
        there = time.monotonic()
        read_all(got[0])
        found.append((there, time.monotonic(), got[1]))
        del got
        taken.value = number + 1
    return found


def empty_polls(connector: Any, pipe: Any, taken: Any, count: int) -> float:
    """Seconds for one."""
    keys = [f"chatcmpl-{request}_0_7" for request in range(REQUESTS)]
    start = time.perf_counter()
    for _ in range(count // REQUESTS):
        for key in keys:
            connector.get("0", "1", key, None)
    return (time.perf_counter() - start) / (count // REQUESTS * REQUESTS)


def receive_loop(connector: Any, pipe: Any, taken: Any, steps: int) -> tuple[float, int]:
    """The peer's receive loop: every request's next key in turn, 1 ms of rest after a pass without any. CPU seconds."""
    chunk, left, polls = [0] * REQUESTS, REQUESTS * steps, 0
    pipe.send("listening")
    start = time.process_time()
    while left:
        some = False
        for request in range(REQUESTS):
            if chunk[request] < steps:
                polls += 1
                if connector.get("0", "1", f"chatcmpl-{request}_0_{chunk[request]}", None) is not None:
                    chunk[request] += 1
                    left -= 1
                    some = True
        if not some:
            time.sleep(BACK_OFF_S)
    return time.process_time() - start, polls


def send_loop(connector: Any, steps: int) -> float:
    data = payload("decode step")
    start, began = time.process_time(), time.monotonic()
    for step in range(steps):
        for request in range(REQUESTS):
            ok, _, _ = connector.put(from_stage="0", to_stage="1", put_key=f"chatcmpl-{request}_0_{step}", data=data)
            assert ok
        connector.reap_consumed()
        time.sleep(max(0.0, began + (step + 1) * STEP_S - time.monotonic()))
    return time.process_time() - start


def measure(quick: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    taken = context.RawValue("q", 0)
    other = context.Process(target=serve, args=(far, taken), daemon=True)
    other.start()
    stay(0)
    peers = connectors()
    assert pipe.recv() == "ready"
    figures: dict[str, Any] = {"loads": {}}
    # Thrown away: for some seconds after the imports others want the cores, and both peers lose whole ticks of 4 ms.
    one_way(peers, pipe, taken, next(iter(ROUNDS)), 2 if quick else 100)
    for load in ROUNDS:
        figures["loads"][load] = one_way(peers, pipe, taken, load, 2 if quick else ROUNDS[load])
        print(f"{load}: {figures['loads'][load]}", file=sys.stderr, flush=True)
    polls: dict[str, list[float]] = {peer: [] for peer in NAMES}
    for _ in range(2 if quick else 12):
        for peer in NAMES:
            pipe.send(("poll", peer, 640 if quick else 19_200))
            polls[peer].append(pipe.recv())
    figures["empty poll"] = {peer: round(min(values) * 1e6, 2) for peer, values in polls.items()}
    figures["cpu"] = cpu(peers, pipe, 5 if quick else int(LOOP_S / STEP_S), 1 if quick else 3)
    pipe.send(None)
    other.join(60)
    for connector in peers.values():
        connector.close()
    return figures


def one_way(peers: dict[str, Any], pipe: Any, taken: Any, load: str, rounds: int) -> dict[str, float]:
    """Small payloads in runs, as the requests of one step follow each other: the next when the last was read."""
    data, run = payload(load), RUN if load in STEPS else 1
    times: dict[str, list[float]] = {
        f"{peer} {what}": [] for peer in NAMES for what in ("one way", "and read", "bytes")
    }
    for number in range(rounds + 3):
        for peer in NAMES if number % 2 else reversed(NAMES):  # neither always follows the other
            prefix = f"chatcmpl-bench_{load.replace(' ', '-')}_{number}"
            taken.value = 0
            pipe.send(("take", peer, prefix, run))
            assert pipe.recv() == "listening"
            starts = []
            for each in range(run):
                starts.append(time.monotonic())
                ok, _, _ = peers[peer].put(from_stage="0", to_stage="1", put_key=f"{prefix}_{each}", data=data)
                assert ok
                while taken.value <= each:
                    pass
            for start, (there, read, size) in zip(starts, pipe.recv(), strict=True):
                if number >= 3:  # the first ones touch fresh memory
                    for what, value in (("one way", there - start), ("and read", read - start), ("bytes", size)):
                        times[f"{peer} {what}"].append(value)
    figures = {key: values[0] for key, values in times.items() if key.endswith("bytes")}
    for key, values in times.items():
        if not key.endswith("bytes"):
            figures[key] = round(statistics.median(values) * 1e6, 1)
            # Where other processes want the cores, a median says how long one waits for a core.
            figures[f"{key}, least tenth"] = round(sorted(values)[len(values) // 10] * 1e6, 1)
    return figures


def cpu(peers: dict[str, Any], pipe: Any, steps: int, rounds: int) -> dict[str, float]:
    """CPU seconds of each process for each second of the load; the best round of each."""
    found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in NAMES}
    for _ in range(rounds):
        for peer in NAMES:
            pipe.send(("loop", peer, steps))
            assert pipe.recv() == "listening"
            sent = send_loop(peers[peer], steps)
            received, _ = pipe.recv()
            found[peer].append((sent / (steps * STEP_S), received / (steps * STEP_S)))
    best = {peer: min(values, key=sum) for peer, values in found.items()}
    return {
        f"{peer} {end}": round(best[peer][at], 4) for peer in NAMES for at, end in enumerate(("sender", "receiver"))
    }


# ---- tables


def time_of(micro: float) -> str:
    return f"{micro / 1e3:,.2f} ms" if micro >= 1000 else f"{micro:,.1f} µs"


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| payload | bytes | one way, theirs | ours | times faster | goal | and read, theirs | ours | times faster |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load, row in figures["loads"].items():
        cells = [load, f"{row['ours bytes']:,.0f}"]
        for what in ("one way", "and read"):
            theirs, ours = row[f"theirs {what}"], row[f"ours {what}"]
            cells += [time_of(theirs), time_of(ours), f"{theirs / ours:.1f}"]
            if what == "one way":
                cells.append(f"≥ {GOALS[load]:g}" if load in GOALS else "")
        lines.append(f"| {' | '.join(cells)} |")
    poll, use = figures["empty poll"], figures["cpu"]
    total = {peer: use[f"{peer} sender"] + use[f"{peer} receiver"] for peer in NAMES}
    lines += [
        "",
        f"| {REQUESTS} requests, a decode step each {STEP_S * 1e3:.0f} ms | theirs | ours | ratio | goal |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| an empty poll | {poll['theirs']:.2f} µs | {poll['ours']:.2f} µs | {poll['theirs'] / poll['ours']:.1f} "
        f"| ≤ {EMPTY_POLL_GOAL_US} µs |",
        *(
            f"| CPU of the {end}, of one core | {use[f'theirs {end}']:.0%} | {use[f'ours {end}']:.0%} "
            f"| {use[f'theirs {end}'] / max(use[f'ours {end}'], 1e-6):.1f} | |"
            for end in ("sender", "receiver")
        ),
        f"| both | {total['theirs']:.0%} | {total['ours']:.0%} | {total['theirs'] / total['ours']:.1f} "
        f"| ≥ {CPU_GOAL:g} |",
    ]
    machine = figures["machine"]
    lines += [
        "",
        f"Medians; polls: the least of 12 runs; CPU: the best of 3 runs of {LOOP_S:g} s. {figures['date']}, "
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} before the run, Linux "
        f"{machine['kernel']}, Python {machine['python']}, vllm-omni {machine['vllm-omni']}, torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def facts() -> dict[str, Any]:
    cpu_name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu_name[1] if cpu_name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "vllm-omni": importlib.metadata.version("vllm-omni"),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help="keep the figures, and put the tables into the document")
    parser.add_argument("--check", action="store_true", help="compare the document with the figures kept")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    options = parser.parse_args()
    if options.check:
        return check(DOCUMENT, BEGIN, END, table(json.loads(FIGURES.read_text())))
    os.environ.setdefault("OMNI_FASTSHM_NAMESPACE", f"bench-{os.getpid()}")
    figures = {"date": datetime.date.today().isoformat(), "machine": facts(), **measure(options.quick)}
    print(table(figures))
    if options.publish:
        FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        DOCUMENT.write_text(with_table(DOCUMENT, BEGIN, END, table(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
