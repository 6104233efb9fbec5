"""Figures as text, the same in all tables."""

from __future__ import annotations


def time(micro: float | None) -> str:
    if micro is None:
        return "-"
    if micro >= 1000:
        return f"{micro / 1000:.3g} ms"
    return f"{micro:.3g} µs"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(head: list[str], rows: list[list[str]], figures: bool = True) -> str:
    """A table in Markdown; all columns but the first hold figures, or text."""
    lines = [head, ["---", *["---:" if figures else "---"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
