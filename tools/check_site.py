"""Is the built site complete by itself? ``python tools/check_site.py build/site``

MkDocs checks links in Markdown; this checks what a browser gets: every link and anchor, also those from raw HTML and in
the navigation, leads somewhere, and no page makes the browser fetch anything from elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
STYLE_URL = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*")


class Page(HTMLParser):
    """Links, anchors and what a browser fetches of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        # A canonical address is for search engines; nothing is fetched from it.
        if tag in FETCHED and FETCHED[tag] in values and values.get("rel") != "canonical":
            self.fetched.append(values[FETCHED[tag]])


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a built site, one line each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no pages"
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: fetches {url}" for url in page.fetched if urlsplit(url).netloc)
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name.name == "404.html":  # which is shown at any address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{name}: {link} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: {link} leads to no anchor"
    for style in site.rglob("*.css"):
        yield from (f"{style.relative_to(site)}: fetches {found}" for found in STYLE_URL.findall(style.read_text()))


def main(site: Path) -> int:
    found = list(problems(site.resolve()))
    print("\n".join(found) or f"{site}: every link leads somewhere, nothing is fetched from elsewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
