"""The Python-free core as plain C programs, under the sanitizers, and on a model of weakly ordered memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from native import build


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert shutil.which(build.COMPILER), "these tests need gcc with its sanitizers (libasan, libubsan, libtsan)"
    return tmp_path_factory.mktemp("native")


@pytest.mark.parametrize(("harness", "variant"), build.CASES)
def test_harness(harness: str, variant: str, out: Path) -> None:
    outcome = build.run(harness, variant, build.SRC, out)
    assert outcome.ok, outcome.output


def test_a_race_is_seen(out: Path, tmp_path: Path) -> None:
    """Without this, a ThreadSanitizer that sees nothing would pass for a core without races."""
    src = tmp_path / "src"
    shutil.copytree(build.SRC, src, ignore=shutil.ignore_patterns("*.pyx", "*.pxd", "*.md"))
    header = src / "ofs_atomic.h"
    text = header.read_text()
    strong = "atomic_store_explicit(word, value, memory_order_release)"
    assert strong in text
    header.write_text(text.replace(strong, strong.replace("release", "relaxed")))

    outcome = build.run("stress", "tsan", src, tmp_path)
    assert not outcome.ok
    assert "data race" in outcome.output
    assert build.run("orderings", "plain", src, tmp_path).ok, "only the sanitizer was to notice"
