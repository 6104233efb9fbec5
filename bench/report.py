"""Turns a results file of the measurements into the tables of `docs/benchmarks.md`.

``python -m bench.report out/bench.json`` prints them. With ``--publish NAME`` the figures are kept as
``bench/results/NAME.json`` and the tables are put into the document; ``--check`` says whether document and
kept results agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.payloads import LOADS
from bench.peers import NAMES, load_peer

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: begin, written by bench/report.py -->", "<!-- figures: end -->"
GOAL_LOADS = ("S4", "S5", "S6", "S7")
GOAL = 10
SHORT_LOADS = ("S1", "S2", "S3", "S4")
SLICE_US = 2000  # tails as long as a time slice mean that something else had the core
Figures = dict[str, Any]


def condense(raw: dict[str, Any]) -> Figures:
    """Keep of a pytest-benchmark file what the tables need and what says where they were measured."""
    figures: Figures = {
        "date": raw["datetime"][:10],
        "commit": raw["commit_info"].get("id"),
        "machine": raw["machine_info"]["facts"],
        "same_process": {},
        "two_process": {},
        "counts": raw.get("counts", {}),
    }
    for entry in raw["benchmarks"]:
        info = entry["extra_info"]
        if info["kind"] == "same_process":
            kept = {"median": entry["stats"]["median"] * 1e6, "rounds": entry["stats"]["rounds"]}
        else:
            kept = {key: info[key] for key in ("messages", "preempted_per_s", "put", "usable", "read")}
        figures[info["kind"]].setdefault(info["load"], {})[info["peer"]] = kept
    return figures


def render(figures: Figures) -> str:
    """The tables, in Markdown."""
    parts = [_machine(figures)]
    if two := figures["two_process"]:
        parts.append(_quiet(two))
        parts += [
            "### Two processes: `put` → usable tensors in the other process",
            _two_process(two, "usable"),
        ]
        parts += [
            "### Two processes: `put` → every byte read by the other process",
            _two_process(two, "read"),
        ]
    if same := figures["same_process"]:
        parts += ["### Same process: `put` and `get`", _same_process(same)]
    parts += ["### Counted and compared", _goals(figures)]
    return "\n\n".join(parts) + "\n"


def _machine(figures: Figures) -> str:
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


def _quiet(by_load: Figures) -> str:
    """Whether the processes had their cores to themselves: one that is taken away is away for milliseconds."""
    tails = [
        kept["usable"]["p99"]
        for load in SHORT_LOADS
        for kept in by_load.get(load, {}).values()
        if kept["usable"].get("p99") is not None
    ]
    if not tails:
        return "Too few messages were measured to say whether the machine was quiet."
    typical = statistics.median(tails)
    said = f"The 99th percentile of the short loads ({', '.join(SHORT_LOADS)}; median over peers) was {typical:.0f} µs."
    if typical < SLICE_US:
        return said
    return f"**Do not quote these figures: the machine was busy with something else.** {said}"


def _two_process(by_load: Figures, what: str) -> str:
    head = ["load", "omni_fastshm median", "p99", "p99.9", *_rival_columns()]
    rows = []
    for load, peers in by_load.items():
        ours = peers.get("ours", {}).get(what, {})
        medians = {name: peers[name][what]["median"] for name in peers}
        tails = [_time(ours.get(key)) for key in ("p99", "p99.9")]
        rows.append([_name(load), _time(ours.get("median")), *tails, *_rivals(medians)])
    return _table(head, rows)


def _same_process(by_load: Figures) -> str:
    rows = []
    for load, peers in by_load.items():
        medians = {name: peers[name]["median"] for name in peers}
        rows.append([_name(load), _time(medians.get("ours")), *_rivals(medians)])
    return _table(["load", "omni_fastshm median", *_rival_columns()], rows)


def _rival_columns() -> list[str]:
    columns = []
    for name in NAMES:
        if name != "ours":
            columns += [load_peer(name).label, "ours ÷ it" if name == "memcpy" else "it ÷ ours"]
    return columns


def _rivals(medians: dict[str, float]) -> list[str]:
    """Each rival's median and its ratio to ours, the way round that its column says."""
    cells = []
    for name in NAMES:
        if name == "ours":
            continue
        ours, other = medians.get("ours"), medians.get(name)
        cells.append(_time(other))
        if ours is None or other is None:
            cells.append("-")
        else:
            cells.append(_ratio(ours / other if name == "memcpy" else other / ours))
    return cells


def _goals(figures: Figures) -> str:
    counts = figures["counts"]
    rows = []
    for key, title in (("steady_same", "one process"), ("steady_two", "two processes")):
        if key in counts:
            rows.append([f"per message through the ring, {title}: files made, system calls, page faults", "0, 0, 0"])
            rows[-1].append(_per_message(counts[key]))
    if "steady_new_segment" in counts:
        rows.append(["the same for a new segment per message", "-", _per_message(counts["steady_new_segment"])])
    if "get_cost" in counts:
        cost = counts["get_cost"]
        shown = f"{_ratio(cost['ratio'])} ({_time(cost['64 MiB, µs'])} and {_time(cost['64 KiB, µs'])})"
        rows.append(["`get` of one tensor, 64 MiB against 64 KiB", "0.8 … 1.2", shown])
    for kind, title in (("two_process", "two processes"), ("same_process", "one process")):
        if ratios := _against_new_segment(figures[kind]):
            rows.append(
                [
                    f"new segment ÷ ours, {title}, " + ", ".join(ratios),
                    f"≥ {GOAL}",
                    ", ".join(ratios.values()),
                ]
            )
    if "flat" in counts:
        moments = counts["flat"]["moments"]
        grown = moments[-1]["resident_bytes"] - moments[4]["resident_bytes"]
        shm = moments[-1]["shm_bytes"] - moments[4]["shm_bytes"]
        what = f"memory from message {counts['flat']['messages'] // 2:,} to {counts['flat']['messages']:,}"
        rows.append([what, "flat", f"resident {grown / 1024:+.0f} KiB, shared memory {shm / 1024:+.0f} KiB"])
    return _table(["what", "goal", "measured"], rows) if rows else "Nothing was counted in this run."


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
    for load in GOAL_LOADS:
        peers = by_load.get(load, {})
        if "ours" in peers and "new_segment" in peers:
            ours, other = (peers[name].get("usable", peers[name])["median"] for name in ("ours", "new_segment"))
            found[load] = _ratio(other / ours)
    return found


def _name(load: str) -> str:
    return f"{load} {LOADS[load]}"


def _time(micro: float | None) -> str:
    if micro is None:
        return "-"
    if micro >= 1000:
        return f"{micro / 1000:.3g} ms"
    return f"{micro:.3g} µs"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def kept_results() -> Path:
    """The results file that the document shows: the last by name."""
    return sorted((HERE / "results").glob("*.json"))[-1]


def document_with(tables: str) -> str:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, help="JSON written by pytest --benchmark-json")
    parser.add_argument("--publish", metavar="NAME", help="keep the figures as bench/results/NAME.json and show them")
    parser.add_argument("--check", action="store_true", help="is the document what the kept results say?")
    options = parser.parse_args(arguments)
    if options.check:
        if document_with(render(json.loads(kept_results().read_text()))) == DOCUMENT.read_text():
            return 0
        print(f"{DOCUMENT.name} does not show {kept_results().name}: run --publish", file=sys.stderr)
        return 1
    if options.results is None:
        parser.error("a results file is needed: pytest bench --benchmark-json out/bench.json writes one")
    figures = condense(json.loads(options.results.read_text()))
    tables = render(figures)
    print(tables)
    if options.publish:
        target = HERE / "results" / f"{options.publish}.json"
        target.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        DOCUMENT.write_text(document_with(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
