"""What stands around the code: workflows, hooks and pins say the same as the Makefile and pyproject.toml."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the workflows are not beside these tests")


def jobs(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text())["jobs"])


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE))
    rules = set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))
    assert set(phony.split()) == rules, "each target is phony, and each phony target is there"
    return rules


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_runs_a_target_or_script_that_is_there(path: Path) -> None:
    commands = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        words = [word for word in shlex.split(command) if word != "sudo"]
        if words[0] == "make":
            assert words[1] in targets(), command
        elif words != ["exit", "1"]:
            assert (ROOT / words[0]).is_file(), command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_one_job_sums_up_all_others(path: Path) -> None:
    found = jobs(path)
    for job in found.values():
        assert set(job.get("needs", [])) < set(found)
        assert job["runs-on"]
        assert all(set(step) & {"uses", "run"} for step in job["steps"])
    [summing] = [name for name, job in found.items() if job.get("if") == "always()"]
    assert set(found[summing]["needs"]) == set(found) - {summing}


def test_the_workflows_test_every_python_that_the_project_names() -> None:
    classifiers = set(re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text()))
    assert len(classifiers) > 3
    assert set(jobs(ROOT / ".github/workflows/ci.yml")["test"]["strategy"]["matrix"]["python"]) == classifiers
    wheels = re.findall(r"cp3(\d+)-\*", (ROOT / "pyproject.toml").read_text())
    assert {f"3.{minor}" for minor in wheels} == classifiers
    matrix = re.search(r"^PYTHONS = \((.*)\)$", (ROOT / "tools" / "matrix.py").read_text(), re.MULTILINE)
    assert matrix is not None
    assert set(re.findall(r"3\.\d+", matrix[1])) == classifiers


def test_what_is_pinned_twice_is_pinned_alike() -> None:
    pins: dict[str, set[str]] = {}
    for name in ("pyproject.toml", "Makefile", ".pre-commit-config.yaml", "tools/matrix.py"):
        # A line with a marker pins for one Python only.
        text = "\n".join(line for line in (ROOT / name).read_text().splitlines() if "python_version" not in line)
        for package, version in re.findall(r"([A-Za-z][\w-]*)==([\w.]+)", text):
            pins.setdefault(package.lower(), set()).add(version)
    assert len(pins) > 15
    assert not {package: versions for package, versions in pins.items() if len(versions) > 1}


def test_every_step_of_ci_runs_what_is_there() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    made = set(re.findall(r"^make ([\w-]+)$", text, re.MULTILINE))
    assert {"test", "lint", "demo", "docs", "wheel"} <= made
    assert made <= targets()
    for script in re.findall(r"\.venv/bin/python ((?:tests|tools)/[\w./]+\.py)", text):
        assert (ROOT / script).is_file()


def test_the_compatibility_job_takes_torch_without_cuda() -> None:
    (steps,) = [job["steps"] for path in WORKFLOWS for name, job in jobs(path).items() if name == "compatibility"]
    (matrix,) = [step for step in steps if "--torch" in step.get("run", "")]
    assert matrix["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
