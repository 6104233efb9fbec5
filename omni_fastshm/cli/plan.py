"""``omni-fastshm plan``: how much memory a pipeline needs, and the settings and manifests that give it."""

from __future__ import annotations

import argparse
import json

from omni_fastshm.cli.load import add_load_arguments, add_node_argument, loads_of, nodes_of
from omni_fastshm.cli.text import human_bytes, printable, table
from omni_fastshm.config import load_omni_transfer_config
from omni_fastshm.sizing import MIB, NodePlan, Plan, RingPlan, make_plan

__all__ = ["add_arguments", "main"]

FORMAT = 1  # of the JSON; changes when a key changes its meaning or goes

_NOTE = """example:
  omni-fastshm plan examples/qwen2_5_omni.yaml --rps 20 --hold-ms 120 --payload 28.7MB --payload 1:2=200kB

docs/sizing.md has the reasoning. Exit status: 0, also with warnings; 1 where the file or a value cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_load_arguments(parser, required=True)
    add_node_argument(parser)


def main(arguments: argparse.Namespace) -> int:
    """Print a plan.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0.

    Raises:
        ConfigError: the file or a value cannot be used.
    """
    config = load_omni_transfer_config(arguments.config)
    loads = loads_of(config, arguments)
    plan = make_plan(config, loads, risk=arguments.risk, nodes=nodes_of(config, arguments.node))
    if arguments.json:
        print(json.dumps({"format": FORMAT, **plan.as_dict()}, indent=2))
    else:
        print("\n".join(_lines(plan)))
    return 0


def _lines(plan: Plan) -> list[str]:
    lines = [f"at most {plan.risk:g} of the puts may find no room", "", *_edges(plan)]
    for ring in plan.rings:
        lines += ["", *_ring(ring)]
    for node in plan.nodes:
        lines += ["", *_node(node, several=len(plan.nodes) > 1)]
    lines += ["", *(f"warning: {printable(text)}" for text in plan.warnings)] if plan.warnings else []
    return lines


def _edges(plan: Plan) -> list[str]:
    rows = [["EDGE", "CONNECTOR", "PAYLOAD", "PER S", "HOLD", "UNDER WAY", "ROOM FOR", "MEMORY"]]
    for each in plan.edges:
        memory = human_bytes(each.bytes) if each.bytes else {"inline": "- (in the metadata)"}.get(each.way, "?")
        rows.append(
            [
                printable(f"{each.from_stage} -> {each.to_stage}"),
                printable(each.connector),
                human_bytes(each.load.size),
                f"{each.load.per_s:g}",
                f"{each.load.hold_s * 1000:g} ms",
                f"{each.mean:.1f}",
                str(each.peak),
                memory,
            ]
        )
    return table(rows)


def _ring(ring: RingPlan) -> list[str]:
    what = f"{printable(ring.from_stage)} -> {printable(', '.join(ring.to_stages))}"
    now = ", ".join(f"{key} {value}" for key, value in ring.configured.items())
    return [
        f"settings of {what}{f' (now {now})' if now else ''}:",
        "  extra:",
        f"    segment_bytes: {ring.segment_bytes}  # {human_bytes(ring.segment_bytes)}",
        f"    max_bytes: {ring.max_bytes}  # {human_bytes(ring.max_bytes)}",
    ]


def _node(node: NodePlan, *, several: bool) -> list[str]:
    lines = []
    if several:
        lines.append(f"node {node.name} ({', '.join(map(printable, node.stages))}):")
    if node.shm_bytes:
        shm = node.shm_bytes // MIB
        lines += [
            f"/dev/shm: {human_bytes(node.shm_bytes)}, shared by all processes of the pipeline",
            f"  docker run --shm-size={shm}m --ipc=shareable …   (the others: --ipc=container:NAME)",
            f"  docker compose:  shm_size: {shm}m",
            "  kubernetes, in one pod; counts against the containers' memory limits:",
            "    volumes:",
            f"      - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shm}Mi}}}}",
            "    containers: [{…, volumeMounts: [{name: shm, mountPath: /dev/shm}]}]",
        ]
    if node.store_bytes:
        lines.append(
            f"Mooncake: segment {node.store_bytes // MIB}MiB in all, ordinary memory of the processes that put"
        )
    if node.receive_bytes:
        lines.append(f"Mooncake: localbuf {node.receive_bytes // MIB}MiB in all, of the processes that get")
    if node.process_bytes:
        lines.append(f"in-process edges: {human_bytes(node.process_bytes)} of the process")
    return lines or ["no memory beyond the metadata"]
