"""`import omni_fastshm` is cheap: a tool or a worker that only configures must not pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.child import environment

HEAVY = ("torch", "numpy", "PIL", "yaml", "rich", "asyncio")


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return set(done.stdout.split())


def test_importing_the_package_leaves_the_heavy_packages_out() -> None:
    loaded = modules_after("import omni_fastshm")

    assert "omni_fastshm" in loaded
    assert not loaded & set(HEAVY)


def test_importing_the_package_loads_few_modules_and_none_of_others() -> None:
    """Counted, not timed: time depends on the machine. What dataclasses need takes most of it."""
    added = modules_after("import dataclasses, threading; import omni_fastshm")
    added -= modules_after("import dataclasses, threading")
    foreign = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names) - {"omni_fastshm"}
    assert not foreign
    assert len(added) <= 20, sorted(added)


@pytest.mark.parametrize("name", ["settings", "errors", "base"])
def test_the_lower_modules_are_as_light(name: str) -> None:
    loaded = modules_after(f"import omni_fastshm.{name}")

    assert f"omni_fastshm.{name}" in loaded
    assert not loaded & set(HEAVY)


def test_every_public_name_is_there_and_listed() -> None:
    import omni_fastshm

    assert omni_fastshm.__all__, "the package promises nothing"
    missing = [name for name in omni_fastshm.__all__ if not hasattr(omni_fastshm, name)]
    assert not missing
    assert set(omni_fastshm.__all__) <= set(dir(omni_fastshm))
