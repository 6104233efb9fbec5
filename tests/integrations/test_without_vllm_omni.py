"""Where vllm-omni is not installed: nothing of ours is in the way, and the connector works by itself."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.child import environment

from omni_fastshm.cli import main
from omni_fastshm.integrations import _vllm_check, _vllm_early, vllm_omni
from omni_fastshm.integrations._vllm_host import is_installed

if is_installed():
    pytest.skip("vllm-omni is installed here: test_with_vllm_omni.py", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]


def test_register_returns_quietly_and_imports_nothing() -> None:
    code = (
        "import sys\n"
        "from omni_fastshm.integrations.vllm_omni import register\n"
        "register(); register()\n"
        "print(sorted({'torch', 'numpy', 'vllm', 'vllm_omni', 'mooncake'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_vllm_omni_that_cannot_be_imported_is_said_and_survived(tmp_path: Path) -> None:
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "__init__.py").write_text("raise RuntimeError('no CUDA')\n")
    path = environment()["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-c", "from omni_fastshm.integrations.vllm_omni import register; register()"],
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{path}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0
    assert "RuntimeError: no CUDA" in done.stderr


# As much of December's package as the early entry point touches; test_with_december.py has the real one.
STAND_IN = {
    "__init__.py": "",
    "distributed/__init__.py": "",
    "distributed/omni_connectors/__init__.py": (
        "from .connectors.shm_connector import SharedMemoryConnector\nfrom .factory import OmniConnectorFactory\n"
    ),
    "distributed/omni_connectors/connectors/__init__.py": "",
    "distributed/omni_connectors/connectors/shm_connector.py": """
class SharedMemoryConnector:
    def __init__(self, config): pass
    def get(self, from_stage, to_stage, request_id, metadata=None): pass
""",
    "distributed/omni_connectors/utils/__init__.py": "",
    "distributed/omni_connectors/utils/serialization.py": """
class OmniSerializer:
    serialize = deserialize = staticmethod(lambda x: x)
""",
    "distributed/omni_connectors/factory.py": """
import os
if os.environ.pop("FAILS_ONCE", ""):
    raise ImportError("not yet")
class OmniConnectorFactory:
    _registry = {}
    @classmethod
    def register_connector(cls, name, create):
        assert name not in cls._registry
        cls._registry[name] = create
    @classmethod
    def list_registered_connectors(cls):
        return list(cls._registry)
def _create(config):
    from .connectors.shm_connector import SharedMemoryConnector
    return SharedMemoryConnector(config)
OmniConnectorFactory.register_connector("SharedMemoryConnector", _create)
""",
}
EARLY = """
import sys
from omni_fastshm.integrations._vllm_early import platform
finders = list(sys.meta_path)
when = sys.argv[1]
if when == "after":
    import vllm_omni.distributed.omni_connectors
for _ in range(2):
    assert platform() is None
if when == "again":
    try:
        import vllm_omni.distributed.omni_connectors
    except ImportError as error:
        assert str(error) == "not yet"
from vllm_omni.distributed import omni_connectors
assert sys.meta_path == finders or when == "never"
print(*sorted(omni_connectors.OmniConnectorFactory.list_registered_connectors()))
made = [omni_connectors.OmniConnectorFactory._registry["SharedMemoryConnector"]({}) for _ in range(2)]
print(*{type(each).__module__ for each in made}, type(made[0]) is omni_connectors.SharedMemoryConnector)
"""


@pytest.mark.parametrize("when", ["before", "again", "after", "never"])
@pytest.mark.parametrize("replaced", ["", "1"])
def test_the_early_entry_reaches_a_host_that_loads_no_plugins(
    tmp_path: Path, namespace: str, when: str, replaced: str
) -> None:
    files = {**STAND_IN, **({"plugins/__init__.py": ""} if when == "never" else {})}
    for name, text in files.items():
        (tmp_path / "vllm_omni" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm_omni" / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EARLY, when],
        env={
            **environment(),
            "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}",
            "OMNI_FASTSHM_REPLACE_DEFAULT": replaced,
            "FAILS_ONCE": "1" if when == "again" else "",
        },
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    theirs = "vllm_omni.distributed.omni_connectors.connectors.shm_connector"
    ours = "FastMooncakeConnector FastSharedMemoryConnector "
    expected = f"{'' if when == 'never' else ours}SharedMemoryConnector"
    cls = "omni_fastshm.integrations.vllm_omni" if replaced and when != "never" else theirs
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n{cls} True\n", "")


def test_the_early_entry_does_nothing_without_vllm_omni() -> None:
    finders = list(sys.meta_path)
    _vllm_early.platform()
    assert sys.meta_path == finders


def test_the_default_cannot_be_replaced() -> None:
    with pytest.raises(ImportError, match="not installed"):
        vllm_omni.replace_default()
    vllm_omni.restore_default()


def test_the_connector_works_by_itself(namespace: str) -> None:
    with vllm_omni.create_fast_shared_memory_connector({"stage_id": 1}) as connector:
        _, size, metadata = connector.put("0", "1", "r_0_0", {"a": (1, 2)})
        assert connector.get("0", "1", "r_0_0", metadata) == ({"a": [1, 2]}, size)


def test_doctor_says_that_it_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = _vllm_check.check()
    assert finding.status == "fail"
    assert "not installed" in finding.found
    assert main(["doctor", "--vllm-omni"]) == 1
    assert "not installed" in capsys.readouterr().out


def test_the_plugin_is_entered_in_both_groups() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for group in ("vllm.general_plugins", "vllm_omni.general_plugins"):
        section = text.split(f'[project.entry-points."{group}"]')[1].split("[")[0]
        assert section.strip() == 'omni_fastshm = "omni_fastshm.integrations.vllm_omni:register"'
    section = text.split('[project.entry-points."vllm.platform_plugins"]')[1].split("[")[0]
    assert section.strip() == 'omni_fastshm = "omni_fastshm.integrations._vllm_early:platform"'
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="omni_fastshm")
    for entry in found:  # none where the checkout is used without having been installed anew
        assert entry.load() is vllm_omni.register


@pytest.mark.parametrize("name", ["qwen3_omni.yaml", "december_2025.yaml"])
def test_the_examples_differ_in_the_name_alone(name: str) -> None:
    before, after = ((ROOT / "examples" / "vllm_omni" / side / name).read_text() for side in ("before", "after"))
    assert before.count("name: SharedMemoryConnector") == 1

    def renamed(text: str) -> Any:
        return yaml.safe_load(text.replace("name: SharedMemoryConnector", "name: FastSharedMemoryConnector"))

    assert renamed(before) == yaml.safe_load(after)
