"""MooncakeConnector between processes, on a real master: hand-over, room, and who takes what."""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
from typing import Any

import pytest
from support import mooncake_child
from support.child import Children, environment, run_script
from support.mooncake_master import Master, require_mooncake, running

from omni_fastshm.simulation import SimulatedStore

require_mooncake()

MIB = 1 << 20


def put(child: Any, seed: int, *, rid: str = "r", nbytes: int = MIB, **options: Any) -> Any:
    """The metadata of a payload that the child put."""
    ok, _, metadata = child.run(
        "result = c.put('0', '1', rid, payload(seed, nbytes), **options)",
        rid=rid,
        seed=seed,
        nbytes=nbytes,
        options=options,
    )
    assert ok
    return metadata


def get(child: Any, metadata: Any, seed: int, *, rid: str = "r", nbytes: int = MIB, **options: Any) -> bool | None:
    """Whether the child got that payload; None where it got nothing."""
    answer = child.run(
        "got = c.get('0', '1', rid, metadata, **options)\n"
        "result = None if got is None else is_payload(got, seed, nbytes)\n"
        "del got",
        rid=rid,
        metadata=metadata,
        seed=seed,
        nbytes=nbytes,
        options=options,
    )
    assert answer in (None, True), "bytes of something else arrived"
    return answer  # type: ignore[no-any-return]


class TestHandOver:
    """From one process to another."""

    @pytest.mark.parametrize("way", ["P2PHANDSHAKE", "http"])
    def test_through_either_kind_of_metadata_server(self, way: str, children: Children) -> None:
        with running(http_metadata=way == "http") as master:
            settings = {} if way == "P2PHANDSHAKE" else {"metadata_server": master.metadata_url}
            producer, consumer = (mooncake_child.start(children, master, **settings) for _ in range(2))
            for nbytes in (72_000, 1_000_003 // 8 * 8, 28 * MIB):
                metadata = put(producer, nbytes, nbytes=nbytes)
                assert get(consumer, metadata, nbytes, nbytes=nbytes)
                assert get(consumer, metadata, nbytes, nbytes=nbytes) is None
            back = put(consumer, 7)
            assert get(producer, back, 7)
            if way == "http":
                stranger = mooncake_child.start(children, master)
                assert get(stranger, put(producer, 8), 8) is None, "the metadata did not go through the HTTP server"
                stranger.kill()
                producer.run("c.cleanup('r')")
            for child in (producer, consumer):
                assert child.run("result = c.health()['live_blocks'], c.health()['errors']") == (0, 0)
                child.kill()

    def test_views_are_not_copies_and_stand_at_aligned_addresses(
        self, mooncake_master: Master, children: Children
    ) -> None:
        producer, consumer = (mooncake_child.start(children, mooncake_master) for _ in range(2))
        for n in range(4):  # odd sizes before it must not shift what comes after
            assert get(consumer, put(producer, n, nbytes=72_000 + 8 * n), n, nbytes=72_000 + 8 * n)
        address, owned, leases = consumer.run(
            "got = c.get('0', '1', 'r', metadata)[0]['a']\n"
            "result = got.ctypes.data % 64, got.flags.owndata, c.health()['leases']",
            metadata=put(producer, 1),
        )
        assert (address, owned, leases) == (0, False, 1)
        assert consumer.run("del got\nresult = c.health()['leases'], c.health()['own_memory_reads']") == (0, 0)
        for child in (producer, consumer):
            child.kill()

    def test_ways_out_of_a_process(self, mooncake_master: Master, run_thread: Any) -> None:
        """Normal end, exception, threads that wait, forked children: silent, and never a crash."""
        settings = json.dumps(mooncake_child.settings_for(mooncake_master))
        ways = ("end", "raise", "waiting-thread", "background-put", "fork")
        for ending in [run_thread(run_script, "mooncake_exits.py", way, settings) for way in ways]:
            ending.result(160)

    def test_a_process_without_standard_error(self, mooncake_master: Master) -> None:
        """As a daemon that closed it: the store's noise at its start has nowhere to go, and that is no failure."""
        code = (
            "import json, os, sys\n"
            "os.close(2)\n"
            "sys.stderr = None\n"
            "from omni_fastshm.connectors.mooncake import MooncakeConnector\n"
            "with MooncakeConnector(json.loads(sys.argv[1])) as c:\n"
            "    metadata = c.put('0', '1', 'r', b'x' * 100_000)[2]\n"
            "    assert c.get('0', '1', 'r', metadata)[0] == b'x' * 100_000\n"
            "print('ok')"
        )
        settings = json.dumps(mooncake_child.settings_for(mooncake_master))
        done = subprocess.run(
            [sys.executable, "-c", code, settings],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=150,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "ok\n")

    def test_the_segment_goes_with_the_last_connector(self, children: Children) -> None:
        with running() as master:
            child = mooncake_child.start(children, master)
            child.run("d = MooncakeConnector(settings)\nr = c.put('0', '1', 'r', payload(1))")
            assert len(master.ask("/get_all_segments")) == 1, "two connectors of a process share one client"
            child.run("c.close()")
            assert master.ask("/get_all_segments")
            child.run("d.close()")
            assert not master.ask("/get_all_segments")
            child.kill()


class TestOnce:
    """Each payload for as many takers as it was put for, whatever processes they are in."""

    @pytest.mark.parametrize("takers", [1, 3])
    def test_raced_for(self, takers: int, mooncake_master: Master, children: Children) -> None:
        count = 120 // takers
        racers = [mooncake_child.start(children, mooncake_master) for _ in range(2)]
        producer = racers[0]
        sent = [put(producer, n, rid=str(n), nbytes=80_000, consumers=takers) for n in range(count)]
        for racer in racers:
            racer.start(
                "taken, wrong = [], 0\n"
                "for n, metadata in list(enumerate(sent)) * 2:\n"
                "    got = c.get('0', '1', str(n), metadata)\n"
                "    if got is not None:\n"
                "        taken.append(n)\n"
                "        wrong += not is_payload(got, n, 80_000)\n"
                "        del got\n"
                "result = taken, wrong",
                sent=sent,
            )
        taken: collections.Counter[int] = collections.Counter()
        for racer in racers:
            numbers, wrong = racer.finish()
            assert not wrong
            taken.update(numbers)
        assert taken == dict.fromkeys(range(count), takers)
        assert producer.run("result = c.health()['live_blocks']") == 0
        for racer in racers:
            racer.kill()

    def test_cleanup_in_the_middle_of_reads_gives_all_or_nothing(
        self, mooncake_master: Master, children: Children
    ) -> None:
        """Removing by force ignores who reads: what was mixed must never be delivered."""
        producer, consumer = (mooncake_child.start(children, mooncake_master, localbuf="64MB") for _ in range(2))
        outcomes = []
        for n in range(12):
            metadata = put(producer, n, rid=f"x{n}", nbytes=16 * MIB, consumers=1 + n % 2)
            consumer.start(
                "got = c.get('0', '1', rid, metadata)\n"
                "result = None if got is None else is_payload(got, n, 16 << 20)\n"
                "del got",
                rid=f"x{n}",
                metadata=metadata,
                n=n,
            )
            # What comes after takes the room that was freed, and would be what a torn read shows.
            producer.run(
                "time.sleep(n % 4 * 0.003)\n"
                "c.cleanup(rid)\n"
                "ok, _, over = c.put('0', '1', 'over', payload(-1, 16 << 20))\n"
                "c.cleanup('over')",
                rid=f"x{n}",
                n=n,
            )
            outcomes.append(consumer.finish())
        assert False not in outcomes
        for child in (producer, consumer):
            child.kill()

    def test_by_key_across_processes(self, mooncake_master: Master, children: Children, namespace: str) -> None:
        keyed = {"key_lookup": True, "namespace": namespace}
        producer, consumer = (mooncake_child.start(children, mooncake_master, **keyed) for _ in range(2))
        consumer.start("emit('waits')\ngot = c.get('0', '1', 'r', timeout=150)\nresult = is_payload(got, 5)\ndel got")
        assert consumer.event() == "waits"
        put(producer, 5)
        assert consumer.finish() is True
        put(producer, 6)
        put(producer, 7)  # replaces the one before
        assert get(consumer, None, 7)
        assert get(consumer, None, 7) is None
        for child in (producer, consumer):
            child.kill()


class TestRoom:
    """A full store holds back who puts; it loses nothing."""

    def test_a_thousand_requests_through_64_mib_with_a_slow_consumer(
        self, mooncake_master: Master, children: Children
    ) -> None:
        producer, consumer = (mooncake_child.start(children, mooncake_master, put_timeout_s=30) for _ in range(2))
        # 300 MB in all. The consumer begins when the store is full, and then does more with each than the producer.
        producer.start(
            "for n in range(1000):\n"
            "    ok, size, metadata = c.put('0', '1', n, payload(n, 300_000))\n"
            "    emit((ok, metadata))"
        )
        sent = [producer.event() for _ in range(200)]
        right = 0
        for n in range(1000):
            ok, metadata = sent[n] if n < len(sent) else producer.event()
            assert ok, n
            right += consumer.run(
                "got = c.get('0', '1', n, metadata)\n"
                "result = is_payload(got, n, 300_000) and len(hashlib.sha256(got[0]['a']).digest()) == 32\n"
                "del got",
                n=n,
                metadata=metadata,
            )
        producer.finish()
        health = producer.run("result = c.health()")
        assert right == 1000
        assert health["blocked_s"] > 0, "the store was never full: the test shows nothing"
        assert (health["refused"], health["live_blocks"], health["used_bytes"]) == (0, 0, 0)
        for child in (producer, consumer):
            child.kill()

    def test_full_then_readable_then_free(self, mooncake_master: Master, children: Children) -> None:
        """R56: segment 16 MiB, local buffer 4 MiB, payloads larger than the one and more than the other."""
        producer = mooncake_child.start(children, mooncake_master, segment="16MB", localbuf="4MB", put_timeout_s=0.2)
        # The other node has room: it is not for this one to fill.
        consumer = mooncake_child.start(children, mooncake_master, localbuf="4MB")
        large = put(producer, 1, nbytes=8 * MIB)
        assert get(consumer, large, 1, nbytes=8 * MIB), "larger than the local buffer"
        assert consumer.run("result = c.health()['own_memory_reads']") == 1
        assert producer.run("result = c.put('0', '1', 'never', payload(0, 20 << 20))") == (False, 0, None)

        sent = producer.run("result = [c.put('0', '1', n, payload(n, 2 << 20)) for n in range(10)]")
        kept = [n for n, (ok, _, _) in enumerate(sent) if ok]
        assert 6 <= len(kept) < 10
        assert producer.run("result = c.health()['no_room']") == {"too_large": 1, "full": 10 - len(kept)}
        refusals = producer.run("result = lines")
        assert len(refusals) == 2, "the first of each reason"
        assert all("'never'" in line or str(2 * MIB)[:4] in line for line in refusals)
        for n in kept[:3]:
            assert get(consumer, sent[n][2], n, rid=str(n), nbytes=2 * MIB)
        producer.run("for n in range(10): c.cleanup(n)")
        again = producer.run("result = [c.put('0', '1', n, payload(n, 2 << 20))[0] for n in range(6)]")
        assert again == [True] * 6
        for child in (producer, consumer):
            child.kill()

    def test_views_that_fill_the_local_buffer(self, mooncake_master: Master, children: Children) -> None:
        producer, consumer = (mooncake_child.start(children, mooncake_master, localbuf="4MB") for _ in range(2))
        sent = [put(producer, n, rid=str(n)) for n in range(8)]
        right, own, leases = consumer.run(
            "held = [c.get('0', '1', str(n), metadata) for n, metadata in enumerate(sent)]\n"
            "health = c.health()\n"
            "right = all(is_payload(got, n) for n, got in enumerate(held))\n"
            "result = right, health['own_memory_reads'], health['leases']",
            sent=sent,
        )
        assert right
        assert own >= 4
        assert leases == 8
        assert consumer.run("held.clear()\nresult = c.health()['leases']") == 0
        assert get(consumer, put(producer, 9), 9)
        assert consumer.run("result = c.health()['own_memory_reads']") == own, "the local buffer is free again"
        for child in (producer, consumer):
            child.kill()


class TestWays:
    """Settings that change how the bytes go."""

    def test_the_way_of_rdma_without_the_hardware(
        self, mooncake_master: Master, children: Children, namespace: str
    ) -> None:
        """Without a device Mooncake goes over TCP; the calls are those that registered memory needs."""
        settings = {"proto": "rdma", "localbuf": "16MB", "key_lookup": True, "namespace": namespace}
        producer, consumer = (mooncake_child.start(children, mooncake_master, **settings) for _ in range(2))
        for n in range(3):
            put(producer, n, consumers=2)
            assert get(consumer, None, n)
            assert get(producer, None, n)
        assert consumer.run("result = [line for line in lines if 'RDMA' in line]")
        sent = [put(producer, n, rid=f"v{n}", nbytes=4 * MIB) for n in range(6)]
        right, own = consumer.run(
            "held = [c.get('0', '1', f'v{n}', metadata) for n, metadata in enumerate(sent)]\n"
            "result = all(is_payload(got, n, 4 << 20) for n, got in enumerate(held)), c.health()['own_memory_reads']",
            sent=sent,
        )
        assert right
        assert own > 0
        for child in (producer, consumer):
            child.kill()

    def test_more_leaves_than_the_store_takes_parts(self, mooncake_master: Master, children: Children) -> None:
        # Into another node's memory: only there each part is a transfer of its own, and their number has a limit.
        consumer = mooncake_child.start(children, mooncake_master)
        producer = mooncake_child.start(children, mooncake_master, segment=0)
        metadata = producer.run(
            "result = c.put('0', '1', 'r', [np.full(5000 + n, n % 100, np.uint8) for n in range(3000)])[2]"
        )
        assert consumer.run(
            "got = c.get('0', '1', 'r', metadata)[0]\n"
            "result = all(len(a) == 5000 + n and bool((a == n % 100).all()) for n, a in enumerate(got))\n"
            "del got",
            metadata=metadata,
        )
        for child in (producer, consumer):
            child.kill()

    def test_names_of_any_length(self, mooncake_master: Master, children: Children) -> None:
        producer, consumer = (mooncake_child.start(children, mooncake_master) for _ in range(2))
        for rid in ("x" * 20_000, "é✓\n\x00" * 500, "a/b", "", "^.*$"):
            assert get(consumer, put(producer, 1, rid=rid), 1, rid=rid)
            metadata = put(producer, 1, rid=rid)
            consumer.run("c.cleanup(rid)", rid=rid)
            assert get(consumer, metadata, 1, rid=rid) is None
        assert producer.run("result = c.health()['live_blocks']") == 0
        for child in (producer, consumer):
            child.kill()


def test_the_simulator_refuses_what_the_store_refuses(children: Children) -> None:
    kinds, model = (100_000, 1_000_000, 3_000_000), SimulatedStore(16 * MIB)
    chance = random.Random(7)
    order = [chance.choice(kinds) for _ in range(60)]
    with running() as master:
        child = mooncake_child.start(children, master, segment="64MB", max_bytes=16 * MIB, put_timeout_s=0)
        sizes, answers, most = child.run(
            "sizes = {}\n"
            "for n in kinds:\n"
            "    sizes[n] = c.put('0', '1', f'w{n}', payload(1, n))[1]\n"
            "    c.cleanup(f'w{n}')\n"
            "live, answers = [], []\n"
            "for i, n in enumerate(order):\n"
            "    if i % 3 == 2 and live:\n"
            "        c.cleanup(live.pop(0))\n"
            "    answers.append(c.put('0', '1', str(i), payload(1, n))[0])\n"
            "    live += [str(i)] * answers[-1]\n"
            "result = sizes, answers, c.health()['high_water_bytes']\n"
            "c.close()",
            kinds=kinds,
            order=order,
        )
    live, expected = [], []
    for i, n in enumerate(order):
        if i % 3 == 2 and live:
            model.give((0, 0), live.pop(0))
        expected.append(model.take(sizes[n], 0.0) is not None)
        live += [sizes[n]] * expected[-1]
    assert answers == expected
    assert 5 < sum(answers) < len(order), "the limit was never reached, or always"
    assert most == model.peak
