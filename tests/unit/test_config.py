"""Configuration files: both generations of the schema, every kind of mistake with its place, and random input."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_fastshm import config_check
from omni_fastshm.config import (
    ConnectorSpec,
    OmniTransferConfig,
    get_connectors_config_for_stage,
    get_stage_connector_config,
    inspect_transfer_config,
    load_omni_transfer_config,
)
from omni_fastshm.errors import ConfigError
from omni_fastshm.factory import OmniConnectorFactory

DEFAULT = ConnectorSpec("SharedMemoryConnector", {"shm_threshold_bytes": 65536})
IN_PROCESS = ConnectorSpec("InProcessConnector", {"max_bytes": 1000})

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a file and gives its path."""

    def build(text: str | bytes, name: str = "p.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return build


SHM = {"name": "SharedMemoryConnector"}


def problems_of(source: Any) -> list[str]:
    """The problems of a source, as both entry points report them."""
    _, problems = inspect_transfer_config(source)
    with pytest.raises(ConfigError) as caught:
        load_omni_transfer_config(source)
    for problem in problems:
        assert problem in str(caught.value)
    return problems


def two_stages(**more: Any) -> dict[str, Any]:
    return {"stage_args": [{"stage_id": 0}, {"stage_id": 1, "engine_input_source": [0]}], **more}


# What is understood

NULL_SECTIONS = """
runtime:
  connectors:
  edges:
stage_args:
  - stage_id: 0
    output_connectors:
  - stage_id: 1
    engine_input_source: [0]
    input_connectors:
"""


def test_null_sections_are_absent(write: Write) -> None:
    config = load_omni_transfer_config(write(NULL_SECTIONS))
    assert config.connectors == {("0", "1"): DEFAULT}
    assert config.edges == (("0", "1"),)
    assert list(config.stages) == ["0", "1"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", "# nothing\n# at all\n", "---\n", "null\n", "{}"),
        *("runtime:\n", "stage_args:\n", "stages:\n", "connectors:\nedges:\nstages:\n", "runtime: {edges: }"),
        "runtime:\n  connectors:\n    shm:\n      name: SharedMemoryConnector\n      extra:\n",
    ],
)
def test_nothing_configured(write: Write, text: str) -> None:
    config = load_omni_transfer_config(write(text))
    assert not config
    assert config.connectors == {}
    assert config.stages == {}
    assert config.default_connector == DEFAULT


def test_nothing_given() -> None:
    assert not load_omni_transfer_config()
    assert not load_omni_transfer_config(None)
    assert not load_omni_transfer_config({})
    assert not load_omni_transfer_config(config_dict={})


def test_empty_json(write: Write) -> None:
    assert not load_omni_transfer_config(write("", "p.json"))


DECEMBER = """
stage_args:
  - stage_id: 0
    engine_args: {model_stage: thinker, nested: [1, {a: b}]}
    output_connectors:
      to_stage_1: fast
  - stage_id: 1
    engine_input_source: [0]
    input_connectors:
      from_stage_0: fast
  - stage_id: 2
    engine_input_source: [1]
    input_connectors:
      from_stage_0: {name: InProcessConnector, extra: {max_bytes: 1000}}
runtime:
  enabled: true
  connectors:
    fast: {name: InProcessConnector, extra: {max_bytes: 1000}}
  edges:
    - {from: 0, to: 1, window_size: -1}
    - {from: 1, to: 2, window_size: -1}
"""

NEWER = """
async_chunk: true
connectors:
  fast:
    name: InProcessConnector
    extra: {max_bytes: 1000}
stages:
  - stage_id: 0
    devices: "0"
    output_connectors: {to_stage_1: fast}
  - stage_id: 1
    input_connectors: {from_stage_0: fast}
  - stage_id: 2
    input_connectors: {from_stage_0: fast}
edges:
  - {from: 1, to: 2}
platforms:
  npu: {stages: [{stage_id: 9}]}
"""


@pytest.mark.parametrize("text", [DECEMBER, NEWER])
def test_both_generations(write: Write, text: str) -> None:
    config = load_omni_transfer_config(write(text))
    assert config
    assert config.warnings == ()
    assert config.connectors == {("0", "1"): IN_PROCESS, ("0", "2"): IN_PROCESS, ("1", "2"): DEFAULT}
    assert config.stages["2"].sources == ("0", "1") or config.stages["2"].sources == ("1", "0")
    assert config.stages["0"].targets == ("1", "2")
    assert config.stages["0"].fn is None


@pytest.mark.parametrize("text", [DECEMBER, NEWER])
def test_a_dict_says_the_same_as_its_file(write: Write, text: str) -> None:
    content = yaml.safe_load(text)
    from_file = load_omni_transfer_config(write(text))
    for config in (load_omni_transfer_config(content), load_omni_transfer_config(config_dict=content)):
        assert config.connectors == from_file.connectors
        assert config.stages == from_file.stages
        assert config.path is None
    assert content == yaml.safe_load(text)


@pytest.mark.parametrize("name", ["p.json", "p.conf", "p"])
@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_by_suffix_or_content(write: Write, name: str, indent: Any) -> None:
    path = write(json.dumps(yaml.safe_load(DECEMBER), indent=indent), name)
    assert load_omni_transfer_config(path).connectors == load_omni_transfer_config(write(DECEMBER)).connectors


def test_yaml_by_content(write: Write) -> None:
    assert load_omni_transfer_config(write(NEWER, "p.conf")).connectors


def test_path_may_be_text(write: Write) -> None:
    path = write(NEWER)
    config = load_omni_transfer_config(str(path))
    assert config.path == path


def test_stage_sections_are_kept_untouched(write: Write) -> None:
    config = load_omni_transfer_config(write(DECEMBER))
    raw = config.stages["0"].raw
    assert raw == yaml.safe_load(DECEMBER)["stage_args"][0]
    assert type(raw) is dict
    assert type(raw["engine_args"]["nested"]) is list
    assert type(raw["engine_args"]["nested"][1]) is dict


def test_stages_are_found_by_int_and_text(write: Write) -> None:
    config = load_omni_transfer_config(write(DECEMBER))
    assert config.stages[1] is config.stages["1"]  # type: ignore[index]
    for missing in (7, "7", True, None):
        with pytest.raises(KeyError):
            config.stages[missing]  # type: ignore[index]


@pytest.mark.parametrize(
    ("source", "edges"),
    [
        ([10], [("10", "2")]),
        (10, [("10", "2")]),
        ("10", [("10", "2")]),
        (["10", 1], [("10", "2"), ("1", "2")]),
        ([1, 1], [("1", "2")]),
        ([], []),
        (None, []),
    ],
)
def test_sources_are_whole_stages(source: Any, edges: list[Any]) -> None:
    stages = [{"stage_id": 10}, {"stage_id": 1}, {"stage_id": 0}, {"stage_id": 2, "engine_input_source": source}]
    assert list(load_omni_transfer_config({"stages": stages}).edges) == edges


@pytest.mark.parametrize("key", ["connector", "connectors", "extra", "name"])
def test_an_edge_that_wants_to_say_its_connector_is_told_where(key: str) -> None:
    stages = [{"stage_id": 0}, {"stage_id": 1}]
    with pytest.raises(
        ConfigError, match=rf"edges\[0\]\.{key}: is not read here: write input_connectors: {{from_stage_0:"
    ):
        load_omni_transfer_config({"stages": stages, "edges": [{"from": 0, "to": 1, key: "shm"}]})


def test_text_and_number_are_the_same_stage() -> None:
    config = load_omni_transfer_config(
        {"stages": [{"stage_id": "0"}, {"stage_id": 1}], "edges": [{"from": 0, "to": "1"}]}
    )
    assert config.edges == (("0", "1"),)


def test_stages_with_names() -> None:
    stages = [
        {"stage_id": "audio.encoder"},
        {"stage_id": "llm", "input_connectors": {"from_stage_audio.encoder": None}},
    ]
    assert load_omni_transfer_config({"stages": stages}).connectors == {("audio.encoder", "llm"): DEFAULT}


def test_edges_alone_name_the_stages() -> None:
    config = load_omni_transfer_config({"runtime": {"edges": [{"from": 0, "to": 1}, {"from": 1, "to": 2}]}})
    assert config.connectors == {("0", "1"): DEFAULT, ("1", "2"): DEFAULT}
    assert list(config.stages) == ["0", "1", "2"]


def test_default_threshold_can_be_given() -> None:
    config = load_omni_transfer_config(two_stages(), default_shm_threshold=sys.maxsize)
    assert config.connectors["0", "1"].extra == {"shm_threshold_bytes": sys.maxsize}
    assert config.default_connector.extra == {"shm_threshold_bytes": sys.maxsize}
    for wrong in (-1, "64k", True, 1.5):
        with pytest.raises(ConfigError, match="default_shm_threshold"):
            load_omni_transfer_config(two_stages(), default_shm_threshold=wrong)  # type: ignore[arg-type]


def test_every_edge_has_settings_of_its_own(write: Write) -> None:
    config = load_omni_transfer_config(write(NEWER))
    extras = [spec.extra for spec in config.connectors.values()] + [config.default_connector.extra]
    assert len({id(extra) for extra in extras}) == len(extras)


def test_an_explicit_connector_wins_over_a_mention(write: Write) -> None:
    for first in ("engine_input_source", "input_connectors"):
        stage: dict[str, Any] = {"stage_id": 1}
        keys: dict[str, Any] = {
            "engine_input_source": [0],
            "input_connectors": {"from_stage_0": {"name": "InProcessConnector", "extra": {"max_bytes": 1000}}},
        }
        stage[first] = keys.pop(first)
        stage.update(keys)
        config = load_omni_transfer_config({"stages": [{"stage_id": 0}, stage], "edges": [{"from": 0, "to": 1}]})
        assert config.connectors == {("0", "1"): IN_PROCESS}
        assert config.origins["0", "1"] == "stages[1].input_connectors.from_stage_0"


def test_one_side_may_leave_the_connector_open() -> None:
    stages = [
        {"stage_id": 0, "output_connectors": {"to_stage_1": None}},
        {"stage_id": 1, "input_connectors": {"from_stage_0": {"name": "InProcessConnector", "extra": None}}},
    ]
    config = load_omni_transfer_config({"stages": stages})
    assert config.connectors == {("0", "1"): ConnectorSpec("InProcessConnector", {})}


def test_both_sides_may_say_the_same() -> None:
    def side(**extra: Any) -> dict[str, Any]:
        return {"name": "InProcessConnector", "extra": {"max_bytes": 5, **extra}}

    stages = [
        {"stage_id": 0, "output_connectors": {"to_stage_1": side(role="sender", put_timeout_s=None)}},
        {"stage_id": 1, "input_connectors": {"from_stage_0": side(role="receiver", stage_id=1)}},
    ]
    assert list(load_omni_transfer_config({"stages": stages}).edges) == [("0", "1")]


def test_an_alias_is_the_same_backend() -> None:
    stages = [
        {"stage_id": 0, "output_connectors": {"to_stage_1": {"name": "MooncakeStoreConnector"}}},
        {"stage_id": 1, "input_connectors": {"from_stage_0": {"name": "MooncakeConnector"}}},
    ]
    assert load_omni_transfer_config({"stages": stages}).connectors["0", "1"].name == "MooncakeStoreConnector"


def test_connectors_at_the_top_and_under_runtime_add_up() -> None:
    config = load_omni_transfer_config(
        {
            "runtime": {"connectors": {"a": {"name": "InProcessConnector"}}},
            "connectors": {"b": {"name": "InProcessConnector", "extra": {"max_bytes": 1000}}},
            "stages": [
                {"stage_id": 0},
                {"stage_id": 1, "input_connectors": {"from_stage_0": "a"}},
                {"stage_id": 2, "input_connectors": {"from_stage_0": "b"}},
            ],
        }
    )
    assert config.connectors == {("0", "1"): ConnectorSpec("InProcessConnector", {}), ("0", "2"): IN_PROCESS}


def test_module_class_is_a_connector_name() -> None:
    spec = {"name": "my_package.transport:Connector", "extra": {"anything": [1]}}
    stages = [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {"from_stage_0": spec}}]
    config = load_omni_transfer_config({"stages": stages})
    assert config.connectors["0", "1"] == ConnectorSpec("my_package.transport:Connector", {"anything": [1]})


def test_host_settings_stay_in_extra() -> None:
    extra = {"max_bytes": 1, "codec_chunk_frames": 25, "stage_id": 3, "mine": 1, "extra_ignored": ["mine"]}
    stages = [
        {"stage_id": 0, "output_connectors": {"to_stage_1": {"name": "InProcessConnector", "extra": extra}}},
        {"stage_id": 1},
    ]
    assert load_omni_transfer_config({"stages": stages}).connectors["0", "1"].extra == extra


def test_the_result_can_be_sent_to_another_process(write: Write) -> None:
    config = load_omni_transfer_config(write(DECEMBER))
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.stages[1] == config.stages["1"]  # type: ignore[index]


def test_the_result_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_omni_transfer_config().path = Path()  # type: ignore[misc]


def test_connector_for_edge(write: Write) -> None:
    config = load_omni_transfer_config(write(DECEMBER))
    assert config.get_connector_for_edge(0, 1) == IN_PROCESS
    assert config.get_connector_for_edge("2", "0") == DEFAULT
    assert config.has_connector_for_edge(0, "1")
    assert not config.has_connector_for_edge(2, 0)
    with pytest.raises(ConfigError, match="no stage '9'"):
        config.get_connector_for_edge(0, 9)
    with pytest.raises(ConfigError, match="itself"):
        config.get_connector_for_edge(0, 0)
    assert OmniTransferConfig().get_connector_for_edge("x", "y") == DEFAULT


def test_config_for_a_stage(write: Write) -> None:
    config = load_omni_transfer_config(write(DECEMBER))
    in_process = {"spec": {"name": "InProcessConnector", "extra": {"max_bytes": 1000}}}
    default = {"spec": {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 65536}}}
    assert get_connectors_config_for_stage(config, 0) == {"to_stage_1": in_process, "to_stage_2": in_process}
    assert get_connectors_config_for_stage(config, "1") == {"from_stage_0": in_process, "to_stage_2": default}
    assert get_stage_connector_config(config, 2) == {"from_stage_0": in_process, "from_stage_1": default}
    assert get_connectors_config_for_stage(None, 0) == {}
    assert get_connectors_config_for_stage(OmniTransferConfig(), 0) == {}
    with pytest.raises(ConfigError, match="no stage '3'"):
        get_connectors_config_for_stage(config, 3)


# fn


def test_fn_of_a_file_is_relative_to_the_configuration(write: Write, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write("def run(x): return x", "sub/stages.py")
    path = write("stages:\n- {stage_id: 0, fn: 'sub/stages.py:run'}\n- {stage_id: 1, fn: 'os.path:join'}\n")
    config = load_omni_transfer_config(path)
    assert config.stages["0"].fn == f"{(tmp_path / 'sub/stages.py').resolve()}:run"
    assert config.stages["0"].raw["fn"] == "sub/stages.py:run"
    assert config.stages["1"].fn == "os.path:join"


def test_fn_of_a_dict_is_relative_to_the_working_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("x = 1", "stages.py")
    monkeypatch.chdir(tmp_path)
    config = load_omni_transfer_config({"stages": [{"stage_id": 0, "fn": "stages.py:A.b"}]})
    assert config.stages["0"].fn == f"{(tmp_path / 'stages.py').resolve()}:A.b"


@pytest.mark.parametrize(
    "fn", [1, True, "", "x", ":x", "x:", "stages.py:", "stages.py", "a:b c", "a:b:c", ["a:b"], "a.py:1x"]
)
def test_what_is_no_fn(fn: Any) -> None:
    (problem,) = problems_of({"stages": [{"stage_id": 0, "fn": fn}]})
    assert problem.startswith("stages[0].fn: must be 'file.py:name' or 'module:name'")


def test_fn_of_no_module() -> None:
    (problem,) = problems_of({"stages": [{"stage_id": 0, "fn": "a b:c"}]})
    assert problem == "stages[0].fn: 'a b' is not the name of a module"


def test_fn_of_a_missing_file(write: Write, tmp_path: Path) -> None:
    path = write("stages:\n- stage_id: 0\n  fn: nothing.py:run\n")
    assert problems_of(path) == [f"{path}:3: stages[0].fn: there is no file {tmp_path / 'nothing.py'}"]


# Inheritance


BASE = """
connectors:
  fast: {name: InProcessConnector, extra: {max_bytes: 1000, put_timeout_s: 1}}
stages:
  - stage_id: 0
    fn: stages.py:run
    max_num_seqs: 64
    default_sampling_params: {temperature: 0.5, seed: 1}
  - stage_id: 1
    input_connectors: {from_stage_0: fast}
edges: [{from: 0, to: 1}]
"""


def test_overlay_on_a_base(write: Write, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write("def run(x): return x", "base/stages.py")
    write(BASE, "base/base.yaml")
    path = write(
        """
base_config: base/base.yaml
connectors:
  fast: {extra: {max_bytes: 7}}
stages:
  - stage_id: "0"
    max_num_seqs: 8
    default_sampling_params: {seed: 2}
    fn:
  - stage_id: 2
    engine_input_source: [1]
edges:
"""
    )
    config = load_omni_transfer_config(path)
    assert config.connectors == {
        ("0", "1"): ConnectorSpec("InProcessConnector", {"max_bytes": 7, "put_timeout_s": 1}),
        ("1", "2"): DEFAULT,
    }
    stage = config.stages["0"]
    assert stage.raw["max_num_seqs"] == 8
    assert stage.raw["default_sampling_params"] == {"temperature": 0.5, "seed": 2}
    assert stage.fn == f"{(tmp_path / 'base/stages.py').resolve()}:run"


def test_problems_of_a_base_keep_their_own_file(write: Write, tmp_path: Path) -> None:
    base = write("stages:\n- stage_id: 0\n- stage_id: 1\n  engine_input_source: [5]\n", "base.yaml")
    path = write("base_config: base.yaml\nstages:\n- stage_id: 1\n  input_connectors: {from_stage_0: nope}\n")
    problems = problems_of(path)
    assert len(problems) == 2
    assert problems[0].startswith(f"{path}:4: stages[1].input_connectors.from_stage_0: ")
    assert problems[1].startswith(f"{base}:4: stages[1].engine_input_source[0]: ")


def test_a_chain_of_bases(write: Write) -> None:
    write("stages:\n- {stage_id: 0, a: 1, b: 1, c: 1}\n", "one.yaml")
    write('{"base_config": "one.yaml", "stages": [{"stage_id": 0, "b": 2, "c": 2}]}', "two.json")
    path = write("base_config: two.json\nstages:\n- {stage_id: 0, c: 3}\n")
    assert load_omni_transfer_config(path).stages["0"].raw == {"stage_id": 0, "a": 1, "b": 2, "c": 3}


def test_bases_in_a_circle(write: Write) -> None:
    write("base_config: b.yaml\n", "a.yaml")
    write("base_config: c.yaml\n", "b.yaml")
    path = write("\nbase_config: ./a.yaml\n", "c.yaml")
    (problem,) = problems_of(path)
    assert "inherit from each other: c.yaml -> a.yaml -> b.yaml -> c.yaml" in problem
    (problem,) = problems_of(write("base_config: p.yaml"))
    assert "p.yaml -> p.yaml" in problem


@pytest.mark.parametrize("base", ["missing.yaml", "5", "''", "[a]", "."])
def test_bases_that_cannot_be_used(write: Write, base: str) -> None:
    path = write(f"stages: []\nbase_config: {base}\n")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:2: base_config: ")


def test_an_overlay_that_names_a_stage_twice(write: Write) -> None:
    write(BASE.replace("    fn: stages.py:run\n", ""), "base.yaml")
    path = write("base_config: base.yaml\nstages:\n- stage_id: 1\n- stage_id: 1\n")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:4: stages[2].stage_id: the stage '1' exists already: {path}:3: ")


# What is wrong with a file as a whole


def test_a_missing_file(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "none.yaml")
    assert problem == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    (problem,) = problems_of(tmp_path)
    assert "cannot be read" in problem
    (problem,) = problems_of("a\0b")
    assert "cannot be read" in problem


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1\nc: 2\n", 3),
        ("a: 1\n\tb: 2\n", 2),
        ("a: 1\n- b\n", 2),
        ("a: b: c\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: *nothing\n", 1),
        ("x: y\na: !unknown {}\n", 2),
        ("x: y\na: !!python/object/apply:os.getpid []\n", 2),
        ("x: y\na: 2001-13-01\n", 2),
        ("x: y\na: 0b_\n", 2),
        ("a: &x [*x]\n", 1),
        ("a: &x {b: *x}\n", 1),
        ("a: 1\n<<: 5\n", 1),
        ("? [a, b]\n: 1\n", 1),
    ],
)
def test_yaml_that_cannot_be_read(write: Write, text: str, line: int) -> None:
    path = write(text)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("data", [b"a: \xff\xfe", b"\x00\x01", b"a: \x07"])
def test_bytes_that_are_no_text(write: Write, data: bytes) -> None:
    assert "not valid YAML" in problems_of(write(data))[0]
    assert "not valid JSON" in problems_of(write(data, "p.json"))[0]


def test_json_that_cannot_be_read(write: Write) -> None:
    path = write('{"a": 1,\n "b": }', "p.json")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:2: is not valid JSON: ")


def test_json_problems_have_lines(write: Write) -> None:
    path = write(
        '{"stages": [\n\t{"stage_id": 0},\n\t{"stage_id": 0},\n\t{"stage_id": 1, "fn": 5, "fn": 6}\n]}', "p.json"
    )
    problems = problems_of(path)
    assert problems[0].startswith(f"{path}:4: the key 'fn' stands here twice")
    assert problems[1].startswith(f"{path}:3: stages[1].stage_id: the stage '0' exists already: {path}:2: ")
    assert problems[2].startswith(f"{path}:4: stages[2].fn: ")


@pytest.mark.parametrize("opening", ["[", '{"a":', "- "])
def test_deep_nesting(write: Write, opening: str) -> None:
    assert "nested too deeply" in problems_of(write(opening * 1500))[0]
    if opening != "- ":
        closing = {"[": "]", '{"a":': "1}"}[opening]
        assert problems_of(write(opening * 100_000 + closing * 100_000, "p.json"))


def test_a_deep_or_circular_dict() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"stages": [deep]}
    assert "nested too deeply" in problems_of(deep)[0]
    circle: dict[str, Any] = {}
    circle["stages"] = [circle]
    assert "contains itself" in problems_of(circle)[0]


def test_aliases_that_stand_for_gigabytes(write: Write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    lines += ["stages:", "- {stage_id: 0, engine_args: *a11}", "- {stage_id: *a11}"]
    (problem,) = problems_of(write("\n".join(lines)))
    assert len(problem) < 1000
    assert "stages[1].stage_id" in problem


def test_a_key_that_stands_twice(write: Write) -> None:
    path = write("stages:\n- stage_id: 0\n  stage_id: 1\nx: {a: 1, a: 2}\nstages: []\n")
    problems = problems_of(path)
    assert problems[0] == f"{path}:3: the key 'stage_id' stands here twice (first in line 2)"
    assert problems[1] == f"{path}:4: the key 'a' stands here twice (first in line 4)"
    assert problems[2] == f"{path}:5: the key 'stages' stands here twice (first in line 1)"


def test_merge_keys_are_no_duplicates(write: Write) -> None:
    path = write(
        """
common: &common {max_num_seqs: 64, name: x}
more: &more {devices: "1"}
stages:
  - {<<: *common, stage_id: 0, max_num_seqs: 8}
  - {<<: [*common, *more], stage_id: 1}
"""
    )
    config = load_omni_transfer_config(path)
    assert config.stages["0"].raw == {"stage_id": 0, "max_num_seqs": 8, "name": "x"}
    assert config.stages["1"].raw == {"stage_id": 1, "max_num_seqs": 64, "name": "x", "devices": "1"}


@pytest.mark.parametrize("content", ["text", "- a\n- b", "5", "true", "2001-01-01"])
def test_a_file_must_be_a_mapping(write: Write, content: str) -> None:
    (problem,) = problems_of(write(content))
    assert "the configuration must be a mapping, not " in problem


@pytest.mark.parametrize("content", [[], 5, True, object(), ("stages",)])
def test_a_configuration_must_be_a_mapping(content: Any) -> None:
    assert "must be a mapping" in problems_of(content)[0]


def test_path_and_dict_at_once(write: Write) -> None:
    with pytest.raises(ConfigError, match="not both"):
        load_omni_transfer_config(write(""), config_dict={})


# What is wrong inside

WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"runtime": []}, "runtime: must be a mapping"),
    ({"runtime": {"connectors": ["a"]}}, "runtime.connectors: must be a mapping"),
    ({"runtime": {"edges": {"from": 0, "to": 1}}}, "runtime.edges: must be a list"),
    ({"connectors": "x"}, "connectors: must be a mapping"),
    ({"edges": "x"}, "edges: must be a list"),
    ({"stages": {"stage_id": 0}}, "stages: must be a list"),
    ({"stage_args": "x"}, "stage_args: must be a list"),
    ({"stages": [5]}, "stages[0]: a stage must be a mapping with a stage_id"),
    ({"stages": [None]}, "stages[0]: a stage must be a mapping with a stage_id"),
    ({"stages": [{}]}, "stages[0]: a stage needs a stage_id"),
    ({"stages": [{"stage_id": None}]}, "stages[0].stage_id: None"),
    ({"stages": [{"stage_id": True}]}, "stages[0].stage_id: True"),
    ({"stages": [{"stage_id": 1.0}]}, "stages[0].stage_id: 1.0"),
    ({"stages": [{"stage_id": ""}]}, "stages[0].stage_id: a stage's name must not be empty"),
    ({"stages": [{"stage_id": [0]}]}, "stages[0].stage_id: [0]"),
    ({"stages": [{"stage_id": 0, "input_connectors": []}]}, "stages[0].input_connectors: must be a mapping"),
    ({"stages": [{"stage_id": 0, "output_connectors": "x"}]}, "stages[0].output_connectors: must be a mapping"),
    ({"stages": [{"stage_id": 0, "engine_input_source": {}}]}, "stages[0].engine_input_source: must be a list"),
    ({"stages": [{"stage_id": 0, "engine_input_source": True}]}, "stages[0].engine_input_source: must be a list"),
    ({"stages": [{"stage_id": 0, "engine_input_source": 1.5}]}, "stages[0].engine_input_source: must be a list"),
    ({"stages": [{"stage_id": 0, "engine_input_source": [None]}]}, "stages[0].engine_input_source[0]: a source: None"),
    ({"stages": [{"stage_id": 0, "engine_input_source": [[0]]}]}, "stages[0].engine_input_source[0]: a source: [0]"),
    ({"edges": [5]}, "edges[0]: an edge must be a mapping with from and to"),
    ({"edges": [[0, 1]]}, "edges[0]: an edge must be a mapping with from and to"),
    ({"edges": [{"to": 1}]}, "edges[0]: an edge needs a stage under 'from'"),
    ({"edges": [{"from": 1, "to": None}]}, "edges[0]: an edge needs a stage under 'to'"),
    ({"edges": [{"from": 1.5, "to": 1}]}, "edges[0].from: 1.5"),
    ({"connectors": {"a": None}}, "connectors.a: a connector needs a name"),
    ({"connectors": {"a": {"extra": {}}}}, "connectors.a: a connector needs a name"),
    ({"connectors": {"a": "InProcessConnector"}}, "connectors.a: must be a mapping"),
    ({"connectors": {"a": {"name": 5}}}, "connectors.a.name: a connector's name must be text"),
    ({"connectors": {"a": {"name": "InProcessConnector", "extra": []}}}, "connectors.a.extra: must be a mapping"),
    ({"connectors": {5: {"name": "InProcessConnector"}}}, "connectors.5: the name of a connector must be text"),
]


@pytest.mark.parametrize(("content", "start"), WRONG_TYPES)
def test_wrong_types(content: dict[str, Any], start: str) -> None:
    problems = problems_of(content)
    (said,) = [problem for problem in problems if problem.startswith(start)]
    if " must be a " in said or " needs a " in said:
        shape = re.search(r"(?:write it as in|, as in|: as in) (.*?)(?:\. Known.*)?$", said)
        assert shape, f"it does not say how to write it: {said}"
        assert yaml.safe_load(shape[1])


@pytest.mark.parametrize("name", sorted(config_check._SHAPES))
def test_the_shapes_that_messages_show_are_right(name: str) -> None:
    shown = yaml.safe_load(config_check._SHAPES[name])
    assert list(shown) == [name]
    stages: list[dict[str, Any]] = [{"stage_id": 0}, {"stage_id": 1}]
    content: dict[str, Any] = {"stages": stages, "connectors": {"shm": SHM}}
    if name in ("runtime", "stages", "stage_args", "connectors", "edges"):
        content = {"stages": stages, **shown} if name in ("runtime", "connectors", "edges") else shown
    elif name == "extra":
        content["connectors"]["shm"] = {**SHM, "name": "SharedMemoryConnector", **shown}
    else:
        stages[name != "output_connectors"].update(shown)
    assert inspect_transfer_config(content)[1] == []
    whole = {"stages": [yaml.safe_load(config_check._STAGE), stages[1]], "edges": [yaml.safe_load(config_check._EDGE)]}
    whole["connectors"] = {"shm": yaml.safe_load(config_check._CONNECTOR)}
    assert inspect_transfer_config(whole)[1] == []


def test_a_misspelt_reference(write: Write) -> None:
    path = write(
        """
runtime:
  connectors:
    shm: {name: InProcessConnector}
    other: {name: InProcessConnector}
stage_args:
  - stage_id: 0
  - stage_id: 1
    input_connectors:
      from_stage_0: shmm
"""
    )
    (problem,) = problems_of(path)
    assert problem == (
        f"{path}:10: stage_args[1].input_connectors.from_stage_0: stage '1' names 'shmm', which is not under "
        "connectors; did you mean 'shm'? Defined: shm, other"
    )


def test_a_backend_is_no_reference() -> None:
    stages = [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {"from_stage_0": "InProcessConnector"}}]
    (problem,) = problems_of({"stages": stages})
    assert "write {name: InProcessConnector}" in problem
    assert "Defined: none" in problem


def test_an_unknown_backend() -> None:
    (problem,) = problems_of({"connectors": {"a": {"name": "NoSuchConnector"}}})
    assert problem.startswith("connectors.a.name: there is no connector 'NoSuchConnector'")
    assert "InProcessConnector, MooncakeConnector, MooncakeStoreConnector, SharedMemoryConnector" in problem


@pytest.mark.usefixtures("without_mooncake")
def test_a_backend_that_is_missing_is_a_warning_at_load() -> None:
    config = load_omni_transfer_config(
        {
            "stages": [
                {"stage_id": 0},
                {"stage_id": 1, "input_connectors": {"from_stage_0": {"name": "MooncakeConnector"}}},
            ]
        }
    )
    (warning,) = config.warnings
    assert "the package 'mooncake', which is not installed: pip install 'omni-fastshm[mooncake]'" in warning


def conflict(one: Any, other: Any) -> dict[str, Any]:
    return {
        "connectors": {
            "a": {"name": "InProcessConnector", "extra": {"max_bytes": 1}},
            "b": {"name": "InProcessConnector", "extra": {"max_bytes": 2, "put_timeout_s": 1}},
            "c": {"name": "MooncakeConnector"},
        },
        "stages": [
            {"stage_id": 0, "output_connectors": {"to_stage_1": one}},
            {"stage_id": 1, "input_connectors": {"from_stage_0": other}},
        ],
    }


def test_two_backends_on_one_edge() -> None:
    (problem,) = problems_of(conflict("a", "c"))
    assert problem == (
        "stages[1].input_connectors.from_stage_0: two backends for the edge 0 -> 1: MooncakeConnector here, but "
        "InProcessConnector at stages[0].output_connectors.to_stage_1"
    )


def test_two_settings_on_one_edge() -> None:
    (problem,) = problems_of(conflict("a", "b"))
    assert "two settings for the edge 0 -> 1: max_bytes, put_timeout_s differs from stages[0]" in problem
    (problem,) = problems_of(conflict("a", {"name": "InProcessConnector"}))
    assert "two settings" in problem


def test_edges_to_stages_that_do_not_exist(write: Write) -> None:
    path = write(
        """
stage_args:
  - stage_id: 0
    output_connectors:
      to_stage_4: {name: InProcessConnector}
  - stage_id: 1
    engine_input_source: [3]
    input_connectors:
      from_stage_2: {name: InProcessConnector}
runtime:
  edges:
    - {from: 0, to: 5}
"""
    )
    problems = problems_of(path)
    assert sorted(int(problem.split(":")[1]) for problem in problems) == [5, 7, 9, 12]
    for problem, stage in zip(sorted(problems, key=lambda p: int(p.split(":")[1])), "4325", strict=True):
        assert f"names the stage '{stage}', which does not exist. Stages: 0, 1" in problem


@pytest.mark.parametrize(
    "content",
    [
        {"edges": [{"from": 1, "to": "1"}], "stages": [{"stage_id": 1}]},
        {"stages": [{"stage_id": 1, "engine_input_source": ["1"]}]},
        {"stages": [{"stage_id": "1", "input_connectors": {"from_stage_1": None}}]},
        {"stages": [{"stage_id": "1", "output_connectors": {"to_stage_1": None}}]},
        {"edges": [{"from": "a", "to": "a"}]},
    ],
)
def test_edges_from_a_stage_to_itself(content: dict[str, Any]) -> None:
    (problem,) = problems_of(content)
    assert "cannot send to itself" in problem


def test_a_stage_that_exists_twice() -> None:
    (problem,) = problems_of({"stages": [{"stage_id": 1}, {"stage_id": "1"}]})
    assert problem == "stages[1].stage_id: the stage '1' exists already: stages[0]"


def test_both_generations_at_once() -> None:
    (problem,) = problems_of({"stages": [{"stage_id": 0}], "stage_args": [{"stage_id": 1}]})
    assert problem.startswith("stages: the file has stage_args as well")


def test_a_connector_that_is_defined_twice() -> None:
    table = {"a": {"name": "InProcessConnector"}}
    (problem,) = problems_of({"connectors": table, "runtime": {"connectors": table}})
    assert problem.startswith("connectors.a: the connector 'a' is defined under runtime.connectors as well")


@pytest.mark.parametrize("key", ["to_stage_0", "from_stage_", "0", 0, "from_0", None])
def test_keys_of_sides(key: Any) -> None:
    (problem,) = problems_of({"stages": [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {key: None}}]})
    meant = "here from_stage_0" if key not in ("from_stage_", None) else "such as from_stage_0"
    assert f"the key must be from_stage_ID, {meant}, not" in problem


@pytest.mark.parametrize("key", [2, "2", "stage_2", "stage2", "from_stage_2", "to_2", "to_stage2"])
def test_the_hint_at_a_side_s_key_has_its_stage(key: Any) -> None:
    stages = [{"stage_id": 0, "output_connectors": {key: None}}, {"stage_id": 2}]
    (problem,) = problems_of({"stages": stages})
    assert "output_connectors" in problem
    assert "the key must be to_stage_ID, here to_stage_2, not" in problem


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        ({"runn": {}}, "runn: is not a key of ours and is not read; did you mean 'run'?"),
        ({"stgs": []}, "stgs: is not a key of ours and is not read; did you mean 'stages'?"),
        (
            {"stages": [{"stage_id": 0, "inputconnector": {}}]},
            "stages[0].inputconnector: is not a key of ours; did you mean 'input_connectors'?",
        ),
        ({"async_chunk": True, "platforms": [], "dtype": "bf16", "args": 1}, None),
    ],
)
def test_keys_that_look_a_little_like_ours(content: Any, warning: str | None) -> None:
    config, problems = inspect_transfer_config(content)
    assert [*config.warnings, *problems] == ([] if warning is None else [warning])


def test_settings_are_checked_with_their_lines(write: Write) -> None:
    path = write(
        """
connectors:
  a:
    name: InProcessConnector
    extra:
      max_bytes: -1
      put_timeout_s: 5
      namespaec: x
  b:
    name: InProcessConnector
    extra: {key_lookup: true, namespace: a/b}
"""
    )
    problems = problems_of(path)
    assert problems[0].startswith(f"{path}:6: connectors.a.extra.max_bytes: -1 (int) is too small")
    assert problems[1].startswith(f"{path}:8: connectors.a.extra.namespaec: there is no such setting; did you mean")
    assert problems[2].startswith(f"{path}:11: connectors.b.extra.namespace: 'a/b' (str) cannot be used")


def test_key_lookup_needs_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_FASTSHM_NAMESPACE", raising=False)
    content = {"connectors": {"a": {"name": "InProcessConnector", "extra": {"key_lookup": True}}}}
    (problem,) = problems_of(content)
    assert problem.startswith("connectors.a.extra.namespace: with key_lookup the namespace must be given")
    monkeypatch.setenv("OMNI_FASTSHM_NAMESPACE", "here")
    assert load_omni_transfer_config(content).warnings


def test_settings_of_shared_memory_are_checked_too() -> None:
    content = {"connectors": {"a": {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": "64k"}}}}
    (problem,) = problems_of(content)
    assert problem.startswith("connectors.a.extra.shm_threshold_bytes: ")
    assert "65536" in problem


def test_a_setting_beside_the_name() -> None:
    (problem,) = problems_of({"connectors": {"a": {"name": "InProcessConnector", "max_bytes": 5}}})
    assert problem == "connectors.a.max_bytes: this is a setting of InProcessConnector: it must stand under extra"


def test_all_problems_in_one_error(write: Write) -> None:
    path = write("stages:\n- stage_id: 0\n- stage_id: 0\n- {}\nedges: 5\nconnectors: {a: {name: x}}\n")
    with pytest.raises(ConfigError) as caught:
        load_omni_transfer_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: 4 problems:\n  - {path}:6: ")
    assert text.count("\n  - ") == 4


# Warnings


def test_an_unused_connector_is_a_warning(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("connectors:\n  a: {name: InProcessConnector}\nstages: [{stage_id: 0}]\n")
    with caplog.at_level(logging.WARNING):
        config = load_omni_transfer_config(path)
    assert config.warnings == (f"{path}:2: connectors.a: no edge uses the connector 'a'",)
    assert config.warnings[0] in caplog.text


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        (
            {"edges": [{"from": 0, "to": 1}, {"from": "0", "to": 1}]},
            "edges[1]: the edge 0 -> 1 is listed already: edges[0]",
        ),
        ({"stages": [{"stage_id": 0}, {"stage_id": 1}]}, "no edge leads to or from stage '0', stage '1'"),
        (
            {"stages": [{"stage_id": 0}, {"stage_id": 1}, {"stage_id": 2}], "edges": [{"from": 0, "to": 2}]},
            "no edge leads to or from stage '1'",
        ),
    ],
)
def test_warnings(content: dict[str, Any], warning: str) -> None:
    assert warning in load_omni_transfer_config(content).warnings


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"stage_arg": []}, "stage_arg: is not a key of ours; did you mean 'stage_args'?"),
        ({"stage": []}, "stage: is not a key of ours; did you mean 'stages'?"),
        ({"Stages": []}, "Stages: is not a key of ours; did you mean 'stages'?"),
        ({"runtime": {"connector": {}}}, "runtime.connector: is not a key of ours; did you mean 'connectors'?"),
        (
            {"stages": [{"stage_id": 0, "input_connector": {}}]},
            "stages[0].input_connector: is not a key of ours; did you mean 'input_connectors'?",
        ),
        (
            {"connectors": {"a": {**SHM, "extras": {"shm_threshold_bytes": 1}}}},
            "connectors.a.extras: is neither name nor extra; did you mean 'extra'?",
        ),
        (
            {"connectors": {"a": {"nme": "X"}}},
            "connectors.a: a connector needs a name; there is 'nme': did you mean 'name'?",
        ),
        (
            {"edges": [{"frm": 0, "to": 1}]},
            "edges[0]: an edge needs a stage under 'from'; there is 'frm': did you mean 'from'?",
        ),
        (
            {"edges": [{"from": None, "to": 1}]},
            "edges[0]: an edge needs a stage under 'from', as in {from: 0, to: 1}",
        ),
        ({"stages": [{"id": 0}]}, "stages[0]: a stage needs a stage_id: write {stage_id: 0} for its id"),
        ({"stages": [{"name": "a"}]}, "stages[0]: a stage needs a stage_id: write {stage_id: 'a'} for its name"),
        (
            {"connectors": {"a": SHM["name"]}},
            "connectors.a: must be a mapping, not 'SharedMemoryConnector' (str); write it as in "
            "{name: SharedMemoryConnector}",
        ),
    ],
)
def test_a_key_that_looks_like_one_of_ours_is_refused(content: dict[str, Any], problem: str) -> None:
    # To the end, or to the list of what is known.
    assert any(text.partition(" Known: ")[0] == problem for text in problems_of(content)), problems_of(content)


def test_another_key_beside_name_is_only_a_warning() -> None:
    config = load_omni_transfer_config({"connectors": {"a": {**SHM, "comment": "ours"}}})
    assert "connectors.a.comment: is neither name nor extra and is not read" in config.warnings


def test_what_is_known_follows_a_full_stop() -> None:
    assert "there is no connector 'Zzz'. Known: " in problems_of({"connectors": {"a": {"name": "Zzz"}}})[0]
    wrong = {"connectors": {"a": {**SHM, "extra": {"zzz": 1}}}}
    assert "there is no such setting. Known: " in problems_of(wrong)[0]


def test_a_stage_knows_where_it_stands(write: Write) -> None:
    path = write("stages:\n  - stage_id: 0\n    fn: math:sqrt\n  - stage_id: 1\n")
    stages = load_omni_transfer_config(path).stages
    assert stages["0"].places == {"": f"{path}:2: stages[0]", "fn": f"{path}:3: stages[0].fn"}
    assert stages["1"].places == {"": f"{path}:4: stages[1]"}


HOST_STAGE_KEYS = (
    *("stage_type", "runtime", "engine_args", "engine_extras", "final_output", "model_stage", "devices"),
    *("final_output_type", "engine_output_type", "custom_process_input_func", "default_sampling_params"),
    *("is_comprehension", "max_num_seqs", "prompt_expand_func", "tensor_parallel_size", "stage_name"),
    *("requires_multimodal_data", "input_sources"),
)


def test_keys_of_hosts_are_no_warnings() -> None:
    content = {
        **dict.fromkeys(("async_chunk", "platforms", "pipeline", "dtype", "trust_remote_code", "env", "defaults"), 1),
        "runtime": {"enabled": True, "defaults": {"window_size": -1, "max_inflight": 1}},
        "stages": [{"stage_id": 0, **dict.fromkeys(HOST_STAGE_KEYS, 1)}],
    }
    assert load_omni_transfer_config(content).warnings == ()


# Anything at all

NAMES = st.sampled_from(
    [
        *("stage_args", "stages", "runtime", "connectors", "edges", "stage_id", "input_connectors", "extra", "name"),
        *("output_connectors", "engine_input_source", "from", "to", "from_stage_0", "to_stage_1", "fn", "max_bytes"),
        *("InProcessConnector", "SharedMemoryConnector", "a", "0", "1", "namespace", "key_lookup", "base_config"),
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | NAMES | st.text(max_size=5) | st.binary(max_size=3)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.integers(0, 2), inner, max_size=6),
    max_leaves=25,
)


@given(st.dictionaries(NAMES, TREES, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_dict_gives_a_configuration_or_config_error(content: dict[Any, Any]) -> None:
    config, problems = inspect_transfer_config(content)
    try:
        loaded = load_omni_transfer_config(content)
    except ConfigError:
        assert problems
        return
    assert not problems
    assert loaded == config
    for start, end in loaded.edges:
        assert start != end
        assert start in loaded.stages
        assert end in loaded.stages


@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_a_configuration_or_config_error(write: Write, data: bytes) -> None:
    for name in ("p.yaml", "p.json", "p"):
        # Any other exception fails the test.
        with contextlib.suppress(ConfigError):
            load_omni_transfer_config(write(data, name))


@given(st.dictionaries(NAMES, TREES, max_size=5), st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_broken_yaml_gives_a_configuration_or_config_error(
    write: Write, content: dict[Any, Any], data: st.DataObject
) -> None:
    text = yaml.safe_dump(content, allow_unicode=True)
    place = data.draw(st.integers(0, len(text)))
    text = (
        text[:place]
        + data.draw(st.sampled_from(["", "*", "&a ", "<<: ", ": ", "- ", "!!set ", "{", '"', "\t"]))
        + text[place:]
    )
    with contextlib.suppress(ConfigError):
        load_omni_transfer_config(write(text))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("qwen2_5_omni_mooncake", ["Mooncake"] * 2), ("qwen2_5_omni_mixed", ["SharedMemory", "Mooncake"])],
)
def test_the_examples_for_several_nodes_load(name: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / f"examples/{name}.yaml"
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    assert problems_of(path)[0].endswith("needs the environment variable MOONCAKE_MASTER, which is not set")
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.1:50051")
    connectors = load_omni_transfer_config(path).connectors
    assert [connectors[edge].name for edge in (("0", "1"), ("1", "2"))] == [f"{kind}Connector" for kind in kinds]


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni", "three_kinds_of_edges"])
def test_the_examples_load(name: str) -> None:
    config = load_omni_transfer_config(Path(__file__).parents[2] / f"examples/{name}.yaml")
    if name == "three_kinds_of_edges":
        kinds = ["InProcessConnector", "SharedMemoryConnector", "MooncakeConnector"]
        assert [spec.name for spec in config.connectors.values()] == kinds
        return
    assert config.edges == (("0", "1"), ("1", "2"))
    assert {spec.name for spec in config.connectors.values()} == {"SharedMemoryConnector"}
    assert [str(stage.fn).rpartition(":")[2] for stage in config.stages.values()] == ["Thinker", "Talker", "Code2Wav"]
    assert config.warnings == ()


@pytest.mark.parametrize("name", ["SharedMemoryConnector", "InProcessConnector", "MooncakeConnector"])
def test_the_documentation_has_every_setting_with_its_default(name: str) -> None:
    table = OmniConnectorFactory.settings_of(name)
    assert table is not None
    text = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    section = text.partition(f"### {name}\n")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0].removeprefix("| ").strip("`") for row in rows] == list(table)
    for row, setting in zip(rows, table.values(), strict=True):
        shown = yaml.safe_load(row[1].strip("`"))
        assert (tuple(shown) if isinstance(shown, list) else shown) == setting.default, row[0]


def test_edges_may_name_stages() -> None:
    stages = [{"stage_id": 0, "name": "thinker"}, {"stage_id": 1, "engine_args": {"model_stage": "talker"}}]
    config = load_omni_transfer_config({"stages": stages, "edges": [{"from": "thinker", "to": "talker"}]})
    assert config.edges == (("0", "1"),)
    assert (config.find_stage("talker"), config.find_stage(1), config.find_stage("1")) == ("1", "1", "1")
    stages[1]["engine_input_source"] = ["thinker"]
    assert load_omni_transfer_config({"stages": stages}).edges == (("0", "1"),)


def test_an_id_comes_before_a_name() -> None:
    stages = [{"stage_id": "a", "name": "b"}, {"stage_id": "b"}, {"stage_id": "c"}]
    edges = [{"from": "b", "to": "c"}, {"from": "a", "to": "c"}]
    config = load_omni_transfer_config({"stages": stages, "edges": edges})
    assert config.edges == (("b", "c"), ("a", "c"))


def test_names_that_lead_nowhere() -> None:
    stages = [{"stage_id": 0, "name": "x"}, {"stage_id": 1, "name": "x"}, {"stage_id": 2, "name": "y"}]
    (problem,) = problems_of({"stages": stages, "edges": [{"from": "x", "to": 2}]})
    assert "names the stage 'x', which is the name of several: use the stage_id. Stages: 0 (x), 1 (x), 2 (y)" in problem
    (problem,) = problems_of({"stages": stages, "edges": [{"from": "y", "to": 2}]})
    assert "stage '2' cannot send to itself" in problem
    stages[2]["engine_input_source"] = "y"
    (problem,) = problems_of({"stages": stages})
    assert "'y' and '2' are the same stage: it cannot send to itself" in problem
    del stages[2]["engine_input_source"]
    config = load_omni_transfer_config({"stages": stages, "edges": [{"from": 0, "to": 2}, {"from": 1, "to": "y"}]})
    with pytest.raises(ConfigError, match="'x' is the name of the stages 0, 1"):
        config.find_stage("x")
    with pytest.raises(ConfigError, match="there is no stage 'z'"):
        config.find_stage("z")
