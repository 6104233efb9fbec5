"""Tables in the documentation that are made from kept figures."""

from __future__ import annotations

from pathlib import Path


def with_table(document: Path, begin: str, end: str, table: str) -> str:
    """The document's text with `table` between its two marks."""
    text = document.read_text()
    first, last = text.index(begin) + len(begin), text.index(end)
    return f"{text[:first]}\n\n{table}\n\n{text[last:]}"


def check(document: Path, begin: str, end: str, table: str) -> int:
    """Say whether the document shows `table`.

    Returns:
        0 when it does, else 1.
    """
    same = with_table(document, begin, end, table) == document.read_text()
    print(f"docs/{document.name} and its figures agree" if same else f"docs/{document.name} differs from its figures")
    return 0 if same else 1
