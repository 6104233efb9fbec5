"""Writes what the documentation says about settings and errors, and the files that it shows, from the code that knows.

Run ``python tools/render_pages.py`` after a change of a setting or of errors.py; tests/test_pages.py compares.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_fastshm import errors
from omni_fastshm.factory import OmniConnectorFactory
from omni_fastshm.settings import Setting

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"
ERRORS = ROOT / "docs" / "errors.md"
# Pages that show a whole file, each time behind a line that names it.
SHOWING = tuple(ROOT / name for name in ("README.md", "docs/quickstart.md", "docs/deploying.md"))
SHOWN = re.compile(r"(<!-- file: ([\w./]+) -->\n\n```\w+\n).*?(```\n)", re.DOTALL)
CONNECTORS = ("SharedMemoryConnector", "InProcessConnector", "MooncakeConnector")
BEGIN, END = "<!-- settings: begin, written by tools/render_pages.py -->", "<!-- settings: end -->"
UNITS = {"int": "", "bytes": " bytes", "size": " bytes, or text as `512MiB`", "seconds": " s", "microseconds": " µs"}

ERRORS_HEAD = """# Errors, and what to do

"Not now" is an answer, not an error:

| answer | means | to do |
| --- | --- | --- |
| `put` → `(False, 0, None)` | no room for `put_timeout_s`: ring, mount or store is full. Nothing was sent | \
try again, or fail the request; raise what the line in the log names; or `fallback: inline` |
| `get` → `None` | not there (yet), taken, cancelled, replaced, its sender closed, or the time ran out | \
carry on without it, or halt the stage: `recv_via_connector` does |

Everything else is an exception. This table is made from the docstrings of `omni_fastshm.errors` by
`tools/render_pages.py`; `also` is the built-in exception that it can be caught as.

| error | also | means | to do |
| --- | --- | --- | --- |
"""

ERRORS_TAIL = """
Beside these, a connector that is pickled or copied raises `TypeError`. `close` and `health` raise nothing.

By symptom: [troubleshooting.md](troubleshooting.md).

## Signatures

::: omni_fastshm.errors
    options:
      show_root_heading: false
      show_root_toc_entry: false
"""


def number(value: float) -> str:
    return f"{value:g}" if value < 1e6 or value != int(value) else f"{int(value)}"


def takes(setting: Setting) -> str:
    """What a setting may be, in the words of the table."""
    if setting.kind == "choice":
        text = ", ".join(f"`{choice}`" for choice in setting.choices)
    elif setting.kind == "bool":
        text = "`true`, `false`"
    elif setting.kind == "auto":
        text = "`auto`, `true`, `false`"
    elif setting.kind == "names":
        text = "list of `module:Class`"
    elif setting.kind == "str":
        text = "text"
    else:
        low = number(setting.minimum or 0)
        text = (f"{low} … {number(setting.maximum)}" if setting.maximum is not None else f"≥ {low}") + UNITS[
            setting.kind
        ]
    return f"{text}, `$NAME`" if setting.env else text


def default(value: Any) -> str:
    """A default as YAML."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join(value)}]`"
    return f"`{value}`" if value else '`""`'


def settings_table(table: Mapping[str, Setting]) -> str:
    """One row for each setting."""
    rows = ["| setting | default | what it may be | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{name}` | {default(s.default)} | {takes(s)} | {s.help} |" for name, s in table.items()]
    return "\n".join(rows)


def configuration_page(text: str) -> str:
    """The page with the table of each connector replaced."""
    for name in CONNECTORS:
        table = OmniConnectorFactory.settings_of(name)
        assert table is not None, name
        head, heading, rest = text.partition(f"### {name}\n")
        before, begin, rest = rest.partition(BEGIN)
        _, end, after = rest.partition(END)
        assert all((heading, begin, end)), f"no place for the table of {name}"
        text = f"{head}{heading}{before}{begin}\n\n{settings_table(table)}\n\n{end}{after}"
    return text


def error_classes() -> list[type[errors.FastShmError]]:
    """All errors in the order of the file."""
    found = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.FastShmError)]
    return sorted(found, key=lambda cls: inspect.getsourcelines(cls)[1])


def depth(cls: type) -> int:
    return len([base for base in cls.__mro__ if issubclass(base, errors.FastShmError)]) - 1


def builtin_of(cls: type) -> str:
    names = [base.__name__ for base in cls.__bases__ if vars(builtins).get(base.__name__) is base]
    return ", ".join(f"`{name}`" for name in names if name != "Exception")


def code(text: str) -> str:
    """Double backticks are for docstrings; a table has single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split()))


def errors_page() -> str:
    """The page of errors."""
    rows = []
    for cls in error_classes():
        what, _, advice = inspect.getdoc(cls).partition("\n\nTo do: ")  # type: ignore[union-attr]
        advice = advice.partition("\n\n")[0]
        assert advice, f"{cls.__name__} does not say what to do"
        indent = "&nbsp;&nbsp;" * depth(cls)
        rows.append(f"| {indent}`{cls.__name__}` | {builtin_of(cls)} | {code(what)} | {code(advice)} |\n")
    return ERRORS_HEAD + "".join(rows) + ERRORS_TAIL


def with_files(text: str) -> str:
    """The page with the text of each file that it shows; of a script without its docstring."""

    def show(match: re.Match[str]) -> str:
        content = (ROOT / match[2]).read_text()
        if content.startswith('"""'):
            content = content.partition('"""\n\n')[2]
        return f"{match[1]}{content}{match[3]}"

    return SHOWN.sub(show, text)


def main() -> int:
    for page in SHOWING:
        page.write_text(with_files(page.read_text()))
    CONFIGURATION.write_text(configuration_page(CONFIGURATION.read_text()))
    ERRORS.write_text(errors_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
