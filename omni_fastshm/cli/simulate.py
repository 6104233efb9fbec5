"""``omni-fastshm simulate``: replay traffic against the rings of a pipeline, in virtual time."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni_fastshm.cli.load import add_load_arguments, add_node_argument, loads_of, nodes_of, size
from omni_fastshm.cli.text import count, human_bytes, human_seconds, printable, table
from omni_fastshm.config import OmniTransferConfig, load_omni_transfer_config
from omni_fastshm.errors import ConfigError
from omni_fastshm.simulation import COLUMNS, MOST_ARRIVALS, Arrival, RingResult, arrivals_of, read_trace, simulate
from omni_fastshm.sizing import Edge, EdgePlan, Load, Plan, make_plan, never_fits, rounded_down, store_settings

__all__ = ["add_arguments", "main"]

FORMAT = 1  # of the JSON; changes when a key changes its meaning or goes

_NOTE = """examples:
  omni-fastshm simulate pipeline.yaml --rps 20 --hold-ms 120 --payload 28.7MB --burst 8 --seconds 600
  omni-fastshm simulate pipeline.yaml --trace arrivals.jsonl --plot occupancy.png

A line of a trace is {"t": 0.25, "edge": ["thinker", "talker"], "bytes": 28700000, "hold_s": 0.12}. Settings are those
of the file; what it leaves open is planned as `omni-fastshm plan` does it. Exit status: 0; 1 where something cannot be
read.
"""
_STEPS = " ▁▂▃▄▅▆▇█"
_Rings = dict[tuple[str, tuple[str, ...]], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_load_arguments(parser, required=False)
    add_node_argument(parser)
    parser.add_argument("--trace", metavar="FILE", type=Path, help="JSON lines to replay instead of made-up arrivals")
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="of made-up arrivals (default 60)")
    parser.add_argument(
        "--arrivals", choices=("poisson", "even"), default="poisson", help="at random moments, or evenly"
    )
    parser.add_argument("--hold", choices=("fixed", "exponential"), default="fixed", help="how --hold-ms is meant")
    parser.add_argument("--seed", type=int, default=0, help="the same gives the same arrivals (default 0)")
    parser.add_argument(
        "--max-bytes", metavar="SIZE", type=_size, help="instead of the file's, for all rings; units as in --payload"
    )
    parser.add_argument(
        "--segment-bytes",
        metavar="SIZE",
        type=_size,
        help="instead of the file's, for all rings; units as in --payload",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw occupancy and refusals (needs matplotlib)")


def _size(text: str) -> int:
    try:
        number = size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.20} {error}") from None
    if number < 4096:
        raise argparse.ArgumentTypeError(f"{text!r:.20} is no size from 4096 bytes on")
    return number


def main(arguments: argparse.Namespace) -> int:
    """Replay and print what happened.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0.

    Raises:
        ConfigError: the file, the trace or a value cannot be used.
    """
    config = load_omni_transfer_config(arguments.config)
    trace, loads = _trace(config, arguments)
    plan = make_plan(config, loads, risk=arguments.risk, nodes=nodes_of(config, arguments.node))
    rings = {**_rings(plan, arguments), **_stores(config, plan, arguments)}
    if not rings:
        raise ConfigError(
            f"{arguments.config}: no payload of these sizes goes through shared memory or a store with a limit"
        )
    seconds = arguments.seconds if arguments.trace is None else max((each.t for each in trace), default=0.0)
    results = simulate(rings, trace, seconds)
    played = {(stage, to) for stage, targets in rings for to in targets}
    left_out = [each for each in plan.edges if (each.from_stage, each.to_stage) not in played]
    nodes = _by_node(plan, results)
    warnings = _warnings(rings, loads)
    if arguments.plot is not None:
        _plot(results, seconds, arguments.plot)
    if arguments.json:
        rows = [
            {**asdict(each), "segment_bytes": s["segment" if each.kind == "store" else "segment_bytes"]}
            for each, s in zip(results, rings.values(), strict=True)
        ]
        others = [[each.from_stage, each.to_stage] for each in left_out]
        found = {
            "format": FORMAT,
            "seconds": seconds,
            "rings": rows,
            "nodes": nodes,
            "left_out": others,
            "warnings": warnings,
        }
        print(json.dumps(found, indent=2))
    else:
        told = [f"warning: {printable(text)}" for text in warnings]
        print("\n".join([*_lines(results, rings, seconds), *map(_left_out, left_out), *told, *_node_lines(nodes)]))
    return 0


def _warnings(rings: _Rings, loads: dict[Edge, Load]) -> list[str]:
    """Payloads that do not fit into what was replayed, as `plan` says it of the file."""
    found = []
    for (stage, targets), settings in rings.items():
        threshold = 0 if settings.get("key_lookup") else settings.get("shm_threshold_bytes", 0)
        for edge in ((stage, to) for to in targets):
            if loads[edge].size >= threshold:
                found += never_fits(edge, loads[edge].size, settings)
    return found


def _trace(
    config: OmniTransferConfig, arguments: argparse.Namespace
) -> tuple[list[Arrival], dict[tuple[str, str], Load]]:
    if arguments.trace is None:
        if not 0 < arguments.seconds <= 1e7:
            raise ConfigError(f"--seconds: {arguments.seconds:g} is no time from 0 to 10,000,000")
        loads = loads_of(config, arguments)
        _few_enough(loads, arguments.seconds)
        made = arrivals_of(loads, arguments.seconds, kind=arguments.arrivals, hold=arguments.hold, seed=arguments.seed)
        return list(made), loads
    trace = [arrival._replace(edge=_known(config, arrival.edge)) for arrival in read_trace(arguments.trace)]
    unknown = sorted({arrival.edge for arrival in trace} - set(config.edges))
    if unknown:
        raise ConfigError(f"{arguments.trace}: {arguments.config} has no edge {' -> '.join(unknown[0])}")
    return trace, _loads_in(config, trace)


def _few_enough(loads: dict[Edge, Load], seconds: float) -> None:
    rate = sum(load.per_s for load in loads.values())
    bursts = sum(load.burst for load in loads.values() if load.per_s)  # even a single one is that many
    if rate * seconds > MOST_ARRIVALS:
        raise ConfigError(
            f"--seconds: {seconds:g} at {rate:g} arrivals per second in all are more than {MOST_ARRIVALS:,}, the most "
            f"that is replayed: give at most {rounded_down(MOST_ARRIVALS / rate)}, or a lower --rps"
        )
    if bursts > MOST_ARRIVALS:
        raise ConfigError(
            f"--burst: {bursts} in all are more than the {MOST_ARRIVALS:,} arrivals that are replayed at most: give at "
            f"most {MOST_ARRIVALS // len(loads)}"
        )


def _known(config: OmniTransferConfig, edge: Edge) -> Edge:
    """The edge by ids, where the trace has names."""
    try:
        return config.find_stage(edge[0]), config.find_stage(edge[1])
    except ConfigError:
        return edge  # that there is no such one is said with the place


def _loads_in(config: OmniTransferConfig, trace: list[Arrival]) -> dict[tuple[str, str], Load]:
    """What a trace holds, on average, for planning what the file leaves open."""
    seconds = max((arrival.t for arrival in trace), default=0.0) or 1.0
    loads = {}
    for edge in config.edges:
        here = [arrival for arrival in trace if arrival.edge == edge]
        number = max(len(here), 1)
        hold = sum(arrival.hold_s for arrival in here) / number
        rate = len(here) / max(seconds, hold, 0.01)  # a short trace shows no more under way than there are arrivals
        loads[edge] = Load(rate, hold, max((arrival.size for arrival in here), default=0))
    return loads


def _rings(plan: Plan, arguments: argparse.Namespace) -> _Rings:
    rings: _Rings = {}
    for ring in plan.rings:
        settings = {**ring.settings, **ring.configured}
        if arguments.max_bytes is not None:
            settings["max_bytes"] = arguments.max_bytes
        if arguments.segment_bytes is not None:
            settings["segment_bytes"] = arguments.segment_bytes
        rings[ring.from_stage, ring.to_stages] = settings
    return rings


def _stores(config: OmniTransferConfig, plan: Plan, arguments: argparse.Namespace) -> _Rings:
    """Edges through Mooncake's store. Those of one stage with equal settings fill its segment together."""
    shared: dict[tuple[str, str], tuple[list[str], dict[str, Any]]] = {}
    for each in plan.edges:
        if each.way == "store":
            settings = store_settings(config, (each.from_stage, each.to_stage))
            if arguments.max_bytes is not None:
                settings["max_bytes"] = arguments.max_bytes
            if settings["max_bytes"] is not None:
                key = each.from_stage, repr(sorted((name, repr(value)) for name, value in settings.items()))
                shared.setdefault(key, ([], settings))[0].append(each.to_stage)
    return {(stage, tuple(targets)): settings for (stage, _), (targets, settings) in shared.items()}


def _by_node(plan: Plan, results: list[RingResult]) -> list[dict[str, Any]]:
    """What each node needed at most, if all its rings were at their highest at once."""

    def most(stages: tuple[str, ...], kind: str) -> int:
        here = [each for each in results if each.from_stage in stages and each.kind == kind]
        return sum(each.high_capacity if kind == "ring" else each.high_water for each in here)

    return [
        {"name": node.name, "shm_bytes": most(node.stages, "ring"), "store_bytes": most(node.stages, "store")}
        for node in plan.nodes
    ]


def _node_lines(nodes: list[dict[str, Any]]) -> list[str]:
    if len(nodes) < 2:
        return []
    return [
        "",
        *(
            f"node {printable(node['name'])}: at most {human_bytes(node['shm_bytes'])} in /dev/shm, "
            f"{human_bytes(node['store_bytes'])} in the store"
            for node in nodes
        ),
    ]


def _lines(results: list[RingResult], rings: _Rings, seconds: float) -> list[str]:
    lines = [f"{human_seconds(seconds)} of traffic"]
    for result, settings in zip(results, rings.values(), strict=True):
        lines += [
            "",
            _title(result, settings),
            f"  in use   |{_bar(result.occupancy, result.max_bytes)}|",
        ]
        if any(result.refusals):
            lines.append(f"  refused  |{_bar(result.refusals, max(result.refusals))}|")
        inline = any(edge.inline for edge in result.edges.values())
        rows = [["TO", "PUTS", "WAITED", "LONGEST WAIT", "REFUSED", *(["INLINE"] if inline else [])]]
        for to, edge in sorted(result.edges.items()):
            waited = f"{edge.waited} ({edge.waited / edge.puts:.2%})" if edge.waited else "0"
            longest = human_seconds(edge.longest_wait_s) if edge.waited else "-"
            row = [printable(to), str(edge.puts), waited, longest, str(edge.refused)]
            rows.append([*row, *([str(edge.inline)] if inline else [])])
        lines += [f"  {line}" for line in table(rows)]
    refused = sum(edge.refused for result in results for edge in result.edges.values())
    return [*lines, "", f"{count(refused, 'payload')} refused" if refused else "nothing refused"]


def _title(result: RingResult, settings: dict[str, Any]) -> str:
    stage, limit, most = printable(result.from_stage), human_bytes(result.max_bytes), human_bytes(result.high_water)
    if result.kind == "store":
        segment = human_bytes(settings["segment"])
        return f"store of {stage}: limit {limit}, segment of {segment}; at most {most} in use"
    segment = human_bytes(settings["segment_bytes"])
    in_segments = human_bytes(result.high_capacity)
    return (
        f"ring of {stage}: max_bytes {limit}, segments of {segment}; at most {most} in use, {in_segments} in segments"
    )


def _left_out(edge: EdgePlan) -> str:
    why = {
        "inline": "too small: inside the metadata",
        "store": f"{edge.connector} without a limit: other nodes' memory, or what is evicted",
    }.get(edge.way, edge.connector)
    return f"left out: {printable(edge.from_stage)} -> {printable(edge.to_stage)} ({printable(why)})"


def _bar(values: list[int], full: int) -> str:
    return "".join(
        _STEPS[0 if not value else max(1, min(round(value / full * (len(_STEPS) - 1)), len(_STEPS) - 1))]
        for value in values
    )


def _plot(results: list[RingResult], seconds: float, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot: matplotlib is not installed; pip install 'omni-fastshm[plot]' brings it", op="simulate"
        ) from None
    figure = Figure(figsize=(9, 2.6 * len(results)), layout="constrained")
    step = seconds / COLUMNS
    times = [index * step for index in range(COLUMNS)]
    for number, result in enumerate(results):
        axes = figure.add_subplot(len(results), 1, number + 1)
        axes.step(times, [value / 2**20 for value in result.occupancy], where="post", label="most in use")
        axes.axhline(result.max_bytes / 2**20, linestyle="--", color="grey", label="max_bytes")
        if any(result.refusals):
            other = axes.twinx()
            other.bar(times, result.refusals, width=step, align="edge", alpha=0.4, color="red")
            other.set_ylabel("refused")
        axes.set_title(f"{result.kind} of {result.from_stage}")
        axes.set_xlabel("seconds")
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from None
