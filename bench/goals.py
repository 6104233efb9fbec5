"""What the project wants to reach, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench import text
from bench.peers import NAMES, load_peer

Figures = dict[str, Any]
# Load -> at most so many times the best rival; load -> at most so many times memcpy.
AGAINST_BEST = {"S1": 1.0, "S2": 0.8, "S3": 0.6, "S4": 0.6, "S8": 0.3}
AGAINST_MEMCPY = {"S4": 2.0, "S5": 0.85, "S6": 0.75, "S7": 0.85}
PIPES = {"S1": 1.0, "S2": 0.8}
STREAMING = 1.2
LOAN_US = 30.0
ASLEEP = 1.5
AWAKE_US = 15.0
AGAINST_NEW_SEGMENT = {"S4": 10, "S5": 10, "S6": 10, "S7": 10}
LOWER, HIGHER = "≤", "≥"


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    Args:
        what: what is compared.
        wanted: the limit.
        measured: what was found, in the limit's unit.
        sense: whether the limit is the least or the most.
        shown: both figures, in words.
    """

    what: str
    wanted: float
    measured: float
    sense: str
    shown: str
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.measured <= self.wanted if self.sense == LOWER else self.measured >= self.wanted

    def row(self) -> list[str]:
        unit = " µs" if self.unit == "µs" else " times"
        return [
            self.what,
            f"{self.sense} {self.wanted:g}{unit}",
            f"{text.ratio(self.measured)}{unit}",
            self.shown,
            "yes" if self.met else "**no**",
        ]


def all_goals(figures: Figures) -> list[Goal]:
    """Those for which both sides were measured."""
    return [*_one_way(figures["two_process"]), *_others(figures["counts"])]


def table(figures: Figures) -> str:
    found = all_goals(figures)
    if not found:
        return "Nothing that a goal is about was measured in this run."
    return text.table(["what", "goal", "measured", "figures", "met"], [goal.row() for goal in found])


def _one_way(by_load: Figures) -> Iterator[Goal]:
    def median(load: str, name: str) -> float | None:
        found = by_load.get(load, {}).get(name)
        return None if found is None else found["usable"]["median"]

    def against(load: str, ours: str, others: list[str], limit: float, said: str) -> Iterator[Goal]:
        mine = median(load, ours)
        found = {name: each for name in others if (each := median(load, name)) is not None}
        if mine is not None and found:
            best = min(found, key=lambda name: found[name])
            shown = f"{text.time(mine)}, {load_peer(best).label} {text.time(found[best])}"
            yield Goal(f"{load}, one way, against {said}", limit, mine / found[best], LOWER, shown)

    rivals = [name for name in NAMES if load_peer(name).role == "rival"]
    for load, limit in AGAINST_BEST.items():
        yield from against(load, "ours", rivals, limit, "the best peer")
    for load, limit in PIPES.items():
        pipes = ["pipe_msgpack", "pipe_pickle"]
        yield from against(load, "ours_pipe", pipes, limit, "the best through a pipe, ours through one as well")
    for load, limit in AGAINST_MEMCPY.items():
        yield from against(load, "ours", ["memcpy"], limit, "memcpy")


def _others(counts: Figures) -> Iterator[Goal]:
    rates = counts.get("streaming", {}).get("GB/s", {})
    rivals = {name: ways["moved"] for name, ways in rates.items() if load_peer(name).role == "rival"}
    if "ours" in rates and rivals:
        best = max(rivals, key=lambda name: rivals[name])
        mine = rates["ours"]["moved"]
        shown = f"{mine:.2f} GB/s, {load_peer(best).label} {rivals[best]:.2f} GB/s"
        yield Goal("S5, streaming, against the best peer", STREAMING, mine / rivals[best], HIGHER, shown)
    if "loan" in counts:
        spent = counts["loan"]["usable"]["median"]
        yield Goal("64 MiB made in place, `put` → usable", LOAN_US, spent, LOWER, "median", "µs")
    waking = counts.get("waking", {})
    if {"futex", "ours_by_key"} <= set(waking):
        bare, mine = (waking[name]["median"] for name in ("futex", "ours_by_key"))
        shown = f"{text.time(mine)}, bare {text.time(bare)}"
        yield Goal("get by key, consumer asleep, against a bare futex wake", ASLEEP, mine / bare, LOWER, shown)
    if "ours_awake" in waking:
        spent = waking["ours_awake"]["median"]
        yield Goal("get by key, `busy_wait_us` covers the wait", AWAKE_US, spent, LOWER, "median", "µs")


def counted(figures: Figures) -> str:
    """What was counted, and the older comparisons of the project."""
    counts = figures["counts"]
    rows = []
    for key, title in (("steady_same", "one process"), ("steady_two", "two processes")):
        if key in counts:
            rows.append([f"per message through the ring, {title}: files made, system calls, page faults", "0, 0, 0"])
            rows[-1].append(_per_message(counts[key]))
    steady = [each for key in ("steady_same", "steady_two") for each in counts.get(key, {}).values()]
    if steady:
        share = (
            f"{sum(each.get('looks_at_names', 0) for each in steady) / sum(each['messages'] for each in steady):.2f}"
        )
        rows.append(["looks at a producer's own names (fstat) per message, at most one in 100 µs", "≤ 1", share])
    if "steady_new_segment" in counts:
        rows.append(["the same for a new segment per message", "-", _per_message(counts["steady_new_segment"])])
    if "get_cost" in counts:
        cost = counts["get_cost"]
        both = f"{text.time(cost['64 MiB, µs'])} and {text.time(cost['64 KiB, µs'])}"
        rows.append(
            ["`get` of one tensor, 64 MiB against 64 KiB", "0.8 … 1.2", f"{text.ratio(cost['ratio'])} ({both})"]
        )
    for kind, title in (("two_process", "two processes"), ("same_process", "one process")):
        if ratios := _against_new_segment(figures[kind]):
            named = f"new segment ÷ ours, {title}, " + ", ".join(ratios)
            rows.append([named, "≥ 10", ", ".join(ratios.values())])
    if "flat" in counts:
        rows.append(_flat(counts["flat"]))
    return text.table(["what", "goal", "measured"], rows) if rows else "Nothing was counted in this run."


def _flat(figures: Figures) -> list[str]:
    moments = figures["moments"]
    grown = moments[-1]["resident_bytes"] - moments[4]["resident_bytes"]
    shm = moments[-1]["shm_bytes"] - moments[4]["shm_bytes"]
    what = f"memory from message {figures['messages'] // 2:,} to {figures['messages']:,}"
    return [what, "flat", f"resident {grown / 1024:+.0f} KiB, shared memory {shm / 1024:+.0f} KiB"]


def _per_message(by_load: Figures) -> str:
    """Files, system calls and page faults per message; a range where loads differ."""

    def span(values: list[float]) -> str:
        low, high = min(values), max(values)
        return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

    entries = by_load.values()
    files = [entry["files_created"] / entry["messages"] for entry in entries]
    calls = [sum(entry["system_calls"].values()) / entry["messages"] for entry in entries]
    faults = [sum(entry["minor_faults"]) / entry["messages"] for entry in entries]
    return f"{span(files)}, {span(calls)}, {span(faults)} ({', '.join(by_load)})"


def _against_new_segment(by_load: Figures) -> dict[str, str]:
    found = {}
    for load in AGAINST_NEW_SEGMENT:
        peers = by_load.get(load, {})
        if "ours" in peers and "new_segment" in peers:
            ours, other = (peers[name].get("usable", peers[name])["median"] for name in ("ours", "new_segment"))
            found[load] = text.ratio(other / ours)
    return found
