"""The hand-written stubs of the compiled modules say what the modules really have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.child import environment

PACKAGE = Path(__file__).resolve().parents[1] / "omni_fastshm"

# What Cython leaves in every module, and the buffer protocol before Python 3.12, where it has no name.
ALLOWED = r"""
omni_fastshm\._\w+\.__(pyx_capi|test|reduce_cython|setstate_cython)__
omni_fastshm\._\w+\.\w+\.__(reduce_cython|setstate_cython|buffer)__
omni_fastshm\._\w+\.\w+\.__(reduce|setstate|getstate|reduce_ex)__
"""


@pytest.mark.time_limit(360)
@pytest.mark.parametrize("module", ["_core", "_codec", "_place", "_meter"])
def test_stub_matches(module: str, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(ALLOWED)
    # From another folder and by name only: beside the checkout, mypy would read the sources instead of the module.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy.stubtest",
            "--ignore-unused-allowlist",
            "--ignore-disjoint-bases",
            "--allowlist",
            str(allowed),
            f"omni_fastshm.{module}",
        ],
        cwd=tmp_path,
        env=environment() | {"MYPYPATH": ""},
        capture_output=True,
        text=True,
        timeout=330,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_compiled_module_has_a_stub() -> None:
    names = {path.name.split(".")[0] for path in PACKAGE.parent.glob("src/*.pyx")}
    assert names
    assert names == {path.stem for path in PACKAGE.glob("*.pyi")}


def test_constructors_are_declared_as_new() -> None:
    """Cython's `__cinit__` leaves `__init__` bare: a stub with `__init__` could not be compared."""
    for path in PACKAGE.glob("*.pyi"):
        assert "__init__" not in path.read_text(), path.name
