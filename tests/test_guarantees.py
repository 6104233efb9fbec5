"""docs/guarantees.md: each row leads to a test that exists and that is expected to pass."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guarantees.md"
COLUMNS = 5

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not beside these tests")


def rows() -> list[list[str]]:
    """The cells of all rows that describe an event."""
    found = []
    for line in PAGE.read_text().splitlines() if PAGE.is_file() else []:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            if cells[0] != "event" and not set(line) <= set("|- "):
                found.append(cells)
    return found


def links(text: str) -> list[tuple[str, str]]:
    """File and test of each link to a test."""
    return re.findall(r"\]\((\.\./tests/[^)#]+\.py)#([^)]*)\)", text)


@functools.cache
def defined_in(path: Path) -> dict[str, bool]:
    """The tests of a file as ``Class.test``: is each expected to pass?"""
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = " ".join(ast.unparse(mark) for mark in node.decorator_list if "param" not in ast.unparse(mark))
                found[prefix + node.name] = "xfail" not in marks

    visit(ast.parse(path.read_text()).body, "")
    return found


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: re.sub(r"[^\w ]", "", cells[0])[:50])
def test_a_row_is_shown_by_tests(cells: list[str]) -> None:
    assert len(cells) == COLUMNS
    assert all(cells), "an empty cell says nothing"
    named = links(cells[-1])
    assert len(named) == cells[-1].count("]("), "a link that does not lead to a test"
    missing = [f"{file}#{test}" for file, test in named if test not in defined_in((PAGE.parent / file).resolve())]
    assert not missing
    assert any(defined_in((PAGE.parent / file).resolve())[test] for file, test in named), "shown by nothing that passes"


def test_there_are_rows_for_all_kinds_of_events() -> None:
    assert len(rows()) > 30
    events = " ".join(cells[0] for cells in rows())
    for word in (
        "kill",
        "fork",
        "mount",
        "memory limit",
        "restarts",
        "signal",
        "users",
        "damaged",
        "time of day",
        "views",
    ):
        assert word in events, word
