"""Tables, sizes and times as the operator's commands print them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import check_namespace

__all__ = ["add_namespace_argument", "count", "human_bytes", "human_seconds", "namespace", "printable", "table"]


def namespace(text: str) -> str:
    """A namespace's name from the command line."""
    try:
        return check_namespace(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("namespace: ")) from None


class _Once(argparse.Action):
    """A value that has two ways in, of which one is used."""

    def __call__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, *_: Any) -> None:
        if value is None:  # nothing by itself; perhaps behind the option
            return
        before = getattr(found, self.dest)
        if before not in (None, value):
            parser.error(f"two namespaces, {before} and {value}: give one, or none for all of them")
        setattr(found, self.dest, value)


def add_namespace_argument(parser: argparse.ArgumentParser) -> None:
    """A namespace by itself, or behind ``--namespace``; `arguments.namespace` is None without."""
    text = "only this one; default: all of this user"
    parser.add_argument("namespace", metavar="NAMESPACE", nargs="?", action=_Once, type=namespace, help=text)
    parser.add_argument("--namespace", metavar="NS", action=_Once, type=namespace, help="the same")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def human_bytes(size: float) -> str:
    """``"64.1 MiB"``: units of 1,024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} EiB"


def human_seconds(seconds: float) -> str:
    """``"0.5s"``, ``"42s"``, ``"3m02s"``, ``"2h05m"``, ``"3d04h"``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def count(number: int, what: str) -> str:
    """``"1 payload"``, ``"2 payloads"``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """`text` on one line: a name on the mount must not be able to move the cursor of whoever looks at it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
