"""The images of `docs/benchmarks.md`, from the same condensed figures as its tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.payloads import ONE_TENSOR
from bench.peers import load_peer
from bench.tables import present

Figures = dict[str, Any]
OURS, LIMIT = "#c0392b", "#202020"
# One colour for each rival, in every image.
COLOURS = {
    "ours": OURS,
    "ours_by_key": "#e67e73",
    "ours_pipe": "#f0b3ac",
    "memcpy": LIMIT,
    "bare_copy": "#7f7f7f",
    "iceoryx2_spin": "#1e8449",
    "iceoryx2_event": "#7dcea0",
    "zmq_ipc": "#2471a3",
    "inline_msgpack": "#b7950b",
    "inline_pickle": "#7d6608",
    "pipe_msgpack": "#f4d03f",
    "pipe_pickle": "#d4ac0d",
    "shared_memory_view": "#7d3c98",
    "shared_memory_pickle": "#bb8fce",
    "torch_file_descriptor": "#6e2c00",
    "torch_file_system": "#ba6f43",
    "ray_store": "#17a2b8",
    "new_segment": "#909497",
}


def draw(figures: Figures, folder: Path, digest: str) -> None:
    """Draw those images that there are figures for.

    Args:
        figures: condensed.
        folder: where; it is there.
        digest: kept in each image's description, so that a stale one shows.
    """
    counts = figures["counts"]
    images: dict[str, Callable[[], Figure] | None] = {
        "latency": (lambda: latency(figures["two_process"])) if figures["two_process"] else None,
        "ratio": (lambda: ratio(figures["two_process"])) if figures["two_process"] else None,
        "throughput": (lambda: throughput(counts["streaming"])) if "streaming" in counts else None,
        "growth": (lambda: growth(counts["growth"])) if "growth" in counts else None,
    }
    said = f"{figures['machine']['cpu']}, {figures['machine']['cores']} cores, {figures['date']}"
    for name, make in images.items():
        if make is not None:
            figure = make()
            figure.supxlabel(said, fontsize=7, color="grey", x=0.99, ha="right")
            figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Description": f"figures {digest}"})
            pyplot.close(figure)


def latency(by_load: Figures) -> Figure:
    """One way against size, both logarithmic."""
    figure, axes = pyplot.subplots(figsize=(10, 6.2), layout="constrained")
    loads = [load for load in ONE_TENSOR if load in by_load]
    for name in present(by_load):
        points = [
            (ONE_TENSOR[load], by_load[load][name]["usable"]["median"]) for load in loads if name in by_load[load]
        ]
        if points:
            _line(axes, name, points)
    axes.set(xscale="log", yscale="log", xlabel="bytes of one float32 tensor", ylabel="put → usable, median µs")
    axes.set_title("One way between two processes")
    axes.set_xticks([ONE_TENSOR[load] for load in loads], [f"{_bytes(ONE_TENSOR[load])}\n{load}" for load in loads])
    axes.set_xticks([], minor=True)
    _legend(figure, axes)
    return figure


def ratio(by_load: Figures) -> Figure:
    """The same as multiples of the memcpy beside it, all loads."""
    figure, axes = pyplot.subplots(figsize=(10, 6.2), layout="constrained")
    loads = [load for load in by_load if "memcpy" in by_load[load]]
    for name in present(by_load):
        points = [
            (index, by_load[load][name]["usable"]["median"] / by_load[load]["memcpy"]["usable"]["median"])
            for index, load in enumerate(loads)
            if name in by_load[load]
        ]
        if points:
            _line(axes, name, points)
    axes.set(yscale="log", ylabel="times memcpy of the same bytes")
    axes.set_xticks(range(len(loads)), loads)
    axes.set_title("put → usable as a multiple of a warm memcpy, which says and checks nothing")
    _legend(figure, axes)
    return figure


def throughput(streaming: Figures) -> Figure:
    """Bars, the fastest on top."""
    rates = streaming["GB/s"]
    names = sorted(rates, key=lambda name: rates[name]["moved"])
    figure, axes = pyplot.subplots(figsize=(10, 0.42 * len(names) + 1.6), layout="constrained")
    for index, name in enumerate(names):
        axes.barh(index + 0.2, rates[name]["moved"], 0.38, color=COLOURS[name])
        axes.barh(index - 0.2, rates[name]["read"], 0.38, color=COLOURS[name], alpha=0.45)
    axes.set_yticks(range(len(names)), [load_peer(name).label for name in names])
    axes.set_xlabel("GB/s; the paler bar: every byte also read by the consumer")
    axes.set_title(f"Streaming {streaming['load']}, {streaming['window']} messages under way")
    axes.grid(True, axis="x", alpha=0.3)
    return figure


def growth(kinds: Figures) -> Figure:
    """A panel for each kind; flat is good."""
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(3.1 * len(kinds), 3.6), layout="constrained", sharey=True)
    tops = []
    for axes, (kind, rows) in zip(panels, kinds.items(), strict=True):
        warm = rows[1:] if kind == "messages" else rows  # the very first message makes the segments
        for what, colour in (("put", OURS), ("get", "#2c6fbb")):
            axes.plot([row["x"] for row in warm], [row[what] for row in warm], "o-", color=colour, label=what)
            tops += [row[what] for row in warm]
        axes.set(xscale="log", xlabel=kind)
        axes.grid(True, alpha=0.3)
    panels[0].set(ylabel="median µs per message", ylim=(0, 1.15 * max(tops)))
    panels[0].legend()
    figure.suptitle("4 KiB through the ring, as numbers grow")
    return figure


def _line(axes: Axes, name: str, points: list[tuple[float, float]]) -> None:
    role = load_peer(name).role
    width, style = {"ours": (2.6 if name == "ours" else 1.6, "-"), "limit": (2.0, "--")}.get(role, (1.1, "-"))
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, style, marker="o", ms=3.5, lw=width, color=COLOURS[name], label=load_peer(name).label)


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _legend(figure: Figure, axes: Axes) -> None:
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
