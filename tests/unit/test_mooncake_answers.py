"""R54 and its neighbours: every code of the store is looked at, and none becomes a lie."""

from __future__ import annotations

import linecache
import logging
import re
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np
import pytest
from support.fake_store import EXISTS, FULL, MISSING, RPC, TRANSFER, installed

from omni_fastshm.connectors.mooncake import MooncakeConnector
from omni_fastshm.errors import ConfigError, ConnectorClosed, MetadataError

DATA = {"x": np.arange(20_000)}
BY_KEY = {"key_lookup": True, "namespace": "n"}


@pytest.fixture
def fake() -> Iterator[Any]:
    with installed() as (store, settings):
        yield store, settings
        assert store.crimes == [], "a call to a store that is not open: the real one ends the process"


@pytest.fixture
def c(fake: Any) -> Iterator[MooncakeConnector]:
    with MooncakeConnector(fake[1]) as connector:
        yield connector


def arrived(connector: Any, metadata: Any, data: Any = DATA) -> bool:
    got = connector.get("0", "1", "r", metadata)
    return got is not None and bool(np.array_equal(got[0]["x"], data["x"]))


class Interrupted(BaseException):
    pass


def interrupted_before_line(number: int, call: Any, *arguments: Any, **options: Any) -> bool:
    """Call, and raise before this line of what sends and keeps the books; False where it has fewer.

    What ends a put is spared: no code can be interrupted while it tidies up after an interruption, and still have
    tidied up; and what comes just before the answer is returned is as if it came just after."""
    left = number

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in ("_end", "leave") or not file.endswith(("_mooncake_send.py", "_mooncake_ledger.py")):
            return None
        spared = (
            r"finally|if answer == OK and len|under_way\.pop|else:|self\._end\(|ledger\.leave\(|return item, answer"
        )
        if event == "line" and not re.search(spared, linecache.getline(file, frame.f_lineno)):
            left -= 1
            if left < 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments, **options)
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


class TestPut:
    def test_the_same_request_again_is_never_answered_with_old_data(self, c: Any) -> None:
        other = {"x": np.arange(20_000) * 2}
        first, second = c.put("0", "1", "r", DATA)[2], c.put("0", "1", "r", other)[2]
        assert arrived(c, second, other)
        assert arrived(c, first)

    def test_by_key_too_though_the_store_keeps_what_exists(self, fake: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            other = {"x": np.arange(20_000) * 2}
            assert c.put("0", "1", "r", DATA)[0]
            assert c.put("0", "1", "r", other)[0]
            assert arrived(c, None, other)
            assert c.get("0", "1", "r") is None
            assert c.health()["live_blocks"] == 0
        assert fake[0].objects == {}

    def test_a_pointer_that_another_producer_writes_in_between_is_noticed(self, fake: Any) -> None:
        """The store answers with success, and keeps the other's."""
        with MooncakeConnector({**fake[1], **BY_KEY}) as other, MooncakeConnector({**fake[1], **BY_KEY}) as c:
            assert other.put("0", "1", "r", {"x": DATA["x"] + 1})[0]
            ((key, record),) = [(key, record) for key, record in fake[0].objects.items() if "/k/" in key]
            fake[0].answers["put"].extend([None, lambda: fake[0].objects.__setitem__(key, record)])
            assert c.put("0", "1", "r", DATA)[0]
            assert arrived(c, None)
            assert fake[0].objects == {}

    def test_a_key_that_is_said_to_exist_is_an_end_with_an_error(self, c: Any, fake: Any) -> None:
        fake[0].answers["put"].extend([EXISTS] * 50)
        assert c.put("0", "1", "r", DATA) == (False, 0, None)
        assert fake[0].calls.count("put") == 3
        health = c.health()
        assert (health["errors"], health["refused"], health["puts"]) == (1, 1, 0)
        assert fake[0].objects == {}

    def test_full_twice_and_then_room_stores_once(self, c: Any, fake: Any) -> None:
        fake[0].answers["put"].extend([FULL, FULL])
        ok, _, metadata = c.put("0", "1", "r", DATA)
        assert ok
        assert len(fake[0].objects) == 1
        assert arrived(c, metadata)
        assert c.health()["blocked_s"] > 0
        assert c.health()["errors"] == 0

    def test_full_for_ever_ends_with_the_timeout(self, c: Any, fake: Any, caplog: pytest.LogCaptureFixture) -> None:
        fake[0].answers["put"].extend([FULL] * 10_000)
        start = time.monotonic()
        assert c.put("0", "1", "request-5", DATA) == (False, 0, None)
        assert 0.3 <= time.monotonic() - start < 10, "of the answers there are enough for 100 s"
        (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert "request-5" in line
        assert "160" in line
        assert "`segment`" in line
        health = c.health()
        assert (health["refused"], health["errors"], health["used_bytes"]) == (1, 0, 0)
        assert health["no_room"] == {"full": 1}

    @pytest.mark.parametrize("code", [-600, -1, -10, -12345])
    def test_any_other_code_is_a_refusal_at_once(self, code: int, c: Any, fake: Any, caplog: Any) -> None:
        fake[0].answers["put"].append(code)
        assert c.put("0", "1", "r", DATA) == (False, 0, None)
        assert f"({code})" in caplog.text
        assert c.health()["errors"] == 1
        assert c.health()["no_room"] == {"store": 1}
        assert arrived(c, c.put("0", "1", "r", DATA)[2])

    def test_a_failed_transfer_is_tried_again_under_another_key(self, c: Any, fake: Any) -> None:
        fake[0].answers["put"].append(TRANSFER)
        ok, _, metadata = c.put("0", "1", "r", DATA)
        assert ok
        first, second = fake[0].tried
        assert first != second, "the store may answer a second put on a key that is stuck with success"
        assert arrived(c, metadata)

    def test_takes_are_cancelled_before_the_payload_goes(self, fake: Any) -> None:
        """Who reads a payload while it is removed may read a mixture, and must find no take left to claim."""
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            assert c.put("0", "1", "r", DATA, consumers=3)[0]
            (old,) = [key for key in fake[0].objects if "/p/" in key]
            left: list[tuple[bool, int]] = []

            def look() -> None:
                left.append((old in fake[0].objects, sum("/t/" in key for key in fake[0].objects)))

            fake[0].answers["remove"].extend([look] * 4)  # the record, both tokens, the payload
            assert c.put("0", "1", "r", DATA)[0]
        assert left == [(True, 2), (True, 2), (True, 1), (True, 0)]

    def test_a_put_whose_answer_was_lost_leaves_nothing(self, c: Any, fake: Any) -> None:
        fake[0].answers["put"].append("late")  # it was stored, but the answer says that the master is gone
        assert c.put("0", "1", "r", DATA) == (False, 0, None)
        assert len(fake[0].objects) == 1
        assert c.health()["no_room"] == {"master_lost": 1}
        assert fake[0].objects == {}

    @pytest.mark.parametrize("lost", [1, 2], ids=["before", "after"])
    def test_a_master_that_is_lost_around_the_pointer_is_an_answer(self, lost: int, fake: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            fake[0].answers["get_into"].extend([None, RPC][-lost:])
            fake[0].answers["remove"].append(RPC)
            assert c.put("0", "1", "r", DATA) == (False, 0, None)
            assert c.health()["status"] == "ok"
            assert not [key for key in fake[0].objects if "/p/" in key], "a payload that was refused stays"

    def test_a_look_at_earlier_payloads_that_fails_is_not_the_put_s_failure(self, fake: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            for n in range(63):
                c.put("0", "1", n, DATA)
            fake[0].objects.clear()
            fake[0].answers["get_into"].extend([None, None, RPC])
            ok, _, metadata = c.put("0", "1", "r", DATA)
            assert ok
            assert arrived(c, metadata)
            assert c.health()["live_blocks"] == 0

    def test_small_payloads_go_by_the_shorter_call(self, c: Any, fake: Any) -> None:
        metadata = c.put("0", "1", "r", {"x": np.arange(20)})[2]
        assert arrived(c, metadata, {"x": np.arange(20)})
        assert [len(parts) for parts in fake[0].addresses] == [1]

    def test_what_another_producer_replaced_unseen_goes_with_the_next_look(self, fake: Any) -> None:
        """Each of two that put one key at the same moment found the key free."""
        with MooncakeConnector({**fake[1], **BY_KEY}) as one, MooncakeConnector({**fake[1], **BY_KEY}) as other:
            assert one.put("0", "1", "r", DATA)[0]
            fake[0].answers["get_into"].append(MISSING)
            del fake[0].objects[next(key for key in fake[0].objects if "/k/" in key)]
            assert other.put("0", "1", "r", {"x": np.arange(5_000)})[0]
            assert one.health()["live_blocks"] == 0
            assert len(fake[0].objects) == 2, "one payload, and its pointer"
            assert arrived(one, None, {"x": np.arange(5_000)})

    def test_a_pointer_that_was_lost_is_written_again(self, fake: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            assert c.put("0", "1", "r", DATA)[0]
            del fake[0].objects[next(key for key in fake[0].objects if "/k/" in key)]
            assert c.get("0", "1", "r") is None
            assert c.health()["live_blocks"] == 1
            assert arrived(c, None)
            c.health()
            assert fake[0].objects == {}

    def test_connectors_of_one_client_do_not_overfill_its_segment(self, fake: Any) -> None:
        """The store would put what does not fit into the memory of other nodes, without a word."""
        settings = {**fake[1], "segment": "16MiB"}
        large = {"x": np.zeros(9 << 20, np.uint8)}
        with MooncakeConnector(settings) as one, MooncakeConnector(settings) as other:
            metadata = one.put("0", "1", "r", large)[2]
            assert other.put("0", "1", "s", large) == (False, 0, None)
            assert arrived(one, metadata, large)
            assert other.put("0", "1", "s", large)[0]
            fake[0].objects.clear()  # another process took it, and `other` has nothing to do
            assert one.put("0", "1", "r", large)[0]
            one.close()
            assert other.put("0", "1", "s", large)[0]

    @pytest.mark.parametrize("answers", [[], [FULL], [TRANSFER]], ids=["at-once", "full-first", "failed-first"])
    def test_what_a_handler_raises_anywhere_leaves_nothing(self, answers: list[int], fake: Any) -> None:
        """Ctrl-C before any line of a put: no room stays reserved, no place in a line, nothing in the store."""
        with MooncakeConnector({**fake[1], **BY_KEY, "max_bytes": 1 << 20}) as c:
            lines = 0
            while interrupted_before_line(lines, c.put, "0", "1", "r", DATA, consumers=2):
                fake[0].answers["put"].clear()
                health = c.health()
                assert (health["used_bytes"], health["live_blocks"]) == (0, 0), lines
                assert (c._ledger.under_way, list(c._ledger._line)) == ({}, []), lines
                assert fake[0].objects == {}, lines
                lines += 1
                fake[0].answers["put"].extend(answers)
            assert lines > 40
            assert arrived(c, None)

    def test_what_was_evicted_leaves_no_tokens(self, fake: Any) -> None:
        with MooncakeConnector({**fake[1], "hard_pin": False}) as c:
            c.put("0", "1", "r", DATA, consumers=3)
            del fake[0].objects[next(key for key in fake[0].objects if "/p/" in key)]
            assert c.health()["live_blocks"] == 0
            assert fake[0].objects == {}

    def test_tokens_without_a_payload_are_taken_back(self, c: Any, fake: Any) -> None:
        fake[0].answers["put"].extend([None, -600])
        assert c.put("0", "1", "r", DATA, consumers=4) == (False, 0, None)
        assert fake[0].objects == {}

    def test_large_leaves_go_to_the_store_from_where_they_lie(self, c: Any, fake: Any) -> None:
        c.put("0", "1", "r", [DATA, np.arange(100)])
        (addresses,) = fake[0].addresses
        assert DATA["x"].ctypes.data in addresses

    @pytest.mark.parametrize("pinned", [True, False])
    def test_it_is_pinned_to_the_own_segment(self, pinned: bool, fake: Any) -> None:
        with MooncakeConnector({**fake[1], "hard_pin": pinned}) as c:
            c.put("0", "1", "r", DATA)
        (placement,) = {(p.preferred_segment, p.with_hard_pin) for p in fake[0].placements}
        assert placement == ("fake:1", pinned)


class TestGet:
    def test_missing_is_none_and_no_error(self, c: Any, fake: Any) -> None:
        metadata = c.put("0", "1", "r", DATA)[2]
        fake[0].objects.clear()
        assert c.get("0", "1", "r", metadata) is None
        health = c.health()
        assert (health["errors"], health["misses"], health["producer_gone"]) == (0, 1, 0)

    @pytest.mark.parametrize(
        ("code", "counter"), [(TRANSFER, "producer_gone"), (RPC, "master_lost"), (-707, None), (-1, None)]
    )
    def test_codes_of_a_read_are_told_apart(
        self, code: int, counter: str | None, c: Any, fake: Any, caplog: Any
    ) -> None:
        metadata = c.put("0", "1", "r", DATA)[2]
        fake[0].answers["get_buffer"].append(-1)
        fake[0].answers["get_into"].append(code)
        assert c.get("0", "1", "r", metadata) is None
        assert f"({code})" in caplog.text
        health = c.health()
        assert health["errors"] == 1
        assert [health[n] for n in ("producer_gone", "master_lost")] == [
            int(counter == n) for n in ("producer_gone", "master_lost")
        ]
        assert arrived(c, metadata), "it can be got again"

    def test_a_full_local_buffer_means_own_memory(self, c: Any, fake: Any) -> None:
        metadata = c.put("0", "1", "r", DATA)[2]
        fake[0].answers["get_buffer"].append(-1)
        assert arrived(c, metadata)
        assert c.health()["own_memory_reads"] == 1

    @pytest.mark.parametrize(("code", "counter"), [(RPC, "master_lost"), (TRANSFER, "producer_gone")])
    def test_polling_in_vain_does_not_fill_the_log(self, code: int, counter: str, fake: Any, caplog: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            fake[0].answers["get_into"].extend([code] * 50)
            for number in range(50):
                assert c.get("0", "1", f"r{number}") is None
            assert [record.levelname for record in caplog.records].count("WARNING") == 1
            assert c.health()[counter] == 50

    @pytest.mark.parametrize("there", [True, False])
    def test_a_process_that_stood_still_takes_nobody_for_gone(
        self, there: bool, c: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It does so for 2 s while another connector closes its client, or where there are too few cores."""
        metadata, late = c.put("0", "1", "r", DATA)[2], []
        clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(late))
        monkeypatch.setattr("omni_fastshm.connectors._mooncake_receive.time", clock)

        def local_buffer_full() -> int:
            late.append(2.0)
            return -1

        fake[0].answers["get_buffer"].append(local_buffer_full)
        if not there:
            fake[0].objects.clear()
        assert arrived(c, metadata) == there
        assert (c.health()["errors"], c.health()["producer_gone"]) == (0, 0)

    def test_who_was_waited_for_as_long_as_the_store_does_is_not_asked_again(
        self, c: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metadata, late = c.put("0", "1", "r", DATA)[2], []
        clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(late))
        monkeypatch.setattr("omni_fastshm.connectors._mooncake_receive.time", clock)
        fake[0].answers["get_buffer"].append(lambda: late.append(3.0) or -1)
        assert not arrived(c, metadata)
        assert c.health()["producer_gone"] == 1
        assert "get_into" not in fake[0].calls

    @pytest.mark.parametrize("code", [MISSING, RPC], ids=["removed", "master-lost"])
    @pytest.mark.parametrize("at", [8, 24], ids=["size", "header"])
    def test_what_was_removed_while_it_was_read_is_not_broken(self, at: int, code: int, c: Any, fake: Any) -> None:
        """Its bytes are a mixture with those of the next payload; a master that restarts removes everything."""
        metadata = c.put("0", "1", "r", DATA)[2]
        ((key, whole),) = fake[0].objects.items()
        fake[0].objects[key] = whole[:at] + b"\xff" * (4096 - at) + whole[4096:]
        for call in ("get_size", "remove"):
            fake[0].answers[call].append(code)
        assert c.get("0", "1", "r", metadata) is None
        health = c.health()
        assert health["errors"] == health["master_lost"] == (code == RPC)

    def test_tokens_that_cannot_be_asked_for_do_not_use_up_the_payload(self, c: Any, fake: Any) -> None:
        metadata = c.put("0", "1", "r", DATA, consumers=2)[2]
        fake[0].answers["exist"].append(RPC)
        assert c.get("0", "1", "r", metadata) is None
        assert c.health()["master_lost"] == 1
        assert arrived(c, metadata)
        assert arrived(c, metadata)

    def test_what_was_claimed_is_delivered_whatever_becomes_of_the_pointer(self, fake: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            metadata = c.put("0", "1", "r", DATA)[2]
            fake[0].answers["get_into"].append(RPC)
            assert arrived(c, metadata)

    @pytest.mark.parametrize(
        "name", ["namespace", "from_stage", "to_stage", "request_id", "nonce", "size", "consumers"]
    )
    @pytest.mark.parametrize("value", [None, -1, 1.0, "", [], {}, b"x", np.arange(3), float("nan")], ids=repr)
    def test_damaged_metadata_is_an_error(self, name: str, value: Any, c: Any) -> None:
        metadata = c.put("0", "1", "r", DATA)[2]
        with pytest.raises(MetadataError):
            c.get("0", "1", "r", {**metadata, "mooncake": {**metadata["mooncake"], name: value}})
        assert arrived(c, metadata)

    @pytest.mark.parametrize("code", [MISSING, RPC])
    def test_what_could_not_be_claimed_is_not_delivered(self, code: int, c: Any, fake: Any) -> None:
        metadata = c.put("0", "1", "r", DATA)[2]
        fake[0].answers["remove"].append(code)
        assert c.get("0", "1", "r", metadata) is None
        assert c.health()["leases"] == 0

    def test_an_object_of_another_size_is_an_error_and_stays(self, c: Any, fake: Any) -> None:
        metadata = c.put("0", "1", "r", DATA)[2]
        (key,) = fake[0].objects
        whole = fake[0].objects[key]
        for content in (whole[:-64], whole + bytes(64), b"", bytes(len(whole))):
            fake[0].objects[key] = content
            with pytest.raises(MetadataError):
                c.get("0", "1", "r", metadata)
        fake[0].objects[key] = whole
        assert arrived(c, metadata)

    def test_a_damaged_pointer_is_as_none(self, fake: Any) -> None:
        with MooncakeConnector({**fake[1], **BY_KEY}) as c:
            c.put("0", "1", "r", DATA)
            (pointer,) = [key for key in fake[0].objects if "/k/" in key]
            right = fake[0].objects[pointer]
            for at in range(len(right)):
                fake[0].objects[pointer] = right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :]
                answer = c.get("0", "1", "r")
                assert answer is None or at > 40, at
                if answer is not None:
                    break
            fake[0].objects[pointer] = right


class TestOpenAndClose:
    def test_a_refused_set_up_is_a_clear_error(self, fake: Any) -> None:
        fake[0].answers["setup"].append(-1)
        with pytest.raises(ConfigError, match=r"refused the set-up with INTERNAL_ERROR \(-1\)") as caught:
            MooncakeConnector(fake[1])
        assert fake[1]["master"] in str(caught.value)
        MooncakeConnector(fake[1]).close()

    def test_the_store_is_shared_and_closed_with_the_last(self, fake: Any) -> None:
        first, second = MooncakeConnector(fake[1]), MooncakeConnector(fake[1])
        other = MooncakeConnector({**fake[1], "localbuf": "1MB"})
        assert len(fake[0].made) == 2
        first.close()
        first.close()
        assert fake[0].calls.count("close") == 0
        assert second.put("0", "1", "r", DATA)[0]
        second.close()
        assert fake[0].calls.count("close") == 1
        other.close()
        assert fake[0].calls.count("close") == 2

    def test_a_close_in_the_middle_of_a_put_leaves_nothing(self, fake: Any) -> None:
        """As by a signal handler; another connector keeps the client open."""
        with MooncakeConnector(fake[1]):
            c = MooncakeConnector({**fake[1], **BY_KEY})
            fake[0].answers["get_into"].append(c.close)
            with pytest.raises(ConnectorClosed):
                c.put("0", "1", "r", DATA)
            assert fake[0].objects == {}

    def test_close_while_a_call_is_in_the_store_waits_for_it(self, fake: Any, run_thread: Any) -> None:
        inside, leave = threading.Event(), threading.Event()

        def block() -> None:
            inside.set()
            assert leave.wait(20)

        c = MooncakeConnector(fake[1])
        metadata = c.put("0", "1", "r", DATA)[2]
        fake[0].answers["get_buffer"].append(block)
        getting = run_thread(c.get, "0", "1", "r", metadata)
        assert inside.wait(20)
        closing = run_thread(c.close)
        with pytest.raises(NotYet):
            closing.result(0.3)
        assert "close" not in fake[0].calls
        leave.set()
        closing.result(20)
        assert isinstance(getting.exception(20), ConnectorClosed)
        assert fake[0].calls.count("close") == 1

    @pytest.mark.time_limit(50)
    def test_a_call_that_does_not_come_back_does_not_hold_close(
        self, fake: Any, run_thread: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R56: the backend's call hangs; `close` returns, and the store is closed behind the call."""
        monkeypatch.setattr("omni_fastshm.connectors._mooncake_session._CLOSE_WAIT_S", 0.2)
        inside, leave = threading.Event(), threading.Event()

        def block() -> None:
            inside.set()
            assert leave.wait(20)

        c = MooncakeConnector(fake[1])
        fake[0].answers["get_buffer"].append(block)
        getting = run_thread(c.get, "0", "1", "r", c.put("0", "1", "r", DATA)[2])
        assert inside.wait(20)
        run_thread(c.close).result(15)
        assert "close" not in fake[0].calls
        with pytest.raises(ConnectorClosed):
            c.put("0", "1", "r", DATA)
        leave.set()
        assert isinstance(getting.exception(20), ConnectorClosed)
        assert fake[0].calls.count("close") == 1

    def test_many_threads_and_a_close(self, fake: Any, run_thread: Any) -> None:
        def work(c: Any) -> str:
            try:
                for n in range(1_000_000):
                    _, _, metadata = c.put("0", "1", "r", DATA)
                    c.get("0", "1", "r", metadata)
                    if n % 7 == 0:
                        c.cleanup("r")
            except ConnectorClosed:
                return "closed"
            return "never"

        for _ in range(15):
            c = MooncakeConnector(fake[1])
            working = [run_thread(work, c) for _ in range(4)]
            with pytest.raises(NotYet):
                working[0].result(0.02)
            c.close()
            assert [each.result(10) for each in working] == ["closed"] * 4
            assert fake[0].crimes == []
        assert fake[0].objects == {}, "a put that was on its way left its payload behind"
