"""``omni-fastshm ls``: what lies on the shm mount, who owns it, and who uses it. Changes nothing."""

from __future__ import annotations

import argparse
import json

from omni_fastshm.cli.text import add_namespace_argument, count, human_bytes, human_seconds, printable, table
from omni_fastshm.inventory import Endpoint, NamespaceDirectory, Oddity, Snapshot, take_snapshot
from omni_fastshm.reading import Holder

__all__ = ["add_arguments", "main"]

FORMAT = 1  # of the JSON; changes when a key changes its meaning or goes

_NOTE = """Process ids are shown as the processes called themselves, perhaps in another PID namespace; whether somebody
lives is told by locks. The exit status is 0, also when there is nothing, and 1 where there is no shm mount.
docs/operating.md explains the columns and the JSON.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_namespace_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--wide", action="store_true", help="also each segment and each reader")


def main(arguments: argparse.Namespace) -> int:
    """Print a snapshot.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0.

    Raises:
        SegmentError: there is no shm mount.
    """
    snapshot = take_snapshot(arguments.namespace)
    if arguments.json:
        print(json.dumps({"format": FORMAT, **snapshot.as_dict()}, indent=2))
    else:
        print("\n".join(_lines(snapshot, arguments.wide)))
    return 0


def _lines(snapshot: Snapshot, wide: bool) -> list[str]:
    lines = [f"{snapshot.mount}: {_space(snapshot)}"]
    if not (snapshot.endpoints or snapshot.directories or snapshot.oddities):
        where = "any namespace" if snapshot.namespace is None else f"namespace {snapshot.namespace}"
        return [*lines, f"nothing of omni-fastshm in {where}"]
    if snapshot.endpoints:
        lines += ["", *_endpoints(snapshot.endpoints, wide)]
    if wide and snapshot.endpoints:
        lines += ["", *_segments(snapshot.endpoints)]
        holders = _holders(snapshot.endpoints)
        lines += ["", *holders] if len(holders) > 1 else []
    if snapshot.directories:
        lines += ["", *_directories(snapshot.directories)]
    if snapshot.oddities:
        lines += ["", *_oddities(snapshot.oddities)]
    return lines


def _space(snapshot: Snapshot) -> str:
    memory = sum(each.memory for each in snapshot.endpoints) + sum(each.allocated for each in snapshot.directories)
    free = f"{human_bytes(snapshot.free)} of {human_bytes(snapshot.size)} free" if snapshot.size else "no size limit"
    endpoints = count(len(snapshot.endpoints), "endpoint")
    where = "all namespaces" if snapshot.namespace is None else f"namespace {snapshot.namespace}"
    return f"{free}; user {snapshot.uid}, {where}: {endpoints}, {human_bytes(memory)}"


def _endpoints(endpoints: tuple[Endpoint, ...], wide: bool) -> list[str]:
    header = ["NAMESPACE", "ENDPOINT", "PID", "STATE", "AGE", "MEMORY", "PENDING", "HELD", "FREE", "TAKES", "HOLDERS"]
    return table([[*header, *(["OLDEST", "PENDING BYTES", "HELD BYTES"] if wide else [])], *_rows(endpoints, wide)])


def _rows(endpoints: tuple[Endpoint, ...], wide: bool) -> list[list[str]]:
    rows = []
    for each in endpoints:
        blocks = each.control.blocks
        row = [
            each.namespace,
            each.endpoint,
            str(each.control.pid),
            _state(each),
            human_seconds(each.control.age_s),
            f"{human_bytes(each.memory)} in {1 + len(each.data)}",
            str(blocks.pending),
            str(blocks.held + blocks.held_untaken),
            str(blocks.free),
            str(blocks.takes),
            ", ".join(map(_holder, each.control.holders)) or "-",
        ]
        if wide:
            oldest = "-" if blocks.oldest_s is None else human_seconds(blocks.oldest_s)
            row += [oldest, human_bytes(blocks.pending_bytes), human_bytes(blocks.held_bytes)]
        rows.append(row)
    return rows


def _state(endpoint: Endpoint) -> str:
    if endpoint.orphan_left_s is None:
        return endpoint.state
    if endpoint.control.dead_s is None:  # its time begins when a process looks that may note it
        return f"{endpoint.state} (keeps {human_seconds(endpoint.orphan_left_s)})"
    return f"{endpoint.state} ({human_seconds(endpoint.orphan_left_s)} left)"


def _holder(holder: Holder) -> str:
    return f"{holder.pid}" if holder.alive else f"{holder.pid} (dead)"


def _segments(endpoints: tuple[Endpoint, ...]) -> list[str]:
    rows = [["SEGMENT", "LENGTH", "MEMORY", "LOOKED AT"]]
    for each in endpoints:
        rows.append([each.name, human_bytes(each.length), human_bytes(each.allocated), "-"])
        held = each.control.held_segments
        for data in each.data:
            used = "perhaps" if held is None else "yes" if data.number in held else "no"
            rows.append([data.name, human_bytes(data.length), human_bytes(data.allocated), used])
    return table(rows)


def _holders(endpoints: tuple[Endpoint, ...]) -> list[str]:
    rows = [["ENDPOINT", "SLOT", "PID", "ALIVE", "SINCE", "BLOCKS"]]
    for each in endpoints:
        for holder in each.control.holders:
            alive, since = "yes" if holder.alive else "no", human_seconds(holder.since_s)
            rows.append([each.endpoint, str(holder.slot), str(holder.pid), alive, since, str(holder.blocks)])
    return table(rows)


def _directories(directories: tuple[NamespaceDirectory, ...]) -> list[str]:
    rows = [["DIRECTORY OF", "USERS", "PRODUCERS", "MEMORY"]]
    for each in directories:
        users = "some" if each.users is None else str(each.users)
        rows.append([each.namespace, users, str(len(each.producers)), human_bytes(each.allocated)])
    return table(rows)


def _oddities(oddities: tuple[Oddity, ...]) -> list[str]:
    rows = [["ALSO THERE", "USER", "KIND", "MEMORY", "WHY"]]
    for each in oddities:
        name, memory = printable(each.name), human_bytes(each.allocated)
        rows.append([name, str(each.uid), each.kind, memory, printable(each.reason)])
    return table(rows)
