"""Writes docs/layout.md from `_core.layout()`: no offset in the documents is drawn by hand.

Run ``python tests/native/render_layout.py`` after a change of the layout; tests/test_layout.py compares.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "layout.md"

HEAD = """# Layout of shared memory

Layout version {version}. This page is made from the compiler's own table by `tests/native/render_layout.py`. What a
field means stands in `src/ofs_layout.h`, who may write it in [protocol.md](protocol.md).

A producing endpoint has one **control segment**: the header `ofs_control`, then room for a key table of {keys} words of
8 bytes (`key_slots` of them are used and backed by memory, none without key look-up), then {limit} descriptors
`ofs_block`, of which the first `blocks_ready` are backed by memory. The tables begin at the same place in every control
segment: nothing that another process can change leads outside. Its **data segments** hold payload bytes and nothing
else; every block starts at a multiple of 64. A namespace has one **directory**,
`ofs_directory`. Everything is little endian; there are no addresses in shared memory.
"""

TEXT = {
    "ofs_block": "One payload's place. `word` is bits 63..40 generation, 39..32 takes left, 31..0 reader slots.",
    "ofs_reader": "Who has a reader slot: for people only, decisions rest on the slot's lock.",
    "ofs_control": "Start of a control segment.",
    "ofs_bell": "A word to sleep on: bit 0 says that somebody sleeps, the rest counts rings.",
    "ofs_directory": "The directory of a namespace.",
}


def render(rows: list[tuple[str, str, int, int]], version: int, limit: int, keys: int) -> str:
    """The whole page as text."""
    page = [HEAD.format(version=version, limit=limit, keys=keys)]
    for structure in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == structure]
        page.append(f"\n## {structure}: {own[-1][2] + own[-1][3]} bytes\n\n{TEXT[structure]}\n")
        page.append("| offset | bytes | field |\n| ---: | ---: | --- |")
        page += [f"| {offset} | {size} | {_shown(name)} |" for _, name, offset, size in own]
    return "\n".join(page) + "\n"


def _shown(name: str) -> str:
    return "*(zero)*" if re.fullmatch(r"reserved\d*", name) else f"`{name}`"


if __name__ == "__main__":
    from omni_fastshm import _core

    PAGE.write_text(render(_core.layout(), _core.LAYOUT_VERSION, _core.BLOCK_LIMIT, _core.KEY_LIMIT))
    print(f"wrote {PAGE.name}")
