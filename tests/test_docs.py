"""What README and docs say leads somewhere and is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), ROOT / "src" / "README.md"])

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not beside these tests")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for named in re.findall(r"`((?:bench|docs|examples|tests|src)/[\w./-]+\.\w+)`", text):
        assert "NAME" in named or (ROOT / named).exists(), f"{page.name} names {named}"


def test_every_page_is_reachable_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            found = (page.parent / target).resolve()
            todo += sorted(found.glob("*.md")) if found.is_dir() else [found]
    missing = {page for page in ROOT.glob("docs/**/*.md") if page.resolve() not in seen}
    assert not missing


def test_health_page_lists_what_health_gives(namespace: str) -> None:
    from omni_fastshm import SharedMemoryConnector

    with SharedMemoryConnector({"namespace": namespace}) as connector:
        given = set(connector.health())
    page = (ROOT / "docs" / "health.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == given


def test_the_readme_begins_with_the_first_example() -> None:
    """Which tests/test_examples.py runs."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    example = (ROOT / "examples" / "hello.py").read_text()
    assert code[1] == example.partition('"""\n\n')[2]
    written = [
        line for line in code[1].splitlines() if line.strip() and not line.lstrip().startswith(("#", "import", "from"))
    ]
    assert len(written) <= 16, "it has to fit on a screen with what stands around it"


def test_the_first_screen_of_the_readme_holds_what_it_should_and_nothing_else() -> None:
    fold = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(fold.splitlines()) <= 58
    blocks = re.findall(r"^```(\w*)$", fold, re.MULTILINE)
    assert blocks == ["python", "", "", ""]
    figures = re.findall(r"\]\((bench/results/[^)]+\.json)\)", fold)
    assert len(figures) == 1, "one figure, with its file"
    assert len(re.findall(r"^- ", fold, re.MULTILINE)) == 3, "when not to use it"
    commands = re.findall(r"^make (\w+) +# ", fold, re.MULTILINE)
    assert commands == ["demo", "test"]
