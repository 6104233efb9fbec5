"""The tables of `docs/benchmarks.md`, in Markdown, from condensed figures."""

from __future__ import annotations

import statistics
from typing import Any

from bench import goals
from bench.payloads import LOADS
from bench.peers import NAMES, load_peer
from bench.text import ratio, table, time

SHORT_LOADS = ("S1", "S2", "S3", "S4")
SLICE_US = 2000  # tails as long as a time slice mean that something else had the core
IMAGES = {
    "latency": "One way by size",
    "ratio": "One way as a multiple of memcpy",
    "throughput": "Throughput with four messages under way",
    "growth": "Cost per message as numbers grow",
}
Figures = dict[str, Any]


def render(figures: Figures) -> str:
    """All tables, each under its heading, and the images that `bench.plots` draws from the same figures."""
    counts = figures["counts"]
    parts = [machine(figures)]
    if two := figures["two_process"]:
        parts.append(quiet(two))
    parts += ["### Goals", goals.table(figures)]
    if two:
        parts += ["### Two processes: `put` → usable tensors in the other process", by_peer(two, "usable")]
        parts += [f"![{IMAGES['latency']}](img/latency.png)", f"![{IMAGES['ratio']}](img/ratio.png)"]
        parts += ["### Two processes: `put` → every byte read by the other process", by_peer(two, "read")]
        parts += ["### Two processes: tails of omni_fastshm, `put` → usable", tails(two)]
    if "streaming" in counts:
        window, load = counts["streaming"]["window"], counts["streaming"]["load"]
        parts += [f"### Streaming: {load}, {window} messages under way", streaming(counts["streaming"])]
        parts.append(f"![{IMAGES['throughput']}](img/throughput.png)")
    if "waking" in counts:
        parts += ["### Waking a consumer that waits (S1)", waking(counts["waking"])]
    if "loan" in counts:
        parts += ["### Producing in place: 64 MiB from `allocate`", loan(counts["loan"])]
    if same := figures["same_process"]:
        parts += ["### Same process: `put` and `get`", by_peer(same, None)]
    if "growth" in counts:
        parts += ["### Growth: µs per message as numbers grow", growth(counts["growth"])]
        parts.append(f"![{IMAGES['growth']}](img/growth.png)")
    parts += ["### Counted and compared", goals.counted(figures)]
    parts += ["### What to know about the peers", peers(figures)]
    return "\n\n".join(parts) + "\n"


def machine(figures: Figures) -> str:
    facts = figures["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
    first, second = facts["pinned"]
    pinned = "not pinned" if first is None else f"pinned to {first} and {second}"
    return (
        f"Measured {figures['date']} on: {facts['cpu']}, {facts['cores']} cores "
        f"(producer and consumer {pinned}), {facts['memory_bytes'] / 2**30:.0f} GiB memory, "
        f"Linux {facts['kernel']}, pages of {facts['page_bytes']} bytes, governor {facts['governor']}, "
        f"huge pages for shared memory: {facts['shm_huge_pages']}; Python {facts['python']}, {libraries}."
    )


def quiet(by_load: Figures) -> str:
    """Whether the processes had their cores to themselves: one that is taken away is away for milliseconds."""
    found = [
        kept["usable"]["p99"]
        for load in SHORT_LOADS
        for name, kept in by_load.get(load, {}).items()
        if kept["usable"].get("p99") is not None and not load_peer(name).own_channel
    ]
    if not found:
        return "Too few messages were measured to say whether the machine was quiet."
    typical = statistics.median(found)
    said = f"The 99th percentile of the short loads ({', '.join(SHORT_LOADS)}; median over peers) was {typical:.0f} µs."
    if typical < SLICE_US:
        return said
    return f"**Do not quote these figures: the machine was busy with something else.** {said}"


def by_peer(by_load: Figures, what: str | None) -> str:
    """Medians, a row for each peer, and how many times ours that is."""

    def median(load: str, name: str) -> float | None:
        kept = by_load[load].get(name)
        return None if kept is None else (kept if what is None else kept[what])["median"]

    rows = []
    for name in present(by_load):
        cells = [median(load, name) for load in by_load]
        ours = [median(load, "ours") for load in by_load]
        shown = [
            time(cell) if cell is None or base is None or name == "ours" else f"{time(cell)} ({ratio(cell / base)})"
            for cell, base in zip(cells, ours, strict=True)
        ]
        label = load_peer(name).label
        rows.append([f"**{label}**", *(f"**{each}**" for each in shown)] if name == "ours" else [label, *shown])
    said = "; ".join(f"{load} {LOADS[load]}" for load in by_load)
    return f"{table(['median (times ours)', *by_load], rows)}\n\n{said}."


def tails(by_load: Figures) -> str:
    rows = []
    for name in present(by_load):
        if load_peer(name).role == "ours":
            for key in ("p99", "p99.9"):
                cells = [time(by_load[load].get(name, {}).get("usable", {}).get(key)) for load in by_load]
                rows.append([f"{load_peer(name).label}, {key}", *cells])
    return table(["", *by_load], rows)


def streaming(figures: Figures) -> str:
    rows = [
        [load_peer(name).label, *(f"{ways[way]:.2f}" for way in ("moved", "read"))]
        for name, ways in figures["GB/s"].items()
    ]
    return table(["GB/s", "moved, then dropped", "moved, every byte read"], rows)


def waking(figures: Figures) -> str:
    bare = figures.get("futex", {}).get("median")
    rows = []
    for each in figures.values():
        against = "-" if bare is None else ratio(each["median"] / bare)
        rows.append([each["label"], time(each["median"]), against, time(each["p99"])])
    return table(["`put` → usable", "median", "times a bare wake", "p99"], rows)


def loan(figures: Figures) -> str:
    named = (
        ("allocate", "`allocate`"),
        ("put", "`put`"),
        ("usable", "`put` → usable in the other process, through the measurement's control plane"),
    )
    rows = [[title, time(figures[key]["median"]), time(figures[key]["p99"])] for key, title in named]
    return table(["", "median", "p99"], rows)


def growth(figures: Figures) -> str:
    rows = []
    for kind, found in figures.items():
        for what in ("put", "get"):
            cells = [f"{each['x']:,}: {time(each[what])}" for each in found]
            rows.append([f"{kind}, {what}", "; ".join(cells)])
    return table(["of", "how many: median cost"], rows, figures=False)


def peers(figures: Figures) -> str:
    """What each peer of these figures says about itself."""
    names = present({**figures["two_process"], "": figures["counts"].get("streaming", {}).get("GB/s", {})})
    rows = [[load_peer(name).label, load_peer(name).differs] for name in names if load_peer(name).differs]
    return table(["peer", "what to know"], rows, figures=False) if rows else "None were measured."


def present(by_load: Figures) -> list[str]:
    """The peers that some load was measured with, in the order of the tables."""
    return [name for name in NAMES if any(name in peers for peers in by_load.values())]
