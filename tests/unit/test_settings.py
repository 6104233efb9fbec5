"""Settings of connectors and arguments of calls: what is accepted, and what each refusal says."""

from __future__ import annotations

import enum
import math
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_fastshm.errors import ConfigError
from omni_fastshm.settings import (
    Setting,
    check_consumers,
    check_edge,
    check_namespace,
    check_settings,
    check_timeout,
    describe,
    is_import_path,
    nearest,
    parse_settings,
    request_name,
    resolve_namespace,
    stage_name,
)

TABLE = {
    "shm_threshold_bytes": Setting("bytes", 65536),
    "max_bytes": Setting("bytes", None),
    "retries": Setting("int", 3, minimum=1, maximum=10),
    "window": Setting("int", -1, minimum=-1),
    "put_timeout_s": Setting("seconds", 5.0),
    "busy_wait_us": Setting("microseconds", 20.0, maximum=1000),
    "key_lookup": Setting("bool", False),
    "namespace": Setting("str", None),
    "wire": Setting("choice", "exact", choices=("exact", "host")),
    "types": Setting("names", ()),
}


def parse(**extra: Any) -> dict[str, Any]:
    return parse_settings("Demo", TABLE, extra)


def refused(**extra: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(**extra)
    return str(caught.value)


@pytest.mark.parametrize("extra", [None, {}, dict.fromkeys(TABLE)])
def test_defaults(extra: Any) -> None:
    assert parse_settings("Demo", TABLE, extra) == {name: setting.default for name, setting in TABLE.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (65536, 65536),
        ("65536", 65536),
        (" 65536 ", 65536),
        (65536.0, 65536),
        ("65536.0", 65536),
        ("1e6", 1_000_000),
        (np.int64(7), 7),
        (np.float32(8), 8),
        (sys.maxsize, sys.maxsize),
        (str(sys.maxsize), sys.maxsize),
        (float(2**40), 2**40),
    ],
)
def test_a_size_is_any_whole_number(given: Any, expected: int) -> None:
    value = parse(shm_threshold_bytes=given)["shm_threshold_bytes"]
    assert value == expected
    assert type(value) is int


@pytest.mark.parametrize(
    "given",
    [
        *(-1, "-1", -0.5, 1.5, "1.5", math.nan, math.inf, -math.inf, "nan", "inf", "1e999"),
        *("64k", "64 KiB", "", "x", "1_000", "٣", "0x10", pytest.param("9" * 5000, id="huge")),
        *(True, False, [], {}, (), b"1", 1j, object()),
    ],
)
def test_what_is_no_size_is_refused_by_name(given: Any) -> None:
    text = refused(shm_threshold_bytes=given)
    assert text.startswith("Demo: shm_threshold_bytes: ")
    assert len(text) < 400


@pytest.mark.parametrize(("given", "number"), [("64k", 65536), ("1.5 MiB", 1572864), ("2GB", 2**31)])
def test_a_size_with_a_unit_is_told_in_bytes(given: str, number: int) -> None:
    assert f"write it in bytes: {number}" in refused(max_bytes=given)


@pytest.mark.parametrize("name", ["max_bytes", "room"])
@pytest.mark.parametrize(
    ("given", "problem"), [("0.0001k", "is less than one byte"), ("9" * 400 + "g", "is more bytes than there can be")]
)
def test_a_size_with_a_unit_that_cannot_be(name: str, given: str, problem: str) -> None:
    """What rounds to nothing is not 0, which turns some things off."""
    with pytest.raises(ConfigError, match=problem):
        parse_settings("Demo", {**TABLE, "room": Setting("size", 7)}, {name: given})


@pytest.mark.parametrize(("given", "number"), [("0k", 0), ("0.5k", 512), ("512MB", 1 << 29), ("512MiB", 1 << 29)])
def test_a_size_with_a_unit(given: str, number: int) -> None:
    assert parse_settings("Demo", {"room": Setting("size", 7)}, {"room": given})["room"] == number


def test_ranges_are_checked_and_never_clamped() -> None:
    assert parse(retries=1)["retries"] == 1
    assert parse(retries=10)["retries"] == 10
    assert "the least is 1" in refused(retries=0)
    assert "the most is 10" in refused(retries=11)
    assert parse(window=-1)["window"] == -1
    assert "the least is -1" in refused(window=-2)
    assert "the most is 1000" in refused(busy_wait_us=1000.5)


@pytest.mark.parametrize("given", [5, 5.0, "5", "5.0", np.float64(5)])
def test_times_are_floats(given: Any) -> None:
    value = parse(put_timeout_s=given)["put_timeout_s"]
    assert value == 5.0
    assert type(value) is float


@pytest.mark.parametrize("given", [-0.1, math.nan, math.inf, 1e300, 10**400, threading.TIMEOUT_MAX * 2, True, "5s"])
def test_what_is_no_time_is_refused(given: Any) -> None:
    assert "put_timeout_s" in refused(put_timeout_s=given)


@pytest.mark.parametrize(("given", "value"), [(True, True), (False, False), ("true", True), (" False ", False)])
def test_true_and_false(given: Any, value: bool) -> None:
    assert parse(key_lookup=given)["key_lookup"] is value


@pytest.mark.parametrize("given", [0, 1, "yes", "1", "", [], 1.0])
def test_what_is_neither_true_nor_false(given: Any) -> None:
    assert "neither true nor false" in refused(key_lookup=given)


@pytest.mark.parametrize("given", [7, 7.0, True, b"x", ["x"]])
def test_text_is_not_made_from_numbers(given: Any) -> None:
    assert "put it in quotes" in refused(namespace=given)


def test_choices() -> None:
    assert parse(wire="host")["wire"] == "host"
    assert "did you mean 'host'?" in refused(wire="hots")
    assert "is not one of: exact, host" in refused(wire=1)


def test_lists_of_names() -> None:
    assert parse(types="a:B")["types"] == ("a:B",)
    assert parse(types=["a:B", "c:D"])["types"] == ("a:B", "c:D")
    for wrong in (1, ["a", 1], {"a": 1}, True):
        assert "is not a list of texts" in refused(types=wrong)


@pytest.mark.parametrize("text", ["x", "x.y", "a:", ":B", "a:B:C", "a b:C", "a:f.<locals>.C", ""])
def test_names_must_read_module_and_class(text: str) -> None:
    assert not is_import_path(text)
    assert refused(types=["a:B", text]) == f"Demo: types: {text!r} (str) does not read 'module:Class'"


def test_names_are_not_imported() -> None:
    assert parse(types=["no_such_module_anywhere.at.all:Nope.Inner"])["types"]


def test_extra_ignored_takes_any_text() -> None:
    assert parse(extra_ignored=["mine_*"], mine_one=1)


def test_unknown_names_get_the_nearest_and_all_known() -> None:
    text = refused(shm_treshold_bytes=1)
    assert "did you mean 'shm_threshold_bytes'?" in text
    assert all(name in text for name in TABLE)
    assert "did you mean 'shm_threshold_bytes'?" in refused(treshold=1)
    assert "did you mean" not in refused(zzz=1)
    assert "did you mean 'namespace'?" in refused(NameSpace=None)


def test_names_must_be_text() -> None:
    with pytest.raises(ConfigError, match="must be text"):
        parse_settings("Demo", TABLE, {1: 2})


@pytest.mark.parametrize("extra", [[], "x", 1, True, [("namespace", "x")]])
def test_extra_must_be_a_mapping(extra: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_settings("Demo", TABLE, extra)


def test_all_problems_come_in_one_error() -> None:
    text = refused(shm_threshold_bytes=-1, put_timeout_s="x", nonsense=1)
    assert text.startswith("Demo: 3 problems in its settings:\n")
    for name in ("shm_threshold_bytes", "put_timeout_s", "nonsense"):
        assert f"\n  - {name}: " in text


def test_what_hosts_mix_in_is_accepted() -> None:
    extra = {
        "stage_id": 1,
        "role": "dual",
        "from_stage": 0,
        "to_stage": "1",
        "codec_chunk_frames": 25,
        "codec_left_context_frames": 25,
        "initial_codec_chunk_frames": 4,
        "connector_get_sleep_s": 0.01,
        "connector_get_max_wait": 300,
        "delivery_timeout_s": 1,
    }
    assert set(parse(**extra)) == set(TABLE)


def test_users_add_ignored_names_and_patterns() -> None:
    assert "mine_1" not in parse(mine_1=1, other=2, extra_ignored=["mine_*", "other"])
    assert parse(mine_1=1, extra_ignored="mine_*")
    assert "there is no such setting" in refused(mine=1, extra_ignored=["mine_*"])
    assert "extra_ignored" in refused(extra_ignored=5)
    assert "shm_threshold_bytes" in refused(shm_threshold_bytes=-1, extra_ignored=["*"])


def test_check_settings_returns_names_and_values() -> None:
    values, problems = check_settings(TABLE, {"retries": 0, "window": 5, "zz": 1})
    assert values["retries"] == 3
    assert values["window"] == 5
    assert [name for name, _ in problems] == ["retries", "zz"]


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(list(TABLE)), st.text(), st.integers()),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_any_settings_give_values_or_config_error(extra: dict[Any, Any]) -> None:
    try:
        values = parse_settings("Demo", TABLE, extra)
    except ConfigError:
        return
    assert set(values) == set(TABLE)
    for name, value in values.items():
        if extra.get(name) is not None and TABLE[name].kind in ("int", "bytes", "seconds", "microseconds"):
            assert math.isclose(value, float(extra[name]))


def test_describe_stays_short_and_survives_bad_reprs() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    deep: Any = []
    for _ in range(40):
        deep = [deep, deep]
    assert len(describe(deep)) < 200
    assert len(describe("x" * 10**6)) < 200
    assert describe(Bad()).endswith("(Bad)")
    assert describe(1) == "1 (int)"


def test_nearest() -> None:
    assert nearest("shmm", ["shm", "other"]) == "; did you mean 'shm'?"
    assert nearest("xyz", ["shm"]) == ""
    assert nearest(None, []) == ""


@pytest.mark.parametrize("value", ["a", "A-z_9", "x" * 40])
def test_namespaces(value: str) -> None:
    assert check_namespace(value) == value


@pytest.mark.parametrize("value", ["", "x" * 41, "a/b", "a.b", "é", "a b", "a\n", 5, None, b"a", "٣"])
def test_what_is_no_namespace(value: Any) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        check_namespace(value)


def test_namespace_comes_from_setting_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_FASTSHM_NAMESPACE", raising=False)
    assert resolve_namespace(None) == "default"
    with pytest.raises(ConfigError, match="with key_lookup the namespace must be given"):
        resolve_namespace(None, key_lookup=True)
    assert resolve_namespace("mine", key_lookup=True) == "mine"
    monkeypatch.setenv("OMNI_FASTSHM_NAMESPACE", "from-env")
    assert resolve_namespace(None, key_lookup=True) == "from-env"
    assert resolve_namespace("mine") == "mine"
    monkeypatch.setenv("OMNI_FASTSHM_NAMESPACE", "a/b")
    with pytest.raises(ConfigError):
        resolve_namespace(None)
    monkeypatch.setenv("OMNI_FASTSHM_NAMESPACE", "")
    assert resolve_namespace(None) == "default"


class Name(str, enum.Enum):
    THINKER = "thinker"


class Number(enum.IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("value", "name"),
    [("0", "0"), (0, "0"), (-1, "-1"), (np.int32(4), "4"), (Name.THINKER, "thinker"), (Number.FIRST, "1")],
)
def test_stages_are_text_or_whole_numbers(value: Any, name: str) -> None:
    result = stage_name(value)
    assert result == name
    assert type(result) is str
    assert request_name(value) == name


@pytest.mark.parametrize(
    "value", [None, True, 1.0, b"0", [], pytest.param(10**5000, id="huge"), pytest.param("\ud800", id="half")]
)
def test_what_is_no_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="from_stage"):
        stage_name(value, "from_stage")
    with pytest.raises(ConfigError, match="request_id"):
        request_name(value)


@pytest.mark.parametrize("value", ["", "a/b/../c", "é✓", "a\0b", "x y\nz", "x" * 5000])
def test_request_ids_are_any_text(value: str) -> None:
    assert request_name(value) == value


def test_edges() -> None:
    assert check_edge(0, "1") == ("0", "1")
    with pytest.raises(ConfigError, match="cannot send to itself"):
        check_edge(1, "1")
    with pytest.raises(ConfigError, match="must not be empty"):
        check_edge("", 1)
    with pytest.raises(ConfigError, match="to_stage"):
        check_edge(0, None)


@pytest.mark.parametrize("n", [1, 255, np.int64(3)])
def test_consumers(n: Any) -> None:
    assert check_consumers(n) == n
    assert type(check_consumers(n)) is int


@pytest.mark.parametrize("n", [0, 256, -1, 1.0, True, None, "1", math.nan])
def test_what_is_no_number_of_consumers(n: Any) -> None:
    with pytest.raises(ConfigError, match="consumers"):
        check_consumers(n)


@pytest.mark.parametrize(("t", "result"), [(None, None), (0, 0.0), (1.5, 1.5), (math.inf, None), (1e300, None)])
def test_timeouts(t: Any, result: float | None) -> None:
    assert check_timeout(t) == result


@pytest.mark.parametrize("t", [-1, -0.001, math.nan, True, "1", [], -math.inf])
def test_what_is_no_timeout(t: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        check_timeout(t)
