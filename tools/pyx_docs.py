"""The compiled modules in the API pages: signatures from the stubs, texts from the docstrings in src/*.pyx.

A stub is what mypy reads and has no texts; the .pyx has both, but only Cython reads it. This looks for its docstrings.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension, Module

SOURCES = Path(__file__).resolve().parent.parent / "src"
DEFINED = re.compile(
    r"^(?P<indent> *)"
    r"(?:(?:cdef )?class (?P<cls>\w+)[^\n]*|(?:def|cpdef [\w ]*?)\s*(?P<name>\w+)\([^)]*\)[^:\n]*):[^\n]*\n"
    r'(?:\s*"""(?P<text>.*?)""")?',
    re.MULTILINE | re.DOTALL,
)


def docstrings(source: str) -> dict[str, str]:
    """The docstring of each class and function of a .pyx, by its name with that of its class in front."""
    found: dict[str, str] = {}
    owner = ""
    for match in DEFINED.finditer(source):
        if match["cls"]:
            owner, name = match["cls"], match["cls"]
        else:
            name = f"{owner}.{match['name']}" if match["indent"] else match["name"]
        if match["text"]:
            found[name] = inspect.cleandoc(match["text"])
    if head := re.match(r'(?:#[^\n]*\n)*"""(.*?)"""', source, re.DOTALL):
        found[""] = inspect.cleandoc(head[1])
    return found


class PyxDocs(Extension):
    """Gives the objects of the stubs the docstrings of the .pyx."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for path in SOURCES.glob("*.pyx"):
            module = pkg.members.get(path.stem)
            if module is None:
                continue
            for name, text in docstrings(path.read_text()).items():
                try:
                    target: Any = module[name] if name else module
                except KeyError:
                    continue  # private: the stub does not have it
                target.docstring = Docstring(text, parent=target)
