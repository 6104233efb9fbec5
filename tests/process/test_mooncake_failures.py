"""What MooncakeConnector does when a producer or the master dies, hangs, or comes back."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import mooncake_child
from support.child import Child, Children
from support.mooncake_master import Master, require_mooncake, running

require_mooncake()

PUT = "result = c.put('0', '1', rid, payload(3))"
GET = "got, took = timed(c.get, '0', '1', rid, metadata)\nresult = None if got is None else is_payload(got, 3), took"


@pytest.fixture
def master() -> Iterator[Master]:
    """One of its own for each test: dead clients disturb the others for a while."""
    with running("--default_kv_lease_ttl=5000", "--client_ttl=2") as started:
        yield started


@pytest.fixture
def start(master: Master, children: Children) -> Any:
    """A function that starts a child with a connector. The store's client complains about the dead on stderr: such
    children are killed at the end, so that nobody looks there."""
    return lambda **settings: mooncake_child.start(children, master, **settings)


class TestProducer:
    """The payload goes with the process that put it."""

    def test_a_killed_one_is_noticed_at_once(self, start: Any) -> None:
        producer, consumer = start(), start(segment=0)
        metadata = producer.run(PUT, rid="r")[2]
        assert consumer.run(GET, rid="s", metadata=producer.run(PUT, rid="s")[2])[0] is True
        producer.kill()

        answer, took = consumer.run(GET, rid="r", metadata=metadata)

        assert answer is None
        assert took < 5, "it waited for what is dead"
        health, lines = consumer.run("result = c.health(), lines")
        assert (health["status"], health["producer_gone"], health["errors"]) == ("ok", 1, 1)
        assert "'r'" in lines[-1]
        assert "TRANSFER_FAIL" in lines[-1]
        consumer.kill()

    def test_a_killed_one_is_noticed_by_key_as_well(self, start: Any, namespace: str) -> None:
        """Who waits is told, and waits on: it may start again, and put it again."""
        settings = {"key_lookup": True, "namespace": namespace}
        producer, consumer = start(**settings), start(segment=0, **settings)
        assert producer.run(PUT, rid="r")[0]
        producer.kill()
        consumer.start("emit('waits')\nresult = is_payload(c.get('0', '1', 'r', timeout=20), 3)")
        assert consumer.event() == "waits"
        again = start(**settings)
        assert again.run(PUT, rid="r")[0]
        assert consumer.finish() is True
        health, lines = consumer.run("for _ in range(5): c.get('0', '1', 'r')\nresult = c.health(), lines")
        assert (health["status"], health["producer_gone"]) == ("ok", 1)
        assert len(lines) == 1
        assert "'r'" in lines[0]
        assert "TRANSFER_FAIL" in lines[0]
        for child in (again, consumer):
            child.kill()

    def test_one_that_starts_again_replaces_what_it_left(self, start: Any, namespace: str) -> None:
        """For a while the master knows the record of the dead one, which nobody can read or write over."""
        settings = {"key_lookup": True, "namespace": namespace}
        producer, consumer = start(**settings), start(**settings)
        assert producer.run(PUT, rid="r")[0]
        producer.kill()
        again = start(**settings)
        assert again.run(PUT, rid="r")[0]
        assert consumer.run(GET, rid="r", metadata=None)[0] is True
        for child in (again, consumer):
            child.kill()

    def test_one_that_stands_still_costs_no_more_than_the_timeout(self, start: Any) -> None:
        """R56: the backend's get does not return."""
        producer, consumer = start(), start(segment=0, get_timeout_s=1)
        metadata = [producer.run(PUT, rid=rid)[2] for rid in "rst"]
        assert consumer.run(GET, rid="r", metadata=metadata[0])[0] is True
        mooncake_child.freeze(producer)
        try:
            answer, took = consumer.run(GET, rid="s", metadata=metadata[1])
            assert answer is None
            assert took < 5, "it waited much longer than get_timeout_s: the store's own limit is 30 s"
            consumer.start(
                "blocked = threading.Thread(target=c.get, args=('0', '1', 't', metadata))\nblocked.start()\n"
                "emit('inside')\n_, took = timed(c.close)\nblocked.join()\nresult = took, lines",
                metadata=metadata[2],
            )
            assert consumer.event() == "inside"
            took, lines = consumer.finish()
            assert took < 6
            assert "does not answer" in lines[0]
        finally:
            producer.process.send_signal(signal.SIGCONT)
        for child in (producer, consumer):
            child.kill()

    def test_one_that_stood_still_for_too_long_works_again(self, master: Master, start: Any) -> None:
        """The master drops a client that is silent; what it had is lost, what it puts afterwards is not."""
        producer, consumer = start(), start(segment=0)
        metadata = producer.run(PUT, rid="r")[2]
        mooncake_child.freeze(producer)
        consumer.run(
            "end = time.monotonic() + 15\n"
            "while c._session.exist([key]) == [1] and time.monotonic() < end: time.sleep(0.05)",
            key=f"omnifs/{consumer.run('result = c.namespace')}/p/r/0_to_1/{metadata['mooncake']['nonce']}",
        )
        producer.process.send_signal(signal.SIGCONT)
        assert consumer.run(GET, rid="r", metadata=metadata)[0] is None
        ok, _, metadata = producer.run(PUT, rid="s")
        assert ok
        assert consumer.run(GET, rid="s", metadata=metadata)[0] is True
        assert producer.run("result = c.health()['live_blocks']") == 0
        for child in (producer, consumer):
            child.kill()

    def test_views_outlive_everybody(self, master: Master, start: Any) -> None:
        producer, consumer = start(), start(segment=0)
        sent = [producer.run(PUT, rid=str(n))[2] for n in range(2)]
        consumer.run("held = [c.get('0', '1', str(n), metadata) for n, metadata in enumerate(sent)]", sent=sent)
        producer.kill()
        master.stop()
        consumer.run("c.close()")
        assert consumer.run("result = [is_payload(got, 3) for got in held], c.health()['leases']") == ([True, True], 2)
        assert consumer.run("held.clear()\nresult = c.health()['leases']") == 0
        consumer.kill()


class TestMaster:
    """Without a master nothing can be put or found; that is an answer within seconds, and it passes."""

    @pytest.mark.parametrize("how", ["killed", "hung"])
    def test_lost(self, how: str, master: Master, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if how == "hung":
            monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1500")  # instead of 5 s for each of the three calls
        child: Child = start()
        metadata = child.run(PUT, rid="r")[2]
        if how == "killed":
            master.stop()
        else:
            master.send(signal.SIGSTOP)
        code = (
            "rounds, stop = [], threading.Event()\n"
            "def others():\n"
            "    while not stop.is_set(): rounds.append(time.monotonic()); time.sleep(0.01)\n"
            "thread = threading.Thread(target=others); thread.start()\n"
            "answers = [timed(c.put, '0', '1', 'x', payload(1)), timed(c.get, '0', '1', 'r', metadata)]\n"
            "answers.append(timed(lambda: c.health()['status']))\n"
            "stop.set(); thread.join()\n"
            "longest = max(after - before for before, after in zip(rounds, rounds[1:] or rounds))\n"
            "result = answers, longest, lines"
        )
        try:
            answers, longest, lines = child.run(code, metadata=metadata)
            assert [answer for answer, _ in answers] == [(False, 0, None), None, "master lost"]
            assert all(took < 6 for _, took in answers), answers
            assert longest < 3, "other threads stood still for as long as the store's call took"
            assert "'x'" in lines[0]
            assert "master" in lines[0].lower()
            assert str(1 << 20)[:3] in lines[0]
            if how == "killed":
                _, took = child.run("result = timed(c.put, '0', '1', 'x', payload(1))")
                assert took < 3, "a master that is known to be lost is asked again: that takes over 4 s"
                master.start()
            else:
                master.send(signal.SIGCONT)
            back = child.run(
                "end = time.monotonic() + 15\n"
                "ok = False\n"
                "while not ok and time.monotonic() < end:\n"
                "    ok, _, metadata = c.put('0', '1', 'y', payload(3))\n"
                "result = ok and is_payload(c.get('0', '1', 'y', metadata), 3), c.health()"
            )
            assert back[0] is True
            assert back[1]["status"] == "ok"
            assert child.run("result = timed(c.close)[1]") < 6
        finally:
            if how == "hung":
                master.send(signal.SIGCONT)
        child.kill()

    def test_close_without_one(self, master: Master, start: Any) -> None:
        child: Child = start(linger_s=1)
        child.run(PUT, rid="r")
        master.stop()
        took, lines = child.run("result = timed(c.close)[1], lines")
        assert took < 6
        assert any("nobody has taken" in line for line in lines)
        assert "stays open" in lines[-1]
        child.run("d = MooncakeConnector(dict(settings, setup_timeout_s=0))\nd.close()")  # the same client again
        start = time.monotonic()
        assert child.stop() == 0
        child.killed = True  # it complained
        assert time.monotonic() - start < 6

    def test_close_while_it_hangs_waits_for_it_once(
        self, master: Master, start: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "2000")
        child: Child = start(key_lookup=True, namespace="n")
        child.run("for n in range(3): c.put('0', '1', n, payload(n), consumers=2)")
        master.send(signal.SIGSTOP)
        try:
            assert child.run("result = timed(c.put, '0', '1', 'x', payload(1))[0]") == (False, 0, None)
            asked = child.run(
                "time.sleep(1.1)\n"  # over the moment in which it is not asked again
                "call, asked = c._session._call, []\n"
                "def count(name, *arguments, **options):\n"
                "    asked.append(name)\n"
                "    return call(name, *arguments, **options)\n"
                "c._session._call = count\n"
                "c.close()\n"
                "result = asked"
            )
            assert len(asked) <= 1, asked
        finally:
            master.send(signal.SIGCONT)
        child.kill()

    def test_none_to_begin_with(self, children: Children) -> None:
        gone = Master()
        child = children.start()
        text, took = child.run(
            "import time\n"
            "from omni_fastshm.connectors.mooncake import MooncakeConnector\n"
            "start = time.monotonic()\n"
            "try: MooncakeConnector(settings)\n"
            "except Exception as error: result = f'{type(error).__name__}: {error}', time.monotonic() - start",
            settings=mooncake_child.settings_for(gone, setup_timeout_s=0.3),
        )
        assert text.startswith("ConfigError: MooncakeConnector: no Mooncake master answers at 127.0.0.1:")
        assert "omni-fastshm mooncake up" in text
        assert 0.3 <= took < 6

    def test_what_listens_but_is_none(self, children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1000")
        with socket.create_server(("127.0.0.1", 0)) as mute:
            child = children.start()
            text, took = child.run(
                "import time\n"
                "from omni_fastshm.connectors.mooncake import MooncakeConnector\n"
                "start = time.monotonic()\n"
                "try: MooncakeConnector({'master': address, 'host': '127.0.0.1'})\n"
                "except Exception as error: result = f'{type(error).__name__}: {error}', time.monotonic() - start",
                address=f"127.0.0.1:{mute.getsockname()[1]}",
            )
        assert text.startswith("ConfigError: ")
        assert "may be no Mooncake master" in text
        assert took < 6
        child.kill()  # the client complained

    def test_one_that_starts_a_moment_later(self, children: Children) -> None:
        late = Master()
        child = children.start()
        child.start(
            "emit('waits')\n"
            "from omni_fastshm.connectors.mooncake import MooncakeConnector\n"
            "c = MooncakeConnector(settings)\n"
            "result = c.health()['status']",
            settings=mooncake_child.settings_for(late),
        )
        assert child.event() == "waits"
        late.start()
        try:
            assert child.finish() == "ok"
            child.kill()
        finally:
            late.stop()
