"""Connectors by name: built-in, registered, ``module:Class``, missing and misspelt."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from omni_fastshm.base import OmniConnectorBase
from omni_fastshm.connectors.in_process import SETTINGS, InProcessConnector
from omni_fastshm.errors import ConfigError
from omni_fastshm.factory import ConnectorSpec, OmniConnectorFactory

BUILT_IN = ["InProcessConnector", "MooncakeConnector", "MooncakeStoreConnector", "SharedMemoryConnector"]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OmniConnectorFactory, "_registered", {})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("made_up_transport")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


class Mine(InProcessConnector):
    """A connector of a user."""


def create(name: Any, extra: Any = None) -> OmniConnectorBase:
    return OmniConnectorFactory.create_connector(ConnectorSpec(name, {} if extra is None else extra))


def test_built_in_names() -> None:
    assert OmniConnectorFactory.list_registered_connectors() == BUILT_IN


def test_the_settings_are_the_very_dict() -> None:
    extra = {"max_bytes": 5}
    with create("InProcessConnector", extra) as connector:
        assert type(connector) is InProcessConnector
        assert connector.config is extra


def test_no_settings() -> None:
    with OmniConnectorFactory.create_connector(ConnectorSpec("InProcessConnector")) as connector:
        assert connector.config == {}
    with OmniConnectorFactory.create_connector(ConnectorSpec("InProcessConnector", None)):  # type: ignore[arg-type]
        pass


def test_a_wrong_setting_names_connector_and_setting() -> None:
    with pytest.raises(ConfigError, match="InProcessConnector: max_bytes: -1"):
        create("InProcessConnector", {"max_bytes": -1})


@pytest.mark.parametrize(
    ("name", "hint"), [("InProcesConnector", "InProcessConnector"), ("sharedmemoryconnector", "SharedMemoryConnector")]
)
def test_an_unknown_name_gets_the_nearest_and_all_known(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name)
    assert f"there is no connector {name!r}; did you mean {hint!r}?" in str(caught.value)
    assert ", ".join(BUILT_IN) in str(caught.value)


@pytest.mark.parametrize("name", [None, 5, ["InProcessConnector"], b"x"])
def test_a_name_must_be_text(name: Any) -> None:
    with pytest.raises(ConfigError, match="must be text"):
        create(name)


@pytest.mark.parametrize("name", ["", "a:", ":b", "a b:c", "a:b c", "a:b:c", "./a.py:B"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no connector"):
        create(name)


@pytest.mark.usefixtures("without_mooncake")
@pytest.mark.parametrize("name", ["MooncakeConnector", "MooncakeStoreConnector"])
def test_a_backend_whose_package_is_missing(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name)
    text = str(caught.value)
    assert text == (
        f"{name} needs the package 'mooncake', which is not installed: "
        "pip install 'omni-fastshm[mooncake]', in a checkout '.[mooncake]'"
    )
    assert OmniConnectorFactory.missing_backend(name) == text


def test_nothing_is_missing_for_the_others() -> None:
    for name in ("InProcessConnector", "SharedMemoryConnector", "unknown", "a:B"):
        assert OmniConnectorFactory.missing_backend(name) is None


def test_register_a_class() -> None:
    OmniConnectorFactory.register_connector("Mine", Mine)
    assert OmniConnectorFactory.list_registered_connectors() == sorted([*BUILT_IN, "Mine"])
    with create("Mine", {"max_bytes": 3}) as connector:
        assert type(connector) is Mine
    assert OmniConnectorFactory.settings_of("Mine") is None


def test_register_a_function() -> None:
    given: list[Any] = []

    def build(config: Any) -> Mine:
        given.append(config)
        return Mine()

    OmniConnectorFactory.register_connector("Mine", build)
    extra = {"anything": 1}
    create("Mine", extra).close()
    assert given[0] is extra


def test_register_text_is_imported_when_it_is_built(module: types.ModuleType) -> None:
    OmniConnectorFactory.register_connector("Mine", "made_up_transport:Outer.Mine")
    module.Outer = types.SimpleNamespace(Mine=Mine)  # type: ignore[attr-defined]
    with create("Mine") as connector:
        assert type(connector) is Mine


def test_a_name_is_taken_once() -> None:
    OmniConnectorFactory.register_connector("Mine", Mine)
    for name in ("Mine", "InProcessConnector"):
        with pytest.raises(ConfigError, match="known already"):
            OmniConnectorFactory.register_connector(name, Mine)
        OmniConnectorFactory.register_connector(name, Mine, replace=True)
        with create(name) as connector:
            assert type(connector) is Mine


def test_a_replaced_built_in_has_no_known_settings() -> None:
    OmniConnectorFactory.register_connector("MooncakeConnector", Mine, replace=True)
    assert OmniConnectorFactory.settings_of("MooncakeConnector") is None
    assert OmniConnectorFactory.missing_backend("MooncakeConnector") is None
    assert not OmniConnectorFactory.same_backend("MooncakeConnector", "MooncakeStoreConnector")


@pytest.mark.parametrize(
    ("name", "target"),
    [("", Mine), (5, Mine), ("a:b", Mine), ("ok", "no colon"), ("ok", 5), ("ok", None), ("ok", "a:")],
)
def test_what_cannot_be_registered(name: Any, target: Any) -> None:
    with pytest.raises(ConfigError):
        OmniConnectorFactory.register_connector(name, target)


def test_module_class_without_registering(module: types.ModuleType) -> None:
    module.Mine = Mine  # type: ignore[attr-defined]
    with create("made_up_transport:Mine") as connector:
        assert type(connector) is Mine


def test_modules_and_attributes_that_are_not_there(module: types.ModuleType) -> None:
    module.value = 5  # type: ignore[attr-defined]
    for name, text in (
        ("no_such_module_here:Mine", "cannot be imported: No module named 'no_such_module_here'"),
        ("made_up_transport:Mine", "made_up_transport has no Mine"),
        ("made_up_transport:value", "cannot be called"),
    ):
        with pytest.raises(ConfigError, match=text):
            create(name)


def test_what_is_built_must_be_a_connector() -> None:
    OmniConnectorFactory.register_connector("Mine", lambda config: 5)
    with pytest.raises(ConfigError, match="has no put and get"):
        create("Mine")


def test_an_error_of_a_constructor_passes_through() -> None:
    def build(config: Any) -> Any:
        raise OSError("no such device")

    OmniConnectorFactory.register_connector("Mine", build)
    with pytest.raises(OSError, match="no such device"):
        create("Mine")


def test_settings_of_built_in_connectors() -> None:
    assert OmniConnectorFactory.settings_of("InProcessConnector") is SETTINGS
    assert OmniConnectorFactory.settings_of("unknown") is None
    assert OmniConnectorFactory.settings_of("a:B") is None
    shared = OmniConnectorFactory.settings_of("SharedMemoryConnector")
    assert shared is not None
    assert shared["shm_threshold_bytes"].default == 65536


def test_an_alias_is_the_same_backend() -> None:
    assert OmniConnectorFactory.same_backend("MooncakeConnector", "MooncakeStoreConnector")
    assert OmniConnectorFactory.same_backend("a:B", "a:B")
    assert not OmniConnectorFactory.same_backend("InProcessConnector", "SharedMemoryConnector")


def test_a_name_is_checked_without_importing_its_backend() -> None:
    code = (
        "import sys; from omni_fastshm.factory import OmniConnectorFactory as F; "
        "assert F.name_problem('SharedMemoryConnector') is None; F.list_registered_connectors(); "
        "print([m for m in sys.modules if m.startswith('omni_fastshm.connectors.') or m in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "[]"


def test_names_of_vllm_omni_stand_for_ours() -> None:
    with create("FastSharedMemoryConnector", {"namespace": "n", "some_key_of_the_host": 1}) as connector:
        assert type(connector).__name__ == "SharedMemoryConnector"
        assert connector.config == {"namespace": "n"}
    assert OmniConnectorFactory.name_here("FastMooncakeConnector") == "MooncakeConnector"
    assert OmniConnectorFactory.same_backend("FastMooncakeConnector", "MooncakeStoreConnector")
    assert OmniConnectorFactory.settings_of("FastMooncakeConnector") is not None
    assert "did you mean 'FastMooncakeConnector'?" in (OmniConnectorFactory.name_problem("FastMoncakeConnector") or "")
    spec = ConnectorSpec("InProcessConnector", {})
    assert OmniConnectorFactory.spec_here(spec) is spec


def test_a_registered_one_of_that_name_is_meant() -> None:
    OmniConnectorFactory.register_connector("FastSharedMemoryConnector", Mine)
    with create("FastSharedMemoryConnector") as connector:
        assert type(connector) is Mine
    assert OmniConnectorFactory.name_here("FastSharedMemoryConnector") is None


def test_the_integration_has_the_same_names() -> None:
    from omni_fastshm.integrations import vllm_omni

    assert {name for name in vllm_omni._TRANSPORTS if OmniConnectorFactory.name_here(name)} == set(
        vllm_omni._TRANSPORTS
    )
