"""``fallback: inline``: what finds no room in shared memory travels inside the metadata."""

from __future__ import annotations

import errno
import logging
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np
import pytest
from support import payloads
from support.child import Children

from omni_fastshm import janitor, segments
from omni_fastshm.connectors import shared_memory
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import CodecError, ConfigError, ConnectorClosed, SegmentError

MIB = 1 << 20
SMALL_MOUNT = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"', "sh")


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    small = {"segment_bytes": MIB, "max_bytes": 2 * MIB, "put_timeout_s": 0, "fallback": "inline"}
    return lambda **settings: connect(SharedMemoryConnector, **{**small, **settings})


def put(connector: Any, request: str, data: Any, **options: Any) -> tuple[int, Any]:
    ok, size, metadata = connector.put("a", "b", request, data, **options)
    assert ok
    return size, metadata


def fill(connector: Any) -> Any:
    """Two payloads that leave no room for another of half a megabyte; gives their metadata."""
    sent = {name: put(connector, name, np.full(900_000, ord(name), np.uint8))[1] for name in "xy"}
    assert all("shm" in each for each in sent.values())
    return sent


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class TestGoingInline:
    """The payload arrives, whatever kept it out of shared memory."""

    def test_a_full_ring(self, make: Any) -> None:
        connector, want = make(), payloads.tree(3)
        sent = fill(connector)
        want["more"] = np.arange(200_000)
        size, metadata = put(connector, "r", want)
        assert set(metadata) == {"inline_bytes", "size"}
        assert metadata["size"] == size == len(metadata["inline_bytes"])
        got = make().get("a", "b", "r", pickle.loads(pickle.dumps(metadata)))
        assert got[1] == size
        assert payloads.same(got[0], want)
        health = connector.health()
        assert (health["inline_fallbacks"], health["inline_writes"], health["shm_writes"]) == (1, 1, 2)
        assert (health["puts"], health["refused"], health["errors"]) == (3, 0, 0)
        assert health["used_bytes"] < 2 * MIB
        # What was in the ring is still there, and with room the ring is used again.
        for name, each in sent.items():
            assert (connector.get("a", "b", name, each)[0] == ord(name)).all()
        assert "shm" in put(connector, "again", np.arange(100_000))[1]

    def test_it_waits_for_room_first(self, make: Any, run_thread: Any) -> None:
        connector = make(put_timeout_s=20)
        sent = fill(connector)
        waiting = run_thread(put, connector, "r", np.arange(100_000))
        with pytest.raises(NotYet):
            waiting.result(0.3)
        assert connector.get("a", "b", "x", sent["x"]) is not None
        assert "shm" in waiting.result(10)[1]
        assert connector.health()["inline_fallbacks"] == 0

    def test_after_the_wait(self, make: Any) -> None:
        connector = make(put_timeout_s=0.2)
        fill(connector)
        assert "inline_bytes" in put(connector, "r", np.arange(100_000))[1]
        assert connector.health()["blocked_s"] >= 0.2

    def test_larger_than_the_ring(self, make: Any) -> None:
        connector, want = make(put_timeout_s=1000), np.arange(3 * MIB // 8)
        _, metadata = put(connector, "r", want)
        assert np.array_equal(connector.get("a", "b", "r", metadata)[0], want)
        assert connector.health()["inline_fallbacks"] == 1

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOSPC])
    def test_no_shared_memory_to_be_had(self, make: Any, number: int, monkeypatch: Any) -> None:
        def refuse(*args: Any, **options: Any) -> Any:
            raise SegmentError("not here", errno=number, op="make")

        connector = make()
        with monkeypatch.context() as patch:
            patch.setattr(segments, "make", refuse)
            _, metadata = put(connector, "r", payloads.big())
        assert payloads.same(connector.get("a", "b", "r", metadata)[0], payloads.big())
        assert "shm" in put(connector, "r", payloads.array(100_000))[1]

    def test_the_default_refuses(self, make: Any) -> None:
        for connector in (make(fallback="refuse"), make(fallback=None)):
            fill(connector)
            assert connector.put("a", "b", "r", np.arange(100_000)) == (False, 0, None)
            assert connector.health()["refused"] == 1
            assert connector.health()["inline_fallbacks"] == 0

    @pytest.mark.root
    def test_a_full_mount(self, children: Children) -> None:
        child = children.start(command=SMALL_MOUNT)
        answer = child.run(
            "import numpy as np, os\n"
            "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
            "filler = open('/dev/shm/filler', 'wb')\n"
            "free = os.statvfs('/dev/shm').f_bavail * 4096\n"
            "os.posix_fallocate(filler.fileno(), 0, free)\n"
            "import logging; logging.getLogger('omni_fastshm').setLevel(logging.ERROR)\n"
            "c = SharedMemoryConnector({'fallback': 'inline', 'put_timeout_s': 0, 'max_bytes': 4 << 20})\n"
            "def there_and_back(n):\n"
            "    ok, _, md = c.put('a', 'b', n, np.full(100_000, n))\n"
            "    return ok, 'shm' in md, bool((c.get('a', 'b', n, md)[0] == n).all())\n"
            "result = [there_and_back(0)]\n"
            "os.ftruncate(filler.fileno(), 0)\n"
            "result.append(there_and_back(1))\n"
            "held = c.put('a', 'b', 'held', np.ones(100_000))\n"
            "os.posix_fallocate(filler.fileno(), 0, os.statvfs('/dev/shm').f_bavail * 4096)\n"
            "result += [there_and_back(n) for n in range(2, 40)]\n"
            "kept = [c.put('a', 'b', f'kept{n}', np.ones(100_000))[2] for n in range(40)]\n"
            "fallbacks = c.health()['inline_fallbacks']\n"
            "c.close(); filler.close(); os.unlink('/dev/shm/filler')\n"
        )
        assert answer[0] == (True, False, True)
        assert answer[1] == (True, True, True)
        assert all(ok and same for ok, _, same in answer)
        kinds = child.run("result = ['shm' in each for each in kept]")
        assert False in kinds, "there was room for all of it"
        assert child.run("result = fallbacks") == 1 + kinds.count(False)
        assert child.run("result = os.listdir('/dev/shm')") == []


class TestMeaning:
    """What holds for inline payloads holds for these."""

    def test_not_with_key_lookup(self, make: Any, namespace: str) -> None:
        with pytest.raises(
            ConfigError, match=r"fallback: 'inline' cannot be combined with key_lookup.*cannot be found"
        ):
            SharedMemoryConnector({"fallback": "inline", "key_lookup": True, "namespace": namespace})
        make(fallback="refuse", key_lookup=True, namespace=namespace)

    @pytest.mark.parametrize("value", ["in-line", True, 1, ["inline"]])
    def test_other_values(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=r"fallback: .*is not one of: refuse, inline"):
            SharedMemoryConnector({"fallback": value})

    def test_several_takers_cannot_be_counted(self, make: Any) -> None:
        connector = make()
        fill(connector)
        _, metadata = put(connector, "r", np.arange(100_000), consumers=2)
        taken = [connector.get("a", "b", "r", metadata)[0] for _ in range(3)]
        taken[0][:] = 0
        assert (taken[1] == np.arange(100_000)).all()
        connector.cleanup("r")
        assert connector.get("a", "b", "r", metadata) is not None

    def test_loans_are_copied_in(self, make: Any) -> None:
        connector = make()
        loans = [connector.allocate(30_000, np.int64) for _ in range(2)]
        for n, loan in enumerate(loans):
            loan[:] = n
        used = connector.health()["used_bytes"]
        rest = np.arange(200_000)
        size, metadata = put(connector, "r", {"loans": loans, "rest": rest})  # the rest alone is too much
        assert size == metadata["size"] == len(metadata["inline_bytes"]) > 2 * 240_000
        got = connector.get("a", "b", "r", metadata)[0]
        assert [(int(each.min()), int(each.max())) for each in got["loans"]] == [(0, 0), (1, 1)]
        assert np.array_equal(got["rest"], rest)
        # The loans were not handed over: they are freed with the last reference here, and can be sent until then.
        assert connector.health()["used_bytes"] == used
        _, again = put(connector, "again", loans[0])
        assert "shm" in again
        assert int(connector.get("a", "b", "again", again)[0].max()) == 0
        del loans, loan
        assert connector.health()["used_bytes"] == 0

    def test_a_loan_still_needs_room(self, make: Any) -> None:
        connector = make()
        fill(connector)
        with pytest.raises(SegmentError, match="no room for a loan"):
            connector.allocate(100_000, np.int64)

    def test_without_waiting_for_the_answer(self, make: Any) -> None:
        connector = make()
        fill(connector)
        ok, _, metadata = connector.put("a", "b", "r", np.arange(100_000), wait=False).result(20)
        assert ok
        assert np.array_equal(connector.get("a", "b", "r", metadata)[0], np.arange(100_000))

    def test_what_cannot_be_carried_is_refused_all_the_same(self, make: Any) -> None:
        connector = make()
        fill(connector)
        with pytest.raises(CodecError):
            connector.put("a", "b", "r", [np.arange(100_000), object()])
        assert connector.health()["errors"] == 1
        assert connector.health()["inline_fallbacks"] == 0

    def test_a_put_that_waits_when_it_is_closed(self, make: Any, run_thread: Any) -> None:
        connector = make(put_timeout_s=20)
        fill(connector)
        waiting = run_thread(connector.put, "a", "b", "r", np.arange(100_000))
        with pytest.raises(NotYet):
            waiting.result(0.2)
        connector.close()
        with pytest.raises(ConnectorClosed):
            waiting.result(10)
        assert connector.health()["inline_fallbacks"] == 0

    def test_small_payloads_are_no_fallback(self, make: Any) -> None:
        connector = make()
        put(connector, "r", [1, 2, 3])
        assert connector.health()["inline_writes"] == 1
        assert connector.health()["inline_fallbacks"] == 0

    def test_everything_inline_makes_no_shared_memory(self, make: Any, shm_names: Any) -> None:
        put(make(shm_threshold_bytes=sys.maxsize), "r", payloads.big())
        assert shm_names() == []


class TestLog:
    """One line for each kind of reason, not one for each payload."""

    def test_once_for_each_reason(self, make: Any, caplog: pytest.LogCaptureFixture) -> None:
        connector = make()
        fill(connector)
        for n in range(20):
            put(connector, f"full{n}", np.arange(100_000))
            put(connector, f"large{n}", np.arange(MIB))
        lines = said(caplog)
        assert len(lines) == 2
        assert lines[0].startswith("put sends inline: request 'full0' on a->b: wants 800064 bytes, ")
        assert "waited 0 s: takers are slow" in lines[0]
        assert "request 'large0'" in lines[1]
        assert "it is larger than max_bytes" in lines[1]
        assert connector.health()["inline_fallbacks"] == 40
        assert connector.health()["no_room"] == {"full": 20, "too_large": 20}

    def test_again_after_a_while_with_the_number(
        self, make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(shared_memory, "_SAY_AGAIN_S", 0.0)
        connector = make()
        for n in range(3):
            put(connector, str(n), np.arange(MIB))
        assert [f"{n + 1} payloads so far" in line for n, line in enumerate(said(caplog))] == [True] * 3

    def test_each_connector_says_it(self, make: Any, caplog: pytest.LogCaptureFixture) -> None:
        for connector in (make(), make()):
            put(connector, "r", np.arange(MIB))
        assert len(said(caplog)) == 2

    def test_a_refusal_is_logged_once_for_each_edge_and_reason(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        connector = make(fallback="refuse", put_timeout_s=0)
        fill(connector)
        for n in range(3):
            assert not connector.put("a", "b", f"large{n}", np.arange(MIB))[0]
            assert not connector.put("a", "b", f"full{n}", np.arange(100_000))[0]
            assert not connector.put("a", "c", f"full{n}", np.arange(100_000))[0]
        assert [line.partition(": wants")[0] for line in said(caplog)] == [
            "put refused: request 'large0' on a->b",
            "put refused: request 'full0' on a->b",
            "put refused: request 'full0' on a->c",
        ]
        health = connector.health()
        assert (health["refused"], health["no_room"]) == (9, {"too_large": 3, "full": 6})

    def test_a_full_mount_is_said_to_be_full(self, make: Any, caplog: Any, monkeypatch: Any) -> None:
        connector = make(fallback="refuse", max_bytes=8 * MIB)
        put(connector, "first", np.arange(100_000))

        def refuse(*args: Any, **options: Any) -> Any:
            raise SegmentError("full", errno=errno.ENOSPC, op="make")

        monkeypatch.setattr(segments, "make", refuse)
        monkeypatch.setattr(janitor, "sweep", lambda *args, **options: janitor.Swept())
        assert not connector.put("a", "b", "r", np.arange(200_000))[0]
        assert "/dev/shm is full: enlarge it" in said(caplog)[0]
