"""The contract that vllm-omni has had since 0.30, with what 0.32 adds: the key alone leads to the data."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from omni_fastshm import ConfigError, segments
from omni_fastshm.integrations.vllm_omni import connector_class

Make = Callable[..., Any]
PAYLOAD = {"meta": {"finished": torch.tensor(False)}, "embed": torch.ones(1, 8)}


@pytest.fixture
def pair(make: Make) -> tuple[Any, Any]:
    return make(stage_id=0), make(stage_id=1)


# ---- construction


def test_an_empty_config_will_do(make: Make) -> None:
    connector = make()
    assert connector.stage_id == -1
    assert connector.supports_raw_data is False
    assert connector.health()["status"] == "healthy"


def test_config_is_the_very_dict(host: Any) -> None:
    config: dict[str, Any] = {"stage_id": 2, "extra": {"codec_chunk_frames": 25}}
    with connector_class("FastSharedMemoryConnector", keyed=True, host=host)(config) as connector:
        assert connector.config is config
        assert connector.stage_id == 2
        assert connector.config.get("extra", connector.config) is config["extra"]
    assert config == {"stage_id": 2, "extra": {"codec_chunk_frames": 25}}


def test_settings_of_the_host_are_accepted_and_ours_are_used(
    make: Make, namespace: str, errors: Callable[[], list[str]]
) -> None:
    connector = make(
        stage_id=1, role="dual", from_stage="0", to_stage="1", codec_chunk_frames=25, shm_threshold_bytes=65536,
        connector_get_sleep_s=0.1, zmq_port="$PORT", anything={"else": 1}, segment_bytes=1 << 20,
        extra={"max_bytes": 1 << 21, "wakeup_scope": "x"},
    )  # fmt: skip
    assert connector.put("1", "2", "k", b"x" * (1 << 19))[0]
    assert connector.health()["capacity_bytes"] <= 1 << 20
    assert connector.health()["namespace"] == namespace
    assert errors() == [], "nothing is said of what only the host knows"
    assert connector.put("1", "2", "k2", b"x" * (3 << 20)) == (False, 0, None)


def test_a_setting_that_is_misspelt_is_said(make: Make, errors: Callable[[], list[str]]) -> None:
    """The host passes what it does not know, so it is no error; but what was meant is not used."""
    connector = make(unread_ttl=5, extra={"segmnt_bytes": 1 << 20, "Put_Timeout_s": 1, "segment_bytes": 1 << 20})
    meant = [("unread_ttl", "unread_ttl_s"), ("segmnt_bytes", "segment_bytes"), ("Put_Timeout_s", "put_timeout_s")]
    name = type(connector).__name__
    said = [f"{name}: there is no setting {one!r}; did you mean {other!r}? It is passed over" for one, other in meant]
    assert errors() == said


def test_the_namespace_is_fixed_where_none_is_given(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given = make(namespace="mine")
    assert given.health()["namespace"] == "mine"
    monkeypatch.delenv("OMNI_FASTSHM_NAMESPACE")
    fixed = make()
    assert fixed.health()["namespace"] == "vllm-omni"
    for connector in (given, fixed):
        connector.close()


def test_a_setting_of_ours_that_is_wrong_is_said(make: Make) -> None:
    with pytest.raises(ConfigError, match="segment_bytes"):
        make(segment_bytes="many")


# ---- calling forms: parameter names are part of the contract


def test_every_form_of_call(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    ok, size, metadata = sender.put(from_stage="0", to_stage="1", put_key="a_0_0", data=PAYLOAD)
    assert ok is True
    assert type(receiver.get("0", "1", "a_0_0", {"source_host": "h", "source_port": 1})) is tuple
    sender.put("0", "1", "a_0_1", PAYLOAD)
    assert receiver.get(from_stage="0", to_stage="1", get_key="a_0_1", metadata=None)[1] == size
    sender.put("0", "1", "a_0_2", PAYLOAD)
    assert receiver.get("0", "1", "a_0_2")[1] == size
    sender.put("0", "1", "a_0_3", PAYLOAD)
    assert receiver.get("0", "1", "a_0_3", metadata=metadata) is None  # it names another key, as in the peer
    assert receiver.get_with_deadline("0", "1", "a_0_3", None, deadline=time.monotonic() + 5)[1] == size
    receiver.abandon_get("a_0_3")
    assert receiver.reap_consumed() is None
    assert receiver._make_key("k", "0", "1") == "k@0_1"


def test_metadata_is_small_plain_and_needed_by_nobody(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    data = {"t": torch.ones(100_000)}
    for form in (
        lambda key, m: m,
        lambda key, m: {key: m},
        lambda key, m: pickle.loads(pickle.dumps(m)),
        lambda key, m: msgspec.msgpack.decode(msgspec.msgpack.encode(m)),
        lambda key, m: json.loads(json.dumps(m)),
        lambda key, m: None,
        lambda key, m: {},
        lambda key, m: {"other": 1},
        lambda key, m: {"shm": 1},
        lambda key, m: {"shm": {"size": 3}},
        lambda key, m: "text",
        lambda key, m: 5,
        lambda key, m: [m],
    ):
        ok, size, metadata = sender.put("0", "1", "k", data)
        assert ok
        assert set(metadata) == {"shm", "size"}
        assert metadata["size"] == metadata["shm"]["size"] == size
        assert "inline_bytes" not in metadata
        assert len(pickle.dumps(metadata)) < 4096
        assert receiver.get("0", "1", "k", form("k", metadata))[1] == size


def test_the_stages_are_no_part_of_the_key(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    for edge in (("0", "1"), ("s0", "s0"), (0, 1), ("", None)):
        assert sender.put(*edge, "k", 1)[0]
        assert receiver.get("7", "8", "k")[0] == 1


@pytest.mark.parametrize(
    "key",
    ["a/b/../c", "x" * 5000, "ключ-鍵", "", ".", "a b\n\0", "\ud800", "chatcmpl-1_0_1", "chatcmpl-1_0_10"],
    ids=lambda key: ascii(key)[:20],
)
def test_any_text_is_a_key(pair: tuple[Any, Any], key: str) -> None:
    sender, receiver = pair
    ok, _, metadata = sender.put("0", "1", key, PAYLOAD)
    assert ok
    assert len(pickle.dumps(metadata)) < 4096
    assert receiver.get("0", "1", key + "x") is None
    assert receiver.get("0", "1", key, metadata) is not None
    assert sender.put("0", "1", key, PAYLOAD)[0]
    assert receiver.cleanup(key) is True
    assert receiver.get("0", "1", key) is None


# ---- delivery


def test_once_and_again(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    assert receiver.get("0", "1", "k") is None
    for number in range(3):
        sender.put("0", "1", "k", number)
        assert receiver.get("0", "1", "k")[0] == number
        assert receiver.get("0", "1", "k") is None


def test_the_last_put_wins_whoever_put_it(make: Make) -> None:
    one, other, receiver = make(), make(), make()
    for small, large in ((1, b"x" * 100_000), (b"x" * 100_000, 2)):
        one.put("0", "1", "k", small)
        other.put("0", "1", "k", large)
        assert receiver.get("0", "1", "k")[0] == large
        assert receiver.get("0", "1", "k") is None
    other.put("0", "1", "k", 1)
    one.put("0", "1", "k", 2)
    other.close()  # upstream's would unlink the newer one, of another producer
    assert receiver.get("0", "1", "k")[0] == 2


def test_hundreds_of_chunks_unread_in_any_order(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    keys = [f"r{request}_0_{chunk}" for request in range(8) for chunk in range(100)]
    for key in keys:
        assert sender.put("0", "1", key, {"k": key, "t": torch.ones(64)})[0]
    for key in sorted(keys, key=lambda key: hash(key)):
        assert receiver.get("0", "1", key)[0]["k"] == key
    assert sender.health()["live_blocks"] <= len(keys)
    sender.reap_consumed(max_keys=1000)
    assert len(sender._sent) == 0


def test_more_than_the_usual_segment_stays_unread(make: Make) -> None:
    sender, receiver = make(segment_bytes=1 << 20), make()
    large = torch.ones(1 << 20)
    for number in range(6):  # each larger than the usual segment
        assert sender.put("0", "1", f"k{number}", {"n": number, "t": large})[0]
    for number in (5, 0, 3, 1, 4, 2):
        got = receiver.get("0", "1", f"k{number}")[0]
        assert (got["n"], bool((got["t"] == 1).all())) == (number, True)


def test_what_is_unread_is_bounded_by_the_mount_alone(make: Make) -> None:
    assert make()._last._connector.config["max_bytes"] == segments.mount_size()


def test_one_reader_gets_it(make: Make, run_thread: Callable[..., Any]) -> None:
    sender, readers = make(), [make() for _ in range(3)]
    keys = [f"k_{n}" for n in range(300)]
    seen: list[str] = []
    start = threading.Barrier(4)

    def read(reader: Any) -> None:
        start.wait(10)
        for key in keys:
            for _ in range(20):
                found = reader.get("0", "1", key)
                if found is not None:
                    seen.append(found[0])
                    break

    futures = [run_thread(read, reader) for reader in readers]
    start.wait(10)
    for key in keys:
        sender.put("0", "1", key, key)
    for future in futures:
        future.result(100)
    rest = [found[0] for key in keys if (found := readers[0].get("0", "1", key)) is not None]
    assert sorted([*seen, *rest]) == sorted(keys)


def test_the_source_may_be_overwritten(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    buffer, tokens = torch.ones(50_000), [1, 2, 3]
    sender.put("0", "1", "k", {"t": buffer, "small": buffer[:4], "ids": tokens})
    buffer.zero_()
    tokens.append(4)
    got = receiver.get("0", "1", "k")[0]
    assert (float(got["t"].sum()), float(got["small"].sum()), got["ids"]) == (50_000, 4, [1, 2, 3])


def test_kv_cache_as_bytes_comes_as_bytes(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    data = bytes(range(256)) * 40_000
    assert sender.put(from_stage="0", to_stage="1", put_key="omni_0_to_1_kv_cache_r", data=data)[0]
    found = receiver.get(from_stage="0", to_stage="1", get_key="omni_0_to_1_kv_cache_r", metadata=None)
    assert type(found[0]) is bytes
    assert found[0] == data


# ---- clean-up


def test_clean_up_is_exact(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    for chunk in range(12):
        sender.put("0", "1", f"r_0_{chunk}", chunk)
    sender.put("0", "1", "xr_0_1", "other")
    assert sender.cleanup("r_0_1") is True
    assert sender.cleanup("r_0_1") is False
    assert sender.cleanup("r_0") is False
    assert [c for c in range(12) if receiver.get("0", "1", f"r_0_{c}") is None] == [1]
    assert receiver.get("0", "1", "xr_0_1")[0] == "other"


def test_clean_up_by_prefix_takes_numbers_only(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    keys = ["r_0_0", "r_0_10", "r_0_7", "r_0_", "r_0_x", "r_0_1_2", "r_1_0", "r_0_²", "R_0_1"]
    for key in keys:
        sender.put("0", "1", key, key)
    receiver.get("0", "1", "r_0_7")
    assert sender.cleanup_prefix("r_0_") == 2
    assert [key for key in keys if receiver.get("0", "1", key) is not None] == keys[3:]
    assert sender.cleanup_prefix("r_0_") == 0


def test_keys_that_were_read_are_forgotten_without_being_asked(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    for number in range(5000):
        sender.put("0", "1", f"k_{number}", number)
        assert receiver.get("0", "1", f"k_{number}") is not None
    assert len(sender._sent) <= 1100
    for _ in range(100):
        sender.reap_consumed()
    assert len(sender._sent) == 0


def test_a_connector_goes_with_its_last_reference(host: Any, shm_names: Callable[[], list[str]]) -> None:
    connector = connector_class("FastSharedMemoryConnector", keyed=True, host=host)({})
    connector.put("0", "1", "k", PAYLOAD)
    assert shm_names()
    del connector
    assert not shm_names()


def test_an_error_while_polling_is_not_said_thousands_of_times(
    make: Make, errors: Callable[[], list[str]], shm_names: Callable[[], list[str]]
) -> None:
    receiver = make()
    (directory,) = shm_names()
    path = Path("/dev/shm") / directory
    path.unlink()
    path.mkdir()  # what cannot be opened stands where its directory was
    try:
        deadline = time.monotonic() + 20
        while not errors() and time.monotonic() < deadline:
            assert receiver.get("0", "1", "k") is None
        for _ in range(1000):
            assert receiver.get("0", "1", "k") is None
        assert len(errors()) == 1
    finally:
        path.rmdir()


# ---- waiting


def test_a_deadline_that_has_passed_does_not_look(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    sender.put("0", "1", "k", 1)
    assert receiver.get_with_deadline("0", "1", "k", deadline=time.monotonic() - 1) is None
    assert receiver.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 5)[0] == 1
    start = time.monotonic()
    assert receiver.get_with_deadline("0", "1", "k", deadline=start + 0.05) is None
    assert 0.04 < time.monotonic() - start < 5


def test_a_get_with_deadline_wakes_up(pair: tuple[Any, Any], run_thread: Callable[..., Any]) -> None:
    sender, receiver = pair
    future = run_thread(receiver.get_with_deadline, "0", "1", "k", None, deadline=time.monotonic() + 30)
    for number in range(100):
        sender.put("0", "1", f"other_{number}", number)
    sender.put("0", "1", "k", "here")
    assert future.result(30)[0] == "here"


def test_an_arrival_changes_the_generation(pair: tuple[Any, Any], run_thread: Callable[..., Any]) -> None:
    sender, receiver = pair
    before = receiver.get_wakeup_generation()
    assert type(before) is int
    assert receiver.wait_for_change(before, timeout=0.02) is False
    future = run_thread(receiver.wait_for_change, before, timeout=30)
    sender.put("0", "1", "k", 1)
    assert future.result(30) is True
    assert receiver.wait_for_change(before, timeout=30) is True
    after = receiver.get_wakeup_generation()
    assert after != before
    assert receiver.get_wakeup_generation() == after


def test_what_is_sent_to_other_stages_wakes_nobody(make: Make) -> None:
    sender, receiver, anybody = make(stage_id=0), make(stage_id=1), make()
    seen, all_seen = receiver.get_wakeup_generation(), anybody.get_wakeup_generation()
    sender.put("1", "2", "r_1_0", 1)
    assert receiver.wait_for_change(seen, timeout=0.02) is False
    assert anybody.wait_for_change(all_seen, timeout=0.02) is True
    sender.put(0, 1, "r_0_0", 1)
    assert receiver.wait_for_change(seen, timeout=20) is True


def test_no_arrival_is_slept_through(pair: tuple[Any, Any], run_thread: Callable[..., Any]) -> None:
    """Whoever reads the generation, looks, and then waits, misses nothing."""
    sender, receiver = pair
    count = 2000

    def read() -> int:
        for number in range(count):
            while True:
                seen = receiver.get_wakeup_generation()
                if receiver.get("0", "1", f"k_{number}") is not None:
                    break
                if not receiver.wait_for_change(seen, timeout=20):
                    return number
        return count

    future = run_thread(read)
    for number in range(count):
        sender.put("0", "1", f"k_{number}", number)
    assert future.result(150) == count


def test_wake_ups_can_be_switched_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SHM_WAKEUP", "0")
    assert make().get_wakeup_generation() is None


# ---- failures and the end


def test_a_put_that_fails_is_fast_and_says_so_once(make: Make, errors: Callable[[], list[str]]) -> None:
    sender, receiver = make(max_bytes=1 << 20, segment_bytes=1 << 20), make()
    assert sender.put("0", "1", "k", b"x" * 600_000)[0]
    start = time.monotonic()
    assert sender.put("0", "1", "k2", b"x" * 600_000) == (False, 0, None)
    assert time.monotonic() - start < 5
    assert sender.put("0", "1", "k3", {"a": [object()]}) == (False, 0, None)
    full, unknown = errors()
    assert "k2" in full
    assert "payload.a[0]: object cannot be carried" in unknown
    assert receiver.get("0", "1", "k")[0] == b"x" * 600_000
    assert sender.put("0", "1", "k2", b"x" * 600_000)[0]


def test_an_empty_look_is_not_logged(make: Make, errors: Callable[[], list[str]]) -> None:
    receiver = make()
    for _ in range(1000):
        assert receiver.get("0", "1", "nothing") is None
    assert not errors()


def test_health(pair: tuple[Any, Any]) -> None:
    sender, receiver = pair
    _, size, _ = sender.put("0", "1", "k", PAYLOAD)
    receiver.get("0", "1", "k")
    assert {name: sender.health()[name] for name in ("status", "puts", "gets", "bytes_transferred")} == {
        "status": "healthy",
        "puts": 1,
        "gets": 0,
        "bytes_transferred": size,
    }
    assert receiver.health()["gets"] == 1


def test_after_close_nothing_works_and_nothing_raises(make: Make, errors: Callable[[], list[str]]) -> None:
    sender, receiver = make(), make()
    sender.put("0", "1", "k", 1)
    generation = receiver.get_wakeup_generation()
    for connector in (sender, receiver):
        connector.close()
        connector.close()
        assert connector.put("0", "1", "k", 1) == (False, 0, None)
        assert connector.get("0", "1", "k") is None
        assert connector.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 20) is None
        connector.abandon_get("k")
        assert connector.cleanup("k") is False
        assert connector.cleanup_prefix("k") == 0
        connector.reap_consumed()
        assert connector.get_wakeup_generation() is None
        assert connector.wait_for_change(generation, timeout=20) is False
        assert connector.health()["status"] == "closed"
    assert not errors()


def test_close_while_others_are_inside(
    make: Make, run_thread: Callable[..., Any], errors: Callable[[], list[str]]
) -> None:
    for round_ in range(10):
        sender, receiver = make(), make()
        busy = [threading.Event(), threading.Event()]

        def save(sender: Any = sender, busy: Any = busy, round_: int = round_) -> bool:
            number = 0
            while sender.put("0", "1", f"k_{round_}_{number}", PAYLOAD)[0]:
                sender.reap_consumed()
                sender.cleanup(f"k_{round_}_{number - 1}")
                number += 1
                busy[0].set()
            return True

        def receive(receiver: Any = receiver, busy: Any = busy, round_: int = round_) -> bool:
            number = 0
            while (seen := receiver.get_wakeup_generation()) is not None:
                receiver.get("0", "1", f"k_{round_}_{number}")
                number += 1
                busy[1].set()
                receiver.wait_for_change(seen, timeout=0.01)
            return True

        futures = [run_thread(save), run_thread(receive)]
        assert all(event.wait(20) for event in busy)
        receiver.close()
        sender.close()
        assert all(future.result(20) for future in futures)
    assert not errors()


def test_a_waiting_get_ends_with_close(make: Make, run_thread: Callable[..., Any]) -> None:
    receiver = make()
    seen = receiver.get_wakeup_generation()
    waits = [
        run_thread(receiver.get_with_deadline, "0", "1", "k", deadline=time.monotonic() + 40),
        run_thread(receiver.wait_for_change, seen, timeout=40),
    ]
    start = time.monotonic()
    receiver.close()
    assert [future.result(20) for future in waits] in ([None, False], [None, True])
    assert time.monotonic() - start < 20


def test_a_half_built_object_goes_silently(make: Make, host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cls = connector_class("FastSharedMemoryConnector", keyed=True, host=host)
    cls.__new__(cls).close()
    cls.__new__(cls).__del__()
    for wrong in (None, {"segment_bytes": -1}):
        with pytest.raises((ConfigError, AttributeError, TypeError)):
            cls(wrong)
    assert "Exception ignored" not in capsys.readouterr().err
