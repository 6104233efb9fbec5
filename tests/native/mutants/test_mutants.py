"""Every weakening in the catalogue must be noticed: a check that no harness misses is a check that nobody tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from native import build
from native.mutants.catalogue import KILLED, SURVIVORS, Mutant

SECONDS = 6.0  # the harnesses take one: a wake-up that is lost shows as a program that hangs

# Weaker than anything the core may use, hence only here.
WEAK = """
#define WEAK_WIDTH(bits) \\
    static inline uint##bits##_t ofs_weak_load##bits(const ofs_u##bits *w) \\
    { return atomic_load_explicit(w, memory_order_relaxed); } \\
    static inline void ofs_store##bits##_relaxed(ofs_u##bits *w, uint##bits##_t v) \\
    { atomic_store_explicit(w, v, memory_order_relaxed); } \\
    static inline bool ofs_cas##bits##_relaxed(ofs_u##bits *w, uint##bits##_t *e, uint##bits##_t v) \\
    { return atomic_compare_exchange_strong_explicit(w, e, v, memory_order_relaxed, memory_order_relaxed); } \\
    static inline uint##bits##_t ofs_and##bits##_relaxed(ofs_u##bits *w, uint##bits##_t v) \\
    { return atomic_fetch_and_explicit(w, v, memory_order_relaxed); } \\
    static inline uint##bits##_t ofs_or##bits##_relaxed(ofs_u##bits *w, uint##bits##_t v) \\
    { return atomic_fetch_or_explicit(w, v, memory_order_relaxed); }
WEAK_WIDTH(64)
WEAK_WIDTH(32)
#define ofs_load32_relaxed ofs_weak_load32
static inline uint32_t ofs_add32_relaxed(ofs_u32 *w, uint32_t v)
{ return atomic_fetch_add_explicit(w, v, memory_order_relaxed); }
"""


def name_of(mutant: Mutant) -> str:
    return (
        f"{mutant.file.removesuffix('.c')}: {' '.join(mutant.old.split())[:60]} -> {' '.join(mutant.new.split())[:30]}"
    )


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core with the weak helpers added; the unchanged parts are compiled once."""
    src = tmp_path_factory.mktemp("mutants") / "src"
    shutil.copytree(build.SRC, src, ignore=shutil.ignore_patterns("*.pyx", "*.pxd", "*.md"))
    header = src / "ofs_atomic.h"
    text = header.read_text()
    head, end, tail = text.rpartition("#endif")
    header.write_text(head + WEAK + end + tail)
    return src


@pytest.mark.parametrize("number", range(len(KILLED)), ids=[name_of(m) for m in KILLED])
def test_killed(number: int, base: Path) -> None:
    mutant = KILLED[number]
    changed = apply(mutant, base.parent / f"m{number}")
    outcomes = []
    for killer in mutant.killers:
        harness, variant = killer.split(":")
        outcome = build.run(harness, variant, base, base.parent, replaced={mutant.file: changed}, seconds=SECONDS)
        assert "error:" not in outcome.output or "ended with" in outcome.output, f"does not build: {outcome.output}"
        if not outcome.ok:
            return
        outcomes.append(outcome.output)
    pytest.fail(f"nobody noticed: {name_of(mutant)}\n" + "\n".join(outcomes))


def apply(mutant: Mutant, folder: Path) -> Path:
    text = (build.SRC / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file}: occurs {text.count(mutant.old)} times: {mutant.old!r}"
    folder.mkdir()
    changed = folder / mutant.file
    changed.write_text(text.replace(mutant.old, mutant.new))
    return changed


@pytest.mark.parametrize("mutant", SURVIVORS, ids=name_of)
def test_survivors_are_still_there_and_explained(mutant: Mutant) -> None:
    assert (build.SRC / mutant.file).read_text().count(mutant.old) == 1
    assert len(mutant.reason) > 30
