"""Turns a results file of the measurements into the tables and images of `docs/benchmarks.md`.

``python -m bench.report out/bench.json`` prints the tables. With ``--publish NAME`` the figures are kept as
``bench/results/NAME.json``, and tables and images are put into the document; with ``--out DIR`` the whole page is
written there instead. ``--check`` says whether document and kept results agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.tables import IMAGES, render

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: begin, written by bench/report.py -->", "<!-- figures: end -->"
Figures = dict[str, Any]


def condense(raw: dict[str, Any]) -> Figures:
    """Keep of a pytest-benchmark file what the tables need and what says where they were measured.

    Args:
        raw: the file's content; what was condensed already comes back as it is.
    """
    if "benchmarks" not in raw:
        return raw
    figures: Figures = {
        "date": raw["datetime"][:10],
        "commit": raw["commit_info"].get("id"),
        "machine": raw["machine_info"]["facts"],
        "same_process": {},
        "two_process": {},
        "counts": raw.get("counts", {}),
    }
    for entry in raw["benchmarks"]:
        info = entry["extra_info"]
        if info["kind"] == "same_process":
            kept = {"median": entry["stats"]["median"] * 1e6, "rounds": entry["stats"]["rounds"]}
        else:
            kept = {key: info[key] for key in ("messages", "preempted_per_s", "put", "usable", "read")}
        figures[info["kind"]].setdefault(info["load"], {})[info["peer"]] = kept
    return figures


def digest(figures: Figures) -> str:
    """Names these very figures; each image carries it."""
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()


def kept_results() -> Path:
    """The results file that the document shows: the last by name."""
    return sorted((HERE / "results").glob("*.json"))[-1]


def document_with(tables: str) -> str:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def write(figures: Figures, folder: Path) -> None:
    """The page and its images, into a folder.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from bench import plots

    (folder / "img").mkdir(parents=True, exist_ok=True)
    page = document_with(render(figures))
    for name in IMAGES:
        (folder / "img" / f"{name}.png").unlink(missing_ok=True)
    plots.draw(figures, folder / "img", digest(figures))
    (folder / DOCUMENT.name).write_text(page)


def check() -> list[str]:
    """What of the document is not what the kept results say."""
    figures = json.loads(kept_results().read_text())
    tables = render(figures)
    wrong = [] if document_with(tables) == DOCUMENT.read_text() else [DOCUMENT.name]
    for name in IMAGES:
        image = DOCUMENT.parent / "img" / f"{name}.png"
        shown = f"img/{name}.png" in tables
        if shown != image.exists() or (shown and digest(figures).encode() not in image.read_bytes()):
            wrong.append(f"img/{name}.png")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, help="JSON written by pytest --benchmark-json")
    parser.add_argument("--publish", metavar="NAME", help="keep the figures as bench/results/NAME.json and show them")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write the page and its images there")
    parser.add_argument("--check", action="store_true", help="is the document what the kept results say?")
    options = parser.parse_args(arguments)
    if options.check:
        if wrong := check():
            said = ", ".join(wrong)
            print(f"{said}: not what {kept_results().name} says; run --publish again", file=sys.stderr)
        return 1 if wrong else 0
    if options.results is None:
        parser.error("a results file is needed: pytest bench --benchmark-json out/bench.json writes one")
    figures = condense(json.loads(options.results.read_text()))
    print(render(figures))
    if options.out:
        write(figures, options.out)
    if options.publish:
        target = HERE / "results" / f"{options.publish}.json"
        target.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        if target != kept_results():
            parser.error(f"the document shows {kept_results().name}, the last by name: publish under that name")
        write(figures, DOCUMENT.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
