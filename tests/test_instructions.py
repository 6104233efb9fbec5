"""A put and a get of 4 KiB take as many instructions as they took before: a regression shows without a clock."""

from __future__ import annotations

import os

import pytest
from support import instructions

TOLERANCE = 0.05

pytestmark = pytest.mark.time_limit(instructions.WITHIN_S + 20)


@pytest.fixture(scope="module")
def kept() -> dict[str, int]:
    """The figures for interpreters and machines like this one."""
    if reason := instructions.missing():
        if os.environ.get("OMNI_FASTSHM_CI"):
            pytest.fail(f"instructions were not counted: {reason}")
        pytest.skip(f"instructions were not counted: {reason}")
    here = instructions.kind()
    if here not in instructions.kept():
        pytest.skip(f"there are no figures for {here}: `make instructions` keeps them")
    return instructions.kept()[here]


def test_instructions_of_put_and_get_are_what_they_were(kept: dict[str, int]) -> None:
    counted = instructions.count()

    assert set(counted) == set(kept)
    changed = [
        f"{what}: {counted[what]} instructions, {counted[what] / before - 1:+.1%} from {before}"
        for what, before in kept.items()
        if abs(counted[what] / before - 1) > TOLERANCE
    ]
    assert not changed, "\n".join([*changed, "if that is meant, `make instructions` keeps the new figures"])
