"""What holds between processes that all live."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np
import pytest
from support import payloads
from support.child import Children, run_script
from support.steps import PUT_BIG, SAME, big
from support.waiting import until

from omni_fastshm.errors import CodecError

MIB = payloads.MIB


class TestHandOver:
    def test_from_a_child_and_back(self, make: Any, children: Children) -> None:
        here, there = make(), children.with_connector()
        for n in range(20):
            ok, size, metadata = there.run(PUT_BIG, rid=n, seed=n)
            assert ok
            got, size_got = here.get("0", "1", n, metadata)
            assert payloads.same(got, big(n))
            assert size_got == size
            _, size, metadata = here.put("1", "2", n, got)
            assert there.run("got = c.get('1','2',rid,md);" + SAME, rid=n, seed=n, md=metadata) is True
            assert there.run("result = got[1]; del got") == size
        del got
        assert here.health()["live_blocks"] == 0
        assert there.run("result = c.health()['live_blocks']") == 0

    def test_every_type_between_processes(self, make: Any, children: Children) -> None:
        there = children.with_connector()
        there.run("from support import payloads\nok, size, md = c.put('0', '1', 'r', payloads.tree(4))")
        got, _ = make().get("0", "1", "r", there.run("result = md"))
        for key, value in payloads.tree(4).items():
            assert payloads.same(got[key], value), key

    def test_views_outlive_the_producer(self, make: Any, children: Children, shm_names: Any) -> None:
        consumer, there = make(), children.with_connector()
        _, _, metadata = there.run(PUT_BIG, rid="r", seed=3)
        view = consumer.get("0", "1", "r", metadata)[0]["a"][100:]
        there.run("c.close()")
        assert np.array_equal(view, big(3)["a"][100:])
        assert there.stop() == 0
        again = children.with_connector()
        for n in range(20):
            again.run(PUT_BIG + "; c.cleanup(rid)", rid=n, seed=n)
        assert np.array_equal(view, big(3)["a"][100:])
        again.run("c.close()")
        consumer.close()
        assert shm_names() == []

    @pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
    def test_views_of_loans_outlive_the_producer(self, children: Children, killed: bool) -> None:
        """The pieces lie outside the payload's frame: their memory has to stay as well."""
        small = {"segment_bytes": MIB, "max_bytes": 16 * MIB, "idle_segment_s": 0, "orphan_ttl_s": 0}
        producer, consumer = children.with_connector(**small), children.with_connector()
        metadata = producer.run(
            "loans = [c.allocate(100_000, np.int64) for _ in range(4)]\n"
            "for n, loan in enumerate(loans): loan[:] = n\n"
            "md = c.put('0', '1', 'r', {'x': loans})[2]; del loans, loan; result = md"
        )
        look = "result = [(int(x.min()), int(x.max())) for x in views]"
        assert consumer.run("views = c.get('0', '1', 'r', md)[0]['x'];" + look, md=metadata) == [
            (n, n) for n in range(4)
        ]
        # Room is made and given back again: the loans' segments must not be among what goes.
        producer.run("for n in range(20): c.put('0', '1', n, np.arange(300_000)); c.cleanup(n)")
        assert consumer.run(look) == [(n, n) for n in range(4)]
        if killed:
            producer.kill()
        else:
            producer.run("c.close()")
        for _ in range(2):  # its start runs the janitor
            fresh = children.with_connector(**small)
            fresh.run("for n in range(20): c.put('0', '1', n, np.full(300_000, -1)); c.cleanup(n)")
        assert consumer.run(look) == [(n, n) for n in range(4)]
        consumer.run("del views")
        children.with_connector()

    def test_a_release_in_another_process_wakes_the_producer(
        self, make: Any, children: Children, run_thread: Any
    ) -> None:
        producer = make(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=20)
        there = children.with_connector()
        _, _, metadata = producer.put("a", "b", "1", payloads.array(3 * MIB))
        there.run("view = c.get('a', 'b', '1', md)", md=metadata)
        waiting = run_thread(lambda: (producer.put("a", "b", "2", payloads.array(3 * MIB, 2)), time.monotonic()))
        until(lambda: producer._producer.queue)
        with pytest.raises(NotYet):
            waiting.result(0.3)  # not to synchronise: it shall be asleep, and not in its first microseconds
        released = there.run("import time; t = time.monotonic(); del view; result = t")
        (ok, _, _), woken = waiting.result(20)
        assert ok
        assert woken - released < 5
        assert producer.health()["blocked_s"] > 0.1

    def test_a_waiting_get_is_woken_by_another_process(self, make: Any, children: Children) -> None:
        settings = {"key_lookup": True, "namespace": os.environ["OMNI_FASTSHM_NAMESPACE"]}
        producer = make(**settings)
        there = children.with_connector(**settings)
        there.start("emit(0); result = (c.get('a', 'b', 'r', timeout=None)[0], __import__('time').monotonic())")
        there.event()
        time.sleep(0.3)  # not to synchronise: it shall be asleep, and not in its first microseconds
        producer.put("a", "b", "r", "here")
        sent = time.monotonic()
        value, woken = there.finish()
        assert value == "here"
        assert woken - sent < 5

    def test_cleanup_of_another_process(self, make: Any, children: Children) -> None:
        producer, there = make(), children.with_connector()
        metadata = [producer.put("0", "1", f"r{n}", big(n))[2] for n in range(3)]
        there.run("c.cleanup('r1')")
        assert producer.health()["live_blocks"] == 2
        assert producer.get("0", "1", "r1", metadata[1]) is None
        assert payloads.same(producer.get("0", "1", "r2", metadata[2])[0], big(2))

    def test_more_readers_than_slots(self) -> None:
        run_script("many_readers.py", "40")

    def test_a_class_that_the_receiver_learns_later(self, make: Any, children: Children) -> None:
        consumer, there = make(), children.with_connector()
        sys.modules.pop("support.late_types", None)
        for threshold, rid in ((1 << 20, "inline"), (0, "large")):
            there.run(
                "from support.late_types import Late\n"
                "own = SharedMemoryConnector({'shm_threshold_bytes': threshold})\n"
                "ok, size, md = own.put('0', '1', rid, [1, Late(np.arange(9000))]); keep = [*keep, own]",
                threshold=threshold,
                rid=rid,
                **({"keep": []} if rid == "inline" else {}),
            )
            metadata = there.run("result = md")
            for _ in range(3):
                with pytest.raises(CodecError) as caught:
                    consumer.get("0", "1", rid, metadata)
                assert "support.late_types" in str(caught.value)
                assert "Late" in str(caught.value)
                assert "register_type" in str(caught.value)
                del caught  # its traceback holds the frames that hold the lease
            assert "support.late_types" not in sys.modules, "a module was imported by a name from the wire"
            assert consumer.health()["leases"] == 0

            from support.late_types import Late

            got = consumer.get("0", "1", rid, metadata)[0]
            assert type(got[1]) is Late
            assert np.array_equal(got[1].value, np.arange(9000))
            sys.modules.pop("support.late_types", None)

    def test_modules_named_in_types_may_be_imported(self, make: Any, children: Children) -> None:
        consumer, there = make(types=["support.late_types:Late"]), children.with_connector()
        sys.modules.pop("support.late_types", None)
        there.run("from support.late_types import Late; ok, size, md = c.put('0', '1', 'r', Late(5))")
        got = consumer.get("0", "1", "r", there.run("result = md"))[0]
        assert (type(got).__name__, got.value) == ("Late", 5)

    def test_memory_stays_flat(self, make: Any, children: Children) -> None:
        def resident() -> int:
            with open("/proc/self/statm") as file:
                pages = file.read().split()
            return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")

        producer, consumer = make(segment_bytes=MIB, max_bytes=8 * MIB), make()
        payload = {"a": payloads.array(70_000), "n": 1}
        before = 0
        # More than there are request ids whose hashes the library remembers: until then memory grows by these.
        warm = 12_000
        for n in range(2 * warm):
            if n == warm:
                before = resident()
            _, _, metadata = producer.put("0", "1", f"request-{n}", payload)
            assert consumer.get("0", "1", f"request-{n}", metadata)
        assert resident() - before < 2 * MIB


class TestFork:
    def test_an_inherited_connector_refuses_and_takes_nothing_away(self) -> None:
        run_script("fork_inherits.py")
