"""Pages that are made from the code are as the code would make them; pages that name messages name real ones."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import omni_fastshm

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Messages of the system, of Docker and of the compiler, which stand in nobody's sources here.
VLLM_OMNI = {"Unknown connector: FastSharedMemoryConnector"}
NOT_OURS = {"No space left on device", "gcc", "Python.h", "/dev/shm", "get"} | VLLM_OMNI

pytestmark = pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="the tools are not beside these tests")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"omni_fastshm_tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_settings_are_the_schema() -> None:
    page = DOCS / "configuration.md"
    assert page.read_text() == tool("render_pages").configuration_page(page.read_text()), "run `make pages`"


def test_files_are_shown_as_they_are() -> None:
    render = tool("render_pages")
    for page in render.SHOWING:
        text = page.read_text()
        assert render.SHOWN.search(text), page
        assert text == render.with_files(text), "run `make pages`"
        changed = re.sub(r"(```(?:python|yaml)\n)[^\n]+", r"\1# another first line", text, count=1)
        assert changed != text
        assert render.with_files(changed) == text


def test_a_changed_setting_shows() -> None:
    """The comparison above is worth something: another default is another page."""
    page = (DOCS / "configuration.md").read_text()
    changed = page.replace("| `put_timeout_s` | 5 |", "| `put_timeout_s` | 6 |", 1)
    assert changed != page
    assert tool("render_pages").configuration_page(changed) == page


def test_the_page_of_errors_is_made_from_their_docstrings() -> None:
    made = tool("render_pages").errors_page()
    assert (DOCS / "errors.md").read_text() == made, "run `make pages`"
    errors = [name for name in omni_fastshm.__all__ if isinstance(getattr(omni_fastshm, name), type)]
    errors = [name for name in errors if issubclass(getattr(omni_fastshm, name), omni_fastshm.FastShmError)]
    assert len(errors) > 8
    assert all(f"`{name}` |" in made for name in errors)


def test_every_promised_name_has_an_entry_in_the_api_pages() -> None:
    pages = "\n".join(path.read_text() for path in [*(DOCS / "api").glob("*.md"), DOCS / "errors.md"])
    shown = set(re.findall(r"^::: omni_fastshm[\w.]*\.(\w+)$", pages, re.MULTILINE))
    errors = {name for name in omni_fastshm.__all__ if f"`{name}` |" in (DOCS / "errors.md").read_text()}
    assert set(omni_fastshm.__all__) - shown - errors == set()


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """MkDocs has tags of its own."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            found = (DOCS / entry).glob("*.md") if entry.endswith("/") else [DOCS / entry]
            return {str(path.relative_to(DOCS)) for path in found}
        parts = entry.values() if isinstance(entry, dict) else entry
        return {page for part in parts for page in pages(part)}  # type: ignore[attr-defined]

    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - pages(nav) == set()


def test_messages_in_the_headings_of_troubleshooting_are_real() -> None:
    sources = " ".join(
        path.read_text() for path in [*(ROOT / "omni_fastshm").rglob("*.py"), *(ROOT / "src").glob("*.pyx")]
    )
    # A message may go over several literals, and name the mount by a constant.
    text = re.sub(r'"\s*\n?\s*f?"', "", sources).replace("{MOUNT}", "/dev/shm").replace("{segments.MOUNT}", "/dev/shm")
    text = text.replace("removed from %s by somebody", "removed from /dev/shm by somebody")
    text += "".join(omni_fastshm.OmniConnectorBase.__abstractmethods__)
    headings = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    assert len(quoted) > 15
    missing = [message for message in quoted if message not in NOT_OURS and message not in text]
    assert not missing


def test_the_texts_of_compiled_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API pages take them from the .pyx; its way of finding them is tried on each method that has one."""
    fake = ModuleType("griffe")
    fake.Docstring = fake.Extension = fake.Module = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "griffe", fake)
    pyx_docs = tool("pyx_docs")
    for path in (ROOT / "src").glob("*.pyx"):
        module = path.stem
        assert f"::: omni_fastshm.{module}\n" in (DOCS / "api" / "core.md").read_text()
        compiled = importlib.import_module(f"omni_fastshm.{module}")
        found = pyx_docs.docstrings(path.read_text())
        assert found[""] == (compiled.__doc__ or "").strip()
        for name, text in found.items():
            owner, _, method = name.rpartition(".")
            holder = getattr(compiled, owner, None) if owner else compiled
            if name and hasattr(holder, method):
                assert text.split()[0] in (getattr(holder, method).__doc__ or ""), name
        assert len(found) > 1


def public_callables() -> list[tuple[str, object]]:
    """Functions, and methods that are not inherited, under the promised names."""
    found: list[tuple[str, object]] = []
    for name in omni_fastshm.__all__:
        value = getattr(omni_fastshm, name)
        if not isinstance(value, type):
            found.append((name, value))
        elif not issubclass(value, Exception):
            found += [(f"{name}.{key}", getattr(value, key)) for key in vars(value) if not key.startswith("_")]
    return [(name, value) for name, value in found if callable(value)]


@pytest.mark.parametrize(
    ("name", "value"), public_callables(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_docstrings_tell_arguments_results_and_errors(name: str, value: object) -> None:
    text = inspect.getdoc(value)
    assert text, "nothing is said"
    signature = inspect.signature(value)  # type: ignore[arg-type]
    taken = [key for key in signature.parameters if key not in ("self", "cls")]
    if len(text.splitlines()) == 1:
        assert not name.endswith(("put", "get", "many", "cleanup", "allocate", "connector")), "one line is too little"
        return
    for key in taken:
        assert re.search(rf"^    {key}: ", text, re.MULTILINE), f"nothing is said about {key}"
    if "return" in getattr(value, "__annotations__", {}) and signature.return_annotation not in ("None", None):
        assert re.search(r"^(Returns|Yields):", text, re.MULTILINE), "nothing is said about the result"


def test_the_check_of_the_built_site_sees_what_is_wrong(tmp_path: Path) -> None:
    check = tool("check_site")
    (tmp_path / "b.html").write_text('<p id="here">x</p>')
    good = '<a href="b.html#here">x</a><a href="https://example.org/">x</a><link rel="stylesheet" href="s.css">'
    (tmp_path / "s.css").write_text("p { background: url('p.svg') }")
    (tmp_path / "a.html").write_text(good)
    assert list(check.problems(tmp_path)) == []
    for bad, what in (
        ('<a href="c.html">x</a>', "leads nowhere"),
        ('<a href="b.html#there">x</a>', "leads to no anchor"),
        ('<a href="#there">x</a>', "leads to no anchor"),
        ('<img src="missing.svg">', "leads nowhere"),
        ('<script src="https://example.org/x.js"></script>', "fetches https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "fetches //example.org/x.css"),
    ):
        (tmp_path / "a.html").write_text(good + bad)
        [found] = check.problems(tmp_path)
        assert what in found
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "s.css").write_text("@import 'https://example.org/font.css';")
    assert len(list(check.problems(tmp_path))) == 1
