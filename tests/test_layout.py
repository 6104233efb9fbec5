"""One truth for bytes: the compiler's table has no holes, agrees with the header's text and with the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from native import render_layout

from omni_fastshm import _core

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"ofs_block": 128, "ofs_reader": 16, "ofs_control": 4096, "ofs_bell": 64, "ofs_directory": 16384}
CACHE_LINE = 64


def fields(structure: str) -> list[tuple[str, int, int]]:
    return [(name, offset, size) for owner, name, offset, size in _core.layout() if owner == structure]


@pytest.mark.parametrize("structure", SIZES)
def test_rows_tile_the_structure(structure: str) -> None:
    end = 0
    for name, offset, size in fields(structure):
        assert offset == end, f"{structure}.{name} starts at {offset}, the field before ends at {end}"
        end = offset + size
    assert end == SIZES[structure]


def test_no_other_structures() -> None:
    assert {row[0] for row in _core.layout()} == set(SIZES)


def test_every_member_in_the_header_has_a_row() -> None:
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "src/ofs_layout.h").read_text(), flags=re.S)
    for structure in SIZES:
        body = re.search(rf"struct {structure} \{{(.*?)\n\}};", text, flags=re.S)
        assert body, structure
        members = re.findall(r"(\w+)(?:\[\w+\])?;", body[1])
        assert members == [name for name, _, _ in fields(structure)]


def test_sizes_are_asserted_by_the_compiler() -> None:
    text = (ROOT / "src/ofs_layout.c").read_text()
    for structure, size in SIZES.items():
        assert f"sizeof(struct {structure}) == {size}" in text


def test_words_that_different_sides_write_share_no_line_pair() -> None:
    """Consumers write `readers` and `space`; a line shared with what the producer writes would go back and forth."""
    at = {name: offset for name, offset, _ in fields("ofs_control")}
    assert at["readers"] // 128 != at["blocks_ready"] // 128
    assert at["blocks_ready"] // 128 != at["magic"] // 128
    assert SIZES["ofs_bell"] == CACHE_LINE
    assert SIZES["ofs_block"] % CACHE_LINE == 0
    assert [offset % 8 for _, name, offset, size in _core.layout() if size == 8] == [0] * sum(
        size == 8 for *_, size in _core.layout()
    )


def test_size_of_a_control_segment() -> None:
    assert _core.CONTROL_SIZE == 4096 + 8 * _core.KEY_LIMIT + 128 * _core.BLOCK_LIMIT
    assert _core.control_fixed_size(64) == 4096 + 64 * 8
    assert _core.KEY_LIMIT == 2 * _core.BLOCK_LIMIT, "at most half full: look-ups stay short"


def test_the_page_is_the_table() -> None:
    wanted = render_layout.render(_core.layout(), _core.LAYOUT_VERSION, _core.BLOCK_LIMIT, _core.KEY_LIMIT)
    assert (ROOT / "docs/layout.md").read_text() == wanted, "run python tests/native/render_layout.py"
