"""Every example runs, checks itself, and notices when its guard is taken away."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.child import environment

import omni_fastshm

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())


def run(name: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"omnifs.{os.getuid()}.")}


def test_the_examples_are_there() -> None:
    assert {
        "hello.py",
        "two_stages.py",
        "dag_with_join.py",
        "tensor_parallel.py",
        "back_pressure.py",
        "crash_and_recover.py",
        "loans.py",
        "across_nodes.py",
        "streaming_asyncio.py",
    } <= set(SCRIPTS)


def test_an_example_uses_only_promised_names() -> None:
    for name in SCRIPTS:
        for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("omni_fastshm"):
                assert node.module == "omni_fastshm", f"{name} imports from {node.module}"
                assert {alias.name for alias in node.names} <= set(omni_fastshm.__all__), name


def test_the_page_of_examples_lists_them_all() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".yaml")}
    assert files - {"inputs/make_inputs.py"} == set(re.findall(r"\]\(\.\./examples/([\w./]+)\)", page))


@functools.cache
def mooncake_loads() -> bool:
    """Asked of another process: the store leaves descriptors behind in whoever loads it."""
    return (
        subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False).returncode
        == 0
    )


def needs(name: str) -> None:
    if "MooncakeConnector" in (EXAMPLES / name).read_text() and not mooncake_loads():
        if os.environ.get("OMNI_FASTSHM_CI"):
            pytest.fail("Mooncake's store cannot be loaded")
        pytest.skip("Mooncake's store cannot be loaded")


@pytest.mark.time_limit(360)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_checks_itself_and_says_ok(name: str, tmp_path: Path, namespace: str) -> None:
    needs(name)

    done = run(name, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
    assert not done.stderr


@pytest.mark.time_limit(360)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_without_its_guard_fails(name: str, tmp_path: Path) -> None:
    needs(name)
    assert "--break" in (EXAMPLES / name).read_text()

    done = run(name, "--break", folder=tmp_path)

    assert done.returncode == 1
    assert "ok" not in done.stdout.splitlines()


def test_the_input_files_are_what_their_script_makes(tmp_path: Path) -> None:
    from PIL import Image

    inputs = EXAMPLES / "inputs"
    subprocess.run([sys.executable, str(inputs / "make_inputs.py"), str(tmp_path)], check=True, timeout=150)

    assert (tmp_path / "prompt.txt").read_bytes() == (inputs / "prompt.txt").read_bytes()
    # Not the files' bytes: they depend on the release of zlib.
    with Image.open(tmp_path / "picture.png") as made, Image.open(inputs / "picture.png") as kept:
        assert made.size == kept.size
        assert made.tobytes() == kept.tobytes()
    with wave.open(str(tmp_path / "sound.wav")) as made_sound, wave.open(str(inputs / "sound.wav")) as sound:
        assert made_sound.getparams() == sound.getparams()
        count = sound.getnframes()
        a, b = (np.frombuffer(s.readframes(count), "<i2").astype(int) for s in (made_sound, sound))
    # The last bit of a sine may differ between C libraries.
    assert np.abs(a - b).max() <= 1
    assert sum(path.stat().st_size for path in inputs.iterdir() if path.is_file()) < 300_000


def mounts_over_shm(service: dict[str, Any]) -> list[str]:
    """Names of the volumes that a container has at /dev/shm, as Compose or Kubernetes write it."""
    mounts = service.get("volumeMounts") or service.get("volumes")
    pairs = [(m["name"], m["mountPath"]) if isinstance(m, dict) else tuple(m.split(":")) for m in mounts]
    return [name for name, path in pairs if path == "/dev/shm"]


def test_the_compose_file_shares_one_mount_and_one_user() -> None:
    """No Docker here: what it has to say is checked, not whether Docker agrees."""
    file = yaml.safe_load((EXAMPLES / "deploy" / "compose.yaml").read_text())
    services = file["services"].values()
    assert len(services) > 1
    [shared] = {name for service in services for name in mounts_over_shm(service)}
    assert all(mounts_over_shm(service) == [shared] for service in services)
    options = file["volumes"][shared]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    assert re.fullmatch(r"size=\d+g,mode=1777", options["o"])
    assert len({service["user"] for service in services}) == 1
    assert len({service["environment"]["OMNI_FASTSHM_NAMESPACE"] for service in services}) == 1


def test_the_kubernetes_file_shares_one_memory_volume_and_one_user() -> None:
    spec = yaml.safe_load((EXAMPLES / "deploy" / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    assert len(spec["containers"]) > 1
    [shared] = {name for container in spec["containers"] for name in mounts_over_shm(container)}
    assert all(mounts_over_shm(container) == [shared] for container in spec["containers"])
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == shared]
    assert volume["emptyDir"]["medium"] == "Memory"
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    limits = [int(c["resources"]["limits"]["memory"].removesuffix("Gi")) for c in spec["containers"]]
    assert min(limits) > size, "what lies in the volume counts for whoever wrote it"
    assert spec["securityContext"]["runAsUser"] != 0
    names = [[e["value"] for e in c["env"] if e["name"] == "OMNI_FASTSHM_NAMESPACE"] for c in spec["containers"]]
    assert all(name == names[0] and name for name in names)
