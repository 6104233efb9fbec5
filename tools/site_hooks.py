"""What MkDocs cannot do by itself: pages of the documentation may link to any file of the project.

Such a file (a test that shows a guarantee, the data of a figure) becomes a page of the site, under ``source/``, so that
the site is complete by itself. A link to a test by name, ``test_x.py#TestX.test_y``, leads to its line.
"""

from __future__ import annotations

import ast
import functools
import html
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
SOURCE = "source"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]*)(#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
    ".pyx": "cython",
    ".c": "c",
    ".h": "c",
    ".json": "json",
    ".yaml": "yaml",
}
LARGEST = 200_000  # characters of a file that is shown whole


def page_of(path: str) -> str:
    """Where in the site a file of the project lies."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def file_of(page: str) -> str:
    """The file of the project that a page shows: `page_of` backwards."""
    if not page.startswith(f"{SOURCE}/"):
        return f"{DOCS}/{page}"
    path = page.removeprefix(f"{SOURCE}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def target_of(path: str, link: str) -> str:
    """The file or folder that a link in `path` leads to, as a path from the project's root."""
    found = os.path.normpath(os.path.join(os.path.dirname(path), link)) if link else path
    if (ROOT / found).is_dir() and (ROOT / found / "README.md").is_file():
        return f"{found}/README.md"
    return found


def links(path: str) -> set[str]:
    """The files of the project that a page's links lead to."""
    return {target_of(path, link) for _, link, _ in LINK.findall((ROOT / path).read_text()) if link}


def content(path: str) -> str:
    """What the page of a file shows."""
    file = ROOT / path
    if file.is_dir():
        rows = "".join(
            f"- `{entry.name}`\n" for entry in sorted(file.iterdir()) if not entry.name.startswith((".", "__"))
        )
        return f"# {path}\n\n{rows}"
    if path.endswith(".md"):
        return file.read_text()
    text = file.read_text()
    if len(text) > LARGEST:
        return f"# {path}\n\n{len(text):,} characters, not shown here; the file comes with the project's sources.\n"
    return f'# {path}\n\n````{LANGUAGES.get(file.suffix, "text")} linenums="1"\n{text}\n````\n'


def on_config(config: Any) -> Any:
    """Expands the folders in the navigation."""

    def expanded(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: expanded(body) for title, body in entry.items()}
        if isinstance(entry, list):
            return [expanded(body) for body in entry]
        if entry.endswith("/"):
            return sorted(str(path.relative_to(ROOT / DOCS)) for path in (ROOT / DOCS / entry).glob("*.md"))
        return entry

    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds a page for each file outside of docs/ that some page leads to."""
    todo = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        path = todo.pop()
        for found in sorted(links(path) - seen):
            if found.startswith("..") or not (ROOT / found).exists():
                raise PluginError(f"{path} leads to {found}, which is not there")
            seen.add(found)
            if not found.startswith(f"{DOCS}/"):
                files.append(File.generated(config, page_of(found), content=content(found)))
            if found.endswith(".md"):
                todo.append(found)
    return files


@functools.cache
def lines(path: str) -> dict[str, int]:
    """The line of each class and function of a Python file, by its name with that of its class in front."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found[prefix + node.name] = node.lineno
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(ast.parse((ROOT / path).read_text()).body, "")
    return found


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the project into links between pages of the site."""
    here = page.file.src_uri
    path = file_of(here)
    if here.startswith(f"{SOURCE}/") and not path.endswith(".md"):
        return markdown  # code, in which brackets are brackets

    def rewrite(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        if not link:
            return match[0]
        target = target_of(path, link)
        place = os.path.relpath(page_of(target), os.path.dirname(here) or ".")
        name = anchor.removeprefix("#")
        if name and target.endswith(".py"):
            if name not in lines(target):
                raise PluginError(f"{path} leads to {name} in {target}, where there is no such thing")
            url = f"{place.removesuffix('.md')}.html#L-0-{lines(target)[name]}"
            shown = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))
            return f'<a href="{url}">{shown}</a>'
        return f"[{text}]({place}{anchor})"

    # Code is left as it is: it may look like a link.
    parts = re.split(r"(^```.*?^```|`[^`\n]*`(?!\]))", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else LINK.sub(rewrite, part) for index, part in enumerate(parts))
