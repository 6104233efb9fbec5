"""Every place in the core where another process can see a change: read from the sources, so that none is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
# Not part of the core: their words belong to one process, which nobody goes on after.
PRIVATE = {"ofs_choice.c", "ofs_copy.c"}
_FUNCTION = re.compile(r"^(?:static )?(?:\w+ )+\*?(\w+)\([^;]*$", re.M)
_CHANGE = re.compile(r"\bofs_(?:store|add|and|or|cas)\d\d_\w+\(([^,]+),|OFS_VISIBLE\(\"(\w+)\"")


def places() -> list[str]:
    """``function word``, as src/ofs_fault.h names them, in the order of the sources."""
    found: dict[str, None] = {}
    for path in sorted(SRC.glob("ofs_*.c")):
        if path.name in PRIVATE:
            continue
        text = path.read_text()
        functions = [(match.start(), match[1]) for match in _FUNCTION.finditer(text)]
        for match in _CHANGE.finditer(text):
            inside = [name for start, name in functions if start < match.start()]
            found[f"{inside[-1]} {match[1] or match[2]}"] = None
    return list(found)
