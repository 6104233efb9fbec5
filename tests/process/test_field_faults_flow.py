"""Reports from the field about full, slow, spinning, half-written and doubly read, each with its input."""

from __future__ import annotations

import logging
import mmap
import pickle
import random
import statistics
import time
from typing import Any

import numpy as np
import pytest
from support import leftovers, payloads
from support.child import Children
from support.timing import timed

from omni_fastshm.errors import MetadataError

MIB = payloads.MIB
RING_4_MIB = {"segment_bytes": 4 * MIB, "max_bytes": 4 * MIB}


class TestR15FullOrTooLarge:
    """A failed put only left a log line without the request id; the request waited for ever."""

    def test_refusals_and_recovery(self, make: Any, caplog: pytest.LogCaptureFixture) -> None:
        producer, consumer = make(**RING_4_MIB, put_timeout_s=0.2), make()

        assert timed(0, 0.05, producer.put, "0", "1", "too-large", payloads.array(6 * MIB)) == (False, 0, None)
        refused = producer.health()["refused"]

        _, _, first = producer.put("0", "1", "first", payloads.array(3 * MIB))
        assert timed(0.2, 0.6, producer.put, "0", "1", "second", payloads.array(3 * MIB)) == (False, 0, None)
        assert producer.health()["refused"] > refused
        for rid in ("too-large", "second"):
            assert any(rid in r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)

        assert consumer.get("0", "1", "first", first)
        assert producer.put("0", "1", "third", payloads.array(3 * MIB))[0] is True


class TestR16Backpressure:
    """When the ring was full the writer looked for another slot: readers lost or reordered messages."""

    def test_two_hundred_through_a_ring_for_three(self, make: Any, children: Children) -> None:
        reader = make()
        writer = children.with_connector(segment_bytes=MIB, max_bytes=MIB, put_timeout_s=30)
        writer.start(
            "for n in range(200):\n"
            "    ok, _, md = c.put('0', '1', n, np.full(300_000, n % 251, np.uint8))\n"
            "    emit((n, ok, md))"
        )
        seen = []
        for _ in range(200):
            n, ok, metadata = writer.event()
            assert ok, n
            got = reader.get("0", "1", n, metadata)[0]
            time.sleep(0.005)  # the load, and not to synchronise
            assert int(got.min()) == int(got.max()) == n % 251
            seen.append(n)
            del got
        writer.finish()
        assert seen == list(range(200))
        health = writer.run("result = c.health()")
        assert health["refused"] == 0
        assert health["blocked_s"] > 0.2, "the writer was never held back: the ring was larger than the test needs"


class TestR18Spin:
    """An idle reader burnt a whole core."""

    def test_idle_and_under_a_light_load(self, make: Any, children: Children, namespace: str) -> None:
        settings = {"key_lookup": True, "namespace": namespace}
        producer, reader = make(**settings), children.with_connector(**settings)
        cpu = (
            "import resource, time\n"
            "def cpu():\n"
            "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
            "    return used.ru_utime + used.ru_stime\n"
        )
        reader.run(cpu)
        idle, got = reader.run("t = cpu(); got = c.get('0', '1', 'r', timeout=5); result = (cpu() - t, got)")
        assert got is None
        assert idle < 0.25

        reader.start(
            "t, w = cpu(), time.monotonic()\n"
            "late = []\n"
            "for n in range(200):\n"
            "    sent = c.get('0', '1', n, timeout=20)[0]\n"
            "    late.append(time.monotonic() - sent)\n"
            "result = ((cpu() - t) / (time.monotonic() - w), late)"
        )
        for n in range(200):
            time.sleep(0.01)  # the load, and not to synchronise
            producer.put("0", "1", n, time.monotonic())
        share, late = reader.finish()
        assert share < 0.5
        # A busy machine only ever adds to it; who looks every so often is late by half of that, most of the times.
        assert statistics.quantiles(late, n=4)[0] < 0.0025


class TestR20HalfWritten:
    """Under load the consumer decoded a buffer with leftover or missing bytes."""

    def test_a_reused_key_polled_in_a_tight_loop(
        self, make: Any, children: Children, namespace: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = {"key_lookup": True, "namespace": namespace}
        consumer, producer = make(**settings), children.with_connector(**settings)
        misses = 0
        for n in range(200):
            nbytes = 20 * MIB if n % 2 == 0 else 1000
            producer.start(
                "ok = c.put('0', '1', 'key', {'n': n, 'x': np.full(nbytes, n, np.uint8)})[0]; result = ok",
                n=n,
                nbytes=nbytes,
            )
            while (answer := consumer.get("0", "1", "key")) is None:
                misses += 1
            got = answer[0]
            assert got["n"] == n
            assert got["x"].size == nbytes
            assert int(got["x"].min()) == int(got["x"].max()) == n
            assert producer.finish() is True
            del answer, got
        assert misses > 200
        assert consumer.health()["errors"] == 0
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class TestR26SeveralReaders:
    """The first rank that read removed the segment, and the other ranks failed to open it."""

    def test_four_readers_in_any_order(self, make: Any, children: Children, shm_names: Any) -> None:
        producer = make()
        _, _, metadata = producer.put("0", "1", "r", payloads.array(MIB, 9), consumers=4)
        metadata = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(metadata))))
        readers = [children.with_connector() for _ in range(4)]
        random.Random(4).shuffle(readers)
        for reader in readers:
            assert producer.health()["live_blocks"] == 1
            got = reader.run("got = c.get('0', '1', 'r', md)[0]; result = got.copy()", md=metadata)
            assert payloads.same(got, payloads.array(MIB, 9))
        assert producer.get("0", "1", "r", metadata) is None
        for reader in readers[:3]:
            reader.run("del got")
        assert producer.health()["live_blocks"] == 1
        readers[3].run("del got")
        assert producer.health()["live_blocks"] == 0
        producer.close()
        assert [reader.stop() for reader in readers] == [0] * 4
        assert shm_names() == []

    def test_get_and_get_again(self, make: Any) -> None:
        producer, consumer = make(), make()
        _, _, metadata = producer.put("0", "1", "r", payloads.big())
        other = producer.put("0", "1", "s", payloads.big(1))
        assert consumer.get("0", "1", "r", metadata)
        assert timed(0, 0.05, consumer.get, "0", "1", "r", metadata) is None
        assert payloads.same(consumer.get("0", "1", "s", other[2])[0], payloads.big(1))


class TestR28GetBeforePut:
    """A chunk that never came kept the request waiting; every read error looked like "not there yet"."""

    def test_a_nothing_comes(self, make: Any, namespace: str) -> None:
        consumer = make(key_lookup=True, namespace=namespace)
        assert timed(0.3, 0.5, consumer.get, "0", "1", "r", timeout=0.3) is None

    def test_b_it_comes_after_a_while(self, make: Any, namespace: str, run_thread: Any) -> None:
        producer = make(key_lookup=True, namespace=namespace)
        consumer = make(key_lookup=True, namespace=namespace)
        took = []
        for n in range(8):  # one that is quick will do: a busy machine only ever adds to it
            start = time.monotonic()

            def put_later(start: float = start, n: int = n) -> None:
                time.sleep(max(0.0, start + 0.1 - time.monotonic()))  # the time that the report names
                producer.put("0", "1", n, {"n": n})

            putting = run_thread(put_later)
            got = consumer.get("0", "1", n, timeout=20)
            took.append(time.monotonic() - start)
            putting.result(20)
            assert got is not None
            assert got[0] == {"n": n}
            if took[-1] < 0.15:
                break
        assert 0.1 <= min(took) < 0.15, took

    def test_c_an_unknown_key(self, make: Any, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
        consumer = make(key_lookup=True, namespace=namespace)
        assert timed(0, 0.05, consumer.get, "0", "1", "unknown") is None
        assert consumer.health()["errors"] == 0
        assert consumer.health()["misses"] >= 1
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]

    def test_d_a_segment_that_cannot_be_read(self, children: Children, make: Any, namespace: str) -> None:
        producer = children.with_connector()
        metadata = producer.run("result = c.put('0', '1', 'r', np.arange(131072))[2]")
        for name in leftovers.names(namespace):
            if name.endswith(".ctl"):
                with open(leftovers.MOUNT / name, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                    memory[:64] = b"\xc1" * 64
        consumer = make()
        with pytest.raises(MetadataError):
            consumer.get("0", "1", "r", metadata)
        assert consumer.health()["errors"] == 1
        assert consumer.health()["misses"] == 0
        producer.kill()  # its own segments are spoilt: how it would end says nothing
        consumer.close()
        leftovers.remove(namespace)

    @pytest.mark.parametrize("metadata", [{}, {"unknown": 1}, {"shm": {"name": "x"}}], ids=repr)
    def test_e_malformed_metadata(self, make: Any, metadata: Any) -> None:
        consumer = make()
        with pytest.raises(MetadataError):
            consumer.get("0", "1", "r", metadata)
        assert consumer.health()["errors"] == 1


class TestR43Aliasing:
    """Writing to a received tensor crashed the process, or changed what another reader saw."""

    @pytest.mark.parametrize("copy", [None, True])
    def test_a_tensor(self, make: Any, copy: bool | None) -> None:
        import torch

        producer, consumer = make(), make()
        _, _, metadata = producer.put("0", "1", "r", payloads.big(), consumers=2)
        first = consumer.get("0", "1", "r", metadata, copy=copy)[0]["t"]
        first.add_(1)
        second = producer.get("0", "1", "r", metadata, copy=copy)[0]["t"]
        assert torch.equal(second, torch.arange(262144.0))
        assert torch.equal(first, torch.arange(262144.0) + 1)

    def test_a_numpy_array(self, make: Any) -> None:
        producer, consumer = make(), make()
        _, _, metadata = producer.put("0", "1", "r", {"a": np.arange(262144.0)}, consumers=2)
        first = consumer.get("0", "1", "r", metadata)[0]["a"]
        assert first.flags.writeable is False
        with pytest.raises(ValueError):
            first += 1
        second = producer.get("0", "1", "r", metadata)[0]["a"]
        assert np.array_equal(second, np.arange(262144.0))

    def test_two_processes(self, make: Any, children: Children) -> None:
        producer, reader = make(), children.with_connector()
        _, _, metadata = producer.put("0", "1", "r", payloads.big(), consumers=2)
        total = reader.run(
            "import torch\nt = c.get('0', '1', 'r', md)[0]['t']; t.add_(1); result = float(t[-1])",
            md=metadata,
        )
        assert total == 262144.0
        assert payloads.same(producer.get("0", "1", "r", metadata)[0], payloads.big())

    def test_one_reader_writes_without_a_warning(self, make: Any, children: Children) -> None:
        producer, reader = make(), children.with_connector()
        _, _, metadata = producer.put("0", "1", "r", {**payloads.big(), "a": np.zeros(50_000)})
        code = (
            "import torch\n"
            "got = c.get('0', '1', 'r', md)[0]\n"
            "got['t'].add_(1); got['a'] += 1; torch.from_numpy(got['a']).mul_(3)\n"
            "result = (float(got['t'][0]), float(got['a'].sum()))"
        )
        assert reader.run(code, md=metadata) == (1.0, 150_000.0)
