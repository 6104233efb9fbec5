"""The torture in its short form; and the referee itself, which must see what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import leftovers
from support.child import Children, environment
from torture import content, messages
from torture.__main__ import run_fuzz
from torture.ledger import EXTRA_NS, Ledger

MS = 1_000_000
TTL_S = 0.5


def book(*, takers: int = 1, key: str = "r") -> Ledger:
    """Process 1 has put payload 100, which ended at 20; processes 2 and 3 are there."""
    ledger = Ledger()
    for serial in (1, 2, 3):
        ledger.born(serial, TTL_S)
    ledger.put_begins(100, key, takers, 1, 10)
    ledger.put_ends(100, True, 20)
    return ledger


def get(ledger: Ledger, token: int, serial: int, start: int, end: int, got: int | None, uid: int | None = 100) -> None:
    ledger.get_begins(token, "r", uid, serial, start)
    ledger.get_ends(token, got, (start, end, 0))


def kinds(ledger: Ledger) -> list[str]:
    return [fault.kind for fault in ledger.faults]


class TestLedger:
    """Which answers need an excuse, and which excuses count."""

    def test_what_is_got_once_is_no_fault(self) -> None:
        ledger = book()
        get(ledger, 1, 2, 30, 40, 100)
        ledger.settle("r")
        assert not ledger.faults
        assert ledger.fates == {"delivered": 1}

    def test_one_get_more_than_takers_is_a_double_delivery(self) -> None:
        ledger = book(takers=2)
        for token in range(3):
            get(ledger, token, 2, 30, 40, 100)
        assert kinds(ledger) == ["double"]
        assert any("put ok" in event for event in ledger.faults[0].events)

    def test_what_is_in_the_metadata_may_be_got_often(self) -> None:
        ledger = book()
        ledger.put_ends(100, True, 20, inline=True)
        get(ledger, 1, 2, 30, 40, 100)
        get(ledger, 2, 3, 30, 40, 100)
        assert not ledger.faults
        get(ledger, 3, 3, 30, 40, None)
        assert kinds(ledger) == ["lost"]

    def test_none_without_an_excuse_is_a_loss(self) -> None:
        ledger = book()
        get(ledger, 1, 2, 30, 40, None)
        assert kinds(ledger) == ["lost"]

    def test_none_before_it_was_put_is_none(self) -> None:
        ledger = book()
        get(ledger, 1, 2, 15, 19, None)
        assert not ledger.faults

    def test_none_is_excused_by_who_took_it(self) -> None:
        ledger = book()
        get(ledger, 1, 2, 30, 40, 100)
        get(ledger, 2, 3, 50, 60, None)
        assert not ledger.faults

    def test_a_take_that_began_later_excuses_nothing(self) -> None:
        ledger = book()
        ledger.get_begins(1, "r", 100, 2, 50)
        get(ledger, 2, 3, 30, 40, None)
        ledger.get_ends(1, 100, (50, 60, 0))
        assert kinds(ledger) == ["lost"]

    def test_judgement_waits_for_a_get_under_way(self) -> None:
        for took in (100, None):
            ledger = book()
            ledger.get_begins(1, "r", 100, 2, 30)
            get(ledger, 2, 3, 35, 40, None)
            assert not ledger.faults
            ledger.get_ends(1, took, (31, 45, 0))
            assert kinds(ledger) == ([] if took else ["lost", "lost"])

    def test_who_died_in_get_excuses_one_loss_and_not_two(self) -> None:
        ledger = book(takers=2)
        ledger.get_begins(1, "r", 100, 2, 30)
        ledger.dies(2, 40)
        get(ledger, 2, 3, 50, 60, 100)
        get(ledger, 3, 3, 70, 80, None)
        assert not ledger.faults
        ledger.settle("r")
        assert ledger.fates == {"unknown": 1}
        ledger = book(takers=2)
        ledger.get_begins(1, "r", 100, 2, 30)
        ledger.dies(2, 40)
        get(ledger, 2, 3, 50, 60, None)
        assert kinds(ledger) == ["lost"]

    def test_an_orphan_has_its_time(self) -> None:
        for at, want in ((30 + 400 * MS, ["lost"]), (30 + 500 * MS, [])):
            ledger = book()
            ledger.dies(1, 30)
            get(ledger, 1, 2, at - 5, at, None)
            assert kinds(ledger) == want

    def test_cleanup_excuses_from_its_beginning_and_forbids_from_its_end(self) -> None:
        ledger = book(takers=3)
        ledger.cancel_begins("r", 3, 50)
        get(ledger, 1, 2, 30, 45, 100)
        get(ledger, 2, 2, 55, 60, None)
        get(ledger, 3, 2, 61, 69, 100)
        ledger.cancel_ends("r", 3, 51, 70)
        assert not ledger.faults
        get(ledger, 4, 2, 75, 80, 100)
        assert kinds(ledger) == ["undead"]

    def test_a_cleanup_under_way_may_meet_a_new_payload(self) -> None:
        for end, want in (((51, 90), []), (None, []), ((51, 56), ["lost"])):
            ledger = book()
            ledger.cancel_begins("r", 3, 50)
            if end == (51, 56):
                ledger.cancel_ends("r", 3, *end)
            ledger.put_begins(101, "r", 1, 1, 60)
            ledger.put_ends(101, True, 70)
            if end is None:
                ledger.dies(3, 75)
            elif end[1] > 70:
                ledger.cancel_ends("r", 3, *end)
            get(ledger, 1, 2, 95, 99, None, uid=101)
            assert kinds(ledger) == want

    def test_the_same_key_again_replaces(self) -> None:
        ledger = book()
        ledger.put_begins(101, "r", 1, 1, 50)
        get(ledger, 1, 2, 51, 52, None, uid=None)  # the first may go, the second may not be there yet
        ledger.put_ends(101, True, 60)
        assert not ledger.faults
        get(ledger, 2, 2, 65, 70, 100, uid=None)
        assert kinds(ledger) == ["undead"]
        get(ledger, 3, 2, 75, 80, None, uid=None)
        assert kinds(ledger) == ["undead", "lost"]

    def test_close_excuses_and_a_refused_put_must_not_arrive(self) -> None:
        ledger = book()
        ledger.closes(1, 25)
        get(ledger, 1, 2, 30, 40, None)
        ledger.put_begins(101, "r", 1, 1, 50)
        ledger.put_ends(101, False, 60)
        assert not ledger.faults
        get(ledger, 2, 2, 70, 80, 101, uid=None)
        assert kinds(ledger) == ["ghost"]

    def test_another_payload_than_asked_for_is_corrupt(self) -> None:
        ledger = book()
        get(ledger, 1, 2, 30, 40, 99)
        assert kinds(ledger) == ["corrupt"]

    def test_a_waiting_get_must_notice_an_arrival(self) -> None:
        for queued, want in ((0, ["overslept"]), (EXTRA_NS, [])):
            ledger = Ledger()
            for serial in (1, 2):
                ledger.born(serial, TTL_S)
            ledger.get_begins(1, "r", None, 2, 5)
            ledger.put_begins(100, "r", 1, 1, 10)
            ledger.put_ends(100, True, 20)
            ledger.get_ends(1, None, (5, 30 + EXTRA_NS, queued))
            assert kinds(ledger) == want

    def test_what_nobody_could_get_from_the_living_is_a_loss(self) -> None:
        ledger = book()
        ledger.settle("r")
        assert kinds(ledger) == ["lost"]


class TestContent:
    def test_every_byte_and_its_place_count(self) -> None:
        sizes = (1, 1000, 70_001)
        for index, size in enumerate(sizes):
            leaf = content.leaf(7, index, size)
            assert not content.wrong(7, sizes, [content.leaf(7, i, s) for i, s in enumerate(sizes)])
            for change in (0, size // 2, size - 1):
                leaves = [content.leaf(7, i, s) for i, s in enumerate(sizes)]
                leaves[index][change] ^= 1
                assert "1 of" in content.wrong(7, sizes, leaves)
            assert not content.wrong(7, (size,), [leaf[1:]], 1) or index
        assert content.wrong(8, sizes, [content.leaf(7, i, s) for i, s in enumerate(sizes)])
        assert content.wrong(7, sizes, [content.leaf(7, i, s)[:-1] for i, s in enumerate(sizes)])


# Each breaks what a process does; the referee has to see it, in a real round.
BROKEN = {
    "corrupt": """
        leaf = worker.content.leaf
        def broken(uid, index, size):
            made = leaf(uid, index, size)
            if uid % 7 == 0 and size: made[size // 2] ^= 1
            return made
        def _leaf(self, uid, index, size, lend): return broken(uid, index, size)
        worker.Worker._leaf = _leaf
    """,
    "changed": """
        look = worker.Worker._let_go
        def _let_go(self, count):
            for held in self._held:
                for leaf in held.leaves:
                    if leaf.size and leaf.flags.writeable: leaf[-1] ^= 1
            look(self, count)
        worker.Worker._let_go = _let_go
    """,
    "double": """
        report = worker.Worker.report
        def twice(self, kind, *values):
            if kind == "get_end" and values[1] is None and self.last: values = (values[0], self.last, "", values[3])
            report(self, kind, *values)
        receive = worker.Worker._receive
        def _receive(self, token, rid, edge_uid, metadata, timeout):
            self.last = int(rid[1:]) if metadata else None
            return receive(self, token, rid, edge_uid, metadata, timeout)
        worker.Worker.report, worker.Worker._receive, worker.Worker.last = twice, _receive, None
    """,
    "lost": """
        report = worker.Worker.report
        def forgetful(self, kind, *values):
            if kind == "get_end" and values[0] % 20 == 0: values = (values[0], None, "", values[3])
            report(self, kind, *values)
        worker.Worker.report = forgetful
    """,
    "late": """
        timed = worker.Worker.timed
        def slow(self, phase, call):
            result, (start, end, queued) = timed(self, phase, call)
            return result, (start - 2 * 10**9 * (phase == worker.PUT), end, queued)
        worker.Worker.timed = slow
    """,
    "left": """
        from omni_fastshm import janitor
        janitor.sweep = lambda *given, **more: janitor.Swept()
    """,
    "crashed": """
        put = worker.Worker._do_put
        def _do_put(self, uid, *values):
            if uid == 20: os._exit(3)
            put(self, uid, *values)
        worker.Worker._do_put = _do_put
    """,
}
ROUND = """
import os, random, textwrap, time
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # processes are forked
from torture import kills, worker
exec(textwrap.dedent(broken))
outcome = kills.Result()
plan = kills.Plan(12, rate=60.0, ttl_s=0.1)
try:
    kills.Round(plan, namespace, random.Random(3), outcome, 1).run(time.monotonic() + 60)
finally:
    result = (outcome.kills, sorted({fault.kind for fault in outcome.faults}), [fault.text for fault in outcome.faults])
"""


class TestReferee:
    """A referee that sees nothing is worse than none."""

    @pytest.mark.parametrize("kind", [None, *BROKEN])
    def test_it_sees_what_is_broken(self, children: Children, namespace: str, kind: str | None) -> None:
        child = children.start(warnings_are_errors=False)
        kills, found, texts = child.run(ROUND, timeout=150, broken=BROKEN.get(kind or "", ""), namespace=namespace)
        leftovers.remove(namespace)
        assert kills >= 12
        if kind is None:
            assert not texts
        else:
            assert kind in found, texts

    def test_growing_memory_is_seen(self) -> None:
        laps = messages.WARM_UP_BYTES
        flat = [(n * laps, 30_000_000 + n % 7 * 4096, 0, 0) for n in range(1, 40)]
        rising = [(through, anonymous + through // 100, 0, 0) for through, anonymous, _, _ in flat]
        assert abs(messages.growth(flat, 1) or 0) < messages.FLAT_BYTES
        assert (messages.growth(rising, 1) or 0) > messages.FLAT_BYTES
        for samples, faults in ((flat, 0), (rising, 2)):
            result = messages.Result(1)
            report = messages.Report(messages=1, samples=samples)
            result.add("a way", 1, report, report, 1.0, "nowhere")
            assert len(result.faults) == faults

    def test_mapping_again_and_again_is_seen(self) -> None:
        for shared, faults in ((messages.SHARED_BYTES, 0), (messages.SHARED_BYTES + 1, 2)):
            result = messages.Result(1)
            report = messages.Report(messages=1, samples=[(1, 30_000_000, shared, 0)])
            result.add("a way", 1, report, report, 1.0, "nowhere")
            assert len(result.faults) == faults

    def test_a_wrong_word_is_seen(self, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: messages.Sender, chunk: messages.Chunk) -> Any:
            chunk.starts[5] ^= 1
            return send(self, chunk)

        send: Callable[..., Any] = messages.Sender.send
        monkeypatch.setattr(messages.Sender, "send", broken)
        sent, got = messages.same_process(1000, 1, namespace)
        assert not sent.errors
        assert got.errors


def test_a_finding_of_the_fuzzer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    figures, faults = run_fuzz(10, 1, 5.0)
    assert figures["inputs"] == 0
    assert faults


@pytest.mark.time_limit(400)
def test_short_form(tmp_path: Path) -> None:
    sizes = ["--kills", "60", "--messages", "40000", "--waits", "10", "--fuzz", "0", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torture", *sizes, "--json", str(tmp_path / "figures.json")],
        env=environment(),
        cwd=tmp_path,  # not the repository's root, whose package would stand in front of an installed one
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills"]["kills"] >= 60
    assert figures["kills"]["counts"]["gets"] > 100
    assert figures["messages"]["messages"] == 40_000
    assert figures["pressure"]["deaths"] == 10
    assert not any(figures["kills"]["faults"].values())
    assert figures["faults"] == 0
