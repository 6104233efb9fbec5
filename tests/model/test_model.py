"""The protocols as Promela models: spin looks at every state that can be reached, and finds each weakening."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from model import check
from model.catalogue import CASES, HARMLESS, LIMITS, WEAKENINGS, Case, Weakening

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted(check.HERE.glob("*.pml"))


@pytest.fixture(autouse=True)
def _tools() -> None:
    absent = check.missing()
    if absent and os.environ.get("OMNI_FASTSHM_CI"):
        pytest.fail(f"CI must have {' and '.join(absent)}")
    if absent:
        pytest.skip(f"needs {' and '.join(absent)} (packages of the same names)")


@pytest.mark.parametrize("case", [case for case in CASES if not case.slow], ids=lambda case: case.name)
def test_nothing_is_violated_in_any_state(case: Case, tmp_path: Path) -> None:
    nothing_is_violated(case, tmp_path, 150)


@pytest.mark.slow
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("case", [case for case in CASES if case.slow], ids=lambda case: case.name)
def test_nothing_is_violated_in_any_state_of_a_large_space(case: Case, tmp_path: Path) -> None:
    nothing_is_violated(case, tmp_path, 880)


def nothing_is_violated(case: Case, folder: Path, seconds: float) -> None:
    outcome = check.search(case, folder, cycles=case.cycles, seconds=seconds)
    assert outcome.fault is None, f"{outcome.fault}\n{outcome.story}"
    assert outcome.complete, outcome.story
    assert outcome.states > 0.9 * case.states, "states that there used to be cannot be reached any more"


@pytest.mark.parametrize("weakening", WEAKENINGS + LIMITS, ids=lambda weakening: weakening.what)
def test_found(weakening: Weakening, tmp_path: Path) -> None:
    """What no search finds, no search would find in the code's protocol either."""
    outcome = check.search(weakening.case, tmp_path, text=check.weakened(weakening), cycles=weakening.case.cycles)
    assert outcome.fault is not None, "nobody noticed" if outcome.complete else outcome.story
    assert weakening.fault in outcome.fault, f"violated otherwise: {outcome.fault}\n{outcome.story}"
    assert re.search(r"^\w+ \d+: [A-Z_]+ ", outcome.story, re.MULTILINE), f"no steps to read: {outcome.story}"


@pytest.mark.parametrize("weakening", HARMLESS, ids=lambda weakening: weakening.what)
def test_what_a_check_is_not_for(weakening: Weakening, tmp_path: Path) -> None:
    outcome = check.search(weakening.case, tmp_path, text=check.weakened(weakening))
    assert outcome.complete, f"{outcome.fault}\n{outcome.story}"


def test_a_search_that_is_cut_short_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.model == "control.pml")
    with monkeypatch.context() as patch:
        patch.setattr(check, "DEPTH", 20)
        (tmp_path / "shallow").mkdir()
        assert not check.search(case, tmp_path / "shallow").complete
    with monkeypatch.context() as patch:
        patch.setattr(check, "MEMORY_MB", 2)
        (tmp_path / "small").mkdir()
        assert not check.search(case, tmp_path / "small").complete


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="the sources are not beside these tests")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_what_a_model_names_is_in_the_code(model: Path) -> None:
    """A model of functions that were renamed or removed describes something else than the code."""
    sources = [*(ROOT / "src").glob("*.[chp]*"), *(ROOT / "omni_fastshm").rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    text = model.read_text()
    named = set(re.findall(r"\bofs_\w+", text)) | set(
        re.findall(r"\b(?:Outbox|Inbox|Producer|segments|janitor)\.(\w+)", text)
    )
    named = {name for name in named if name not in ("py", "c")}
    assert named
    missing = {name for name in named if not re.search(rf"\b{name}\b", code)}
    assert not missing
