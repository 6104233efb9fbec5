"""Each sync label in the core has two sides, a row in docs/memory-order.md, and mutants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from native.mutants.catalogue import ORDERINGS

ROOT = Path(__file__).resolve().parents[1]
LABELS = ("made", "ready", "published", "content", "released", "space", "arrival", "entered")

# A label is a comment of its own ("/* made */", "/* released, space */") or starts one ("/* content: why").
_ANY = "|".join(LABELS)
LABEL = re.compile(rf"/\* ((?:{_ANY})(?:, (?:{_ANY}))*)(?: \*/|:)")
# Longer comments name further labels in parentheses: "(space)".
ALSO = re.compile(rf"\(({_ANY})\)")
PUBLISHES = re.compile(r"ofs_(?:store|add|and|or|cas)\d\d_(?:release|acqrel|seq)")
RELIES = re.compile(r"ofs_(?:load\d\d_(?:acquire|seq)|cas\d\d_(?:acqrel|seq)|or32_seq|and64_seq)")
REACH = 4  # a comment above a statement speaks of the lines that follow


def sides() -> dict[str, set[str]]:
    """By label: "publishes" and "relies", as far as an operation of that kind stands where the label is."""
    found: dict[str, set[str]] = {label: set() for label in LABELS}
    for path in sorted((ROOT / "src").glob("ofs_*.c")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            labels = {label for match in LABEL.finditer(line) for label in match[1].split(", ")}
            labels |= {label for label in ALSO.findall(line) if label in LABELS}
            own = line.split("/*")[0].strip()
            # Trailing comments may stand on the second line of a long statement.
            reach = lines[number - 1 : number + 1] if own else lines[number : number + 1 + REACH]
            for label in labels:
                text = "\n".join(reach)
                found[label] |= {"publishes"} if PUBLISHES.search(text) else set()
                found[label] |= {"relies"} if RELIES.search(text) else set()
    return found


def rows() -> dict[str, str]:
    text = (ROOT / "docs/memory-order.md").read_text()
    return {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", text, flags=re.M)}


@pytest.mark.parametrize("label", LABELS)
def test_a_label_has_both_sides(label: str) -> None:
    assert sides()[label] == {"publishes", "relies"}


def test_a_row_for_each_label_and_no_other() -> None:
    assert tuple(rows()) == LABELS


@pytest.mark.parametrize("label", LABELS)
def test_a_row_names_functions_that_exist(label: str) -> None:
    named = re.findall(r"`(ofs_\w+|set_free)`", rows()[label])
    assert len(named) >= 2
    source = "\n".join(path.read_text() for path in (ROOT / "src").glob("ofs_*.c"))
    assert not [name for name in named if not re.search(rf"^\S.*\b{name}\(", source, flags=re.M)]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_has_mutants(label: str) -> None:
    assert any(mutant.label == label for mutant in ORDERINGS)


def test_no_label_is_misspelt() -> None:
    for path in (ROOT / "src").glob("ofs_*.c"):
        for word in re.findall(
            r"_(?:release|acquire|acqrel|seq)\([^\n]*/\* (\w+)[^\n]*\*/$", path.read_text(), flags=re.M
        ):
            assert word in LABELS, f"{path.name}: {word}"


def test_every_mutant_of_an_ordering_names_a_label_of_ours() -> None:
    assert {mutant.label for mutant in ORDERINGS} <= {*LABELS, ""}
