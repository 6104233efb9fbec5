"""``omni-fastshm reap``: take away what dead processes left on the shm mount, and say what was left there and why."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from omni_fastshm import inventory, janitor
from omni_fastshm.cli.text import add_namespace_argument, count, human_bytes, human_seconds, printable

__all__ = ["add_arguments", "main"]

FORMAT = 1  # of the JSON; changes when a key changes its meaning or goes

_NOTE = """Living processes and other users' objects are never touched. The exit status is 0 when all that may go is
gone (what dead producers sent may still be got for a while, and other users' objects stay), 1 when something under this
user's names could not be handled, or there is no shm mount. docs/operating.md says more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this sub-command.

    Args:
        parser: the sub-command's parser.
    """
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_namespace_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    parser.add_argument("--force", action="store_true", help="drop payloads of dead producers before their time")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Sweep, and print what came of it.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0, or 1 when something of this user could not be handled.

    Raises:
        SegmentError: there is no shm mount.
    """
    # What is left alone is part of the answer; without a handler it would be on stderr as well.
    logging.getLogger("omni_fastshm").addHandler(logging.NullHandler())
    seen = inventory.take_snapshot(arguments.namespace)
    sweep = janitor.preview if arguments.dry_run else janitor.sweep
    swept = sweep(arguments.namespace, force=arguments.force)
    foreign = [each for each in seen.oddities if each.kind == "foreign" and each.name not in swept.left_alone]
    if arguments.json:
        print(json.dumps(_as_dict(swept, foreign, arguments.dry_run), indent=2))
    else:
        print("\n".join(_lines(swept, foreign, arguments.namespace, dry=arguments.dry_run)))
    return 1 if swept.left_alone else 0


def _as_dict(swept: janitor.Swept, foreign: list[inventory.Oddity], dry: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "dry_run": dry,
        "removed": swept.removed,
        "dropped_payloads": swept.dropped,
        "freed_bytes": swept.freed,
        "held_bytes": swept.held,
        "kept": [
            {"name": each.name, "payloads": each.payloads, "seconds_left": each.seconds_left} for each in swept.kept
        ],
        "alive": swept.alive,
        "foreign": [{"name": each.name, "uid": each.uid} for each in foreign],
        "left_alone": [{"name": name, "reason": reason} for name, reason in swept.left_alone.items()],
    }


def _lines(swept: janitor.Swept, foreign: list[inventory.Oddity], only: str | None, *, dry: bool) -> list[str]:
    lines = [f"{'would remove' if dry else 'removed'}  {name}" for name in swept.removed]
    lines += [
        f"kept  {each.name}: its producer is dead, but {count(each.payloads, 'payload')} may still be got for "
        f"{human_seconds(each.seconds_left)}; --force drops them"
        for each in swept.kept
    ]
    lines += [f"alive  {name}" for name in swept.alive]
    lines += [f"skipped  {printable(each.name)}: of user {each.uid}" for each in foreign]
    lines += [
        f"left alone  {printable(name)}: {printable(reason.removeprefix(f'{name} '))}"
        for name, reason in swept.left_alone.items()
    ]
    where = "all namespaces" if only is None else f"namespace {only}"
    names, dropped, freed = count(len(swept.removed), "name"), count(swept.dropped, "payload"), human_bytes(swept.freed)
    did = f"{names} removed, {dropped} dropped, {freed} given back"
    if dry:
        did = f"would remove {names}, drop {dropped}, give back {freed}"
    if swept.held:
        did += f", {human_bytes(swept.held)} more when readers let go"
    rest = f"{len(swept.kept)} kept, {len(swept.alive)} alive, {len(foreign)} of other users skipped"
    problems = f", {len(swept.left_alone)} left alone" if swept.left_alone else ""
    return [*lines, f"{where}: {did}; {rest}{problems}"]
