"""SIGKILL, and other ends, at the worst moment: the others go on, and nothing stays behind."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from support import leftovers, payloads
from support.child import Children, run_script
from support.steps import PUT_BIG, big

MIB = payloads.MIB


class TestDeath:
    """SIGKILL at the worst moment leaves the others at work."""

    def killed_with_payload(self, children: Children, **settings: Any) -> dict[str, Any]:
        child = children.with_connector(**settings)
        metadata = child.run(PUT_BIG, rid="r", seed=5)[2]
        child.kill()
        assert isinstance(metadata, dict)
        return metadata

    def test_what_a_killed_producer_sent_can_still_be_got(self, make: Any, children: Children, shm_names: Any) -> None:
        metadata = self.killed_with_payload(children)
        consumer = make()
        got = consumer.get("0", "1", "r", metadata)
        assert payloads.same(got[0], big(5))
        assert consumer.get("0", "1", "r", metadata) is None
        make()  # the start of a connector runs the janitor, while the view still lives
        assert payloads.same(got[0], big(5))
        del got
        make().close()
        left = [n for n in shm_names() if metadata["shm"]["name"].strip("/") in n]
        assert left == [], "the dead producer's segments outlive its last payload"

    def test_by_key_too(self, make: Any, children: Children, namespace: str) -> None:
        settings = {"key_lookup": True, "namespace": namespace}
        self.killed_with_payload(children, **settings)
        assert payloads.same(make(**settings).get("0", "1", "r")[0], big(5))
        make(**settings)

    def test_by_key_after_others_came_and_went(self, make: Any, children: Children, namespace: str) -> None:
        """The last living endpoint leaves the directory there: what the dead one sent is found through it."""
        settings = {"key_lookup": True, "namespace": namespace}
        self.killed_with_payload(children, **settings)
        make(**settings).close()
        make(**settings).close()
        assert payloads.same(make(**settings).get("0", "1", "r")[0], big(5))
        make(**settings).close()  # its start runs the janitor

    def test_within_its_time_an_orphan_is_not_swept(self, make: Any, children: Children) -> None:
        metadata = self.killed_with_payload(children, orphan_ttl_s=60)
        for _ in range(3):
            make(orphan_ttl_s=0).close()  # the time that counts is the producer's own
        got = make().get("0", "1", "r", metadata)
        assert payloads.same(got[0], big(5))
        del got
        make()

    def test_after_its_time_it_is_swept_at_the_next_start(self, make: Any, children: Children, shm_names: Any) -> None:
        metadata = self.killed_with_payload(children, orphan_ttl_s=0)
        assert shm_names()
        fresh = make(orphan_ttl_s=60)
        assert fresh.get("0", "1", "r", metadata) is None
        fresh.close()
        assert shm_names() == []

    def test_a_producer_killed_in_the_middle_of_put(self, make: Any, children: Children, shm_names: Any) -> None:
        for _ in range(5):
            child = children.with_connector(orphan_ttl_s=0)
            child.start(
                "data = np.zeros(4_000_000)\n"
                "emit(0)\n"
                "while True:\n"
                "    c.get('a', 'b', 'r', c.put('a', 'b', 'r', data)[2])"
            )
            child.event()
            time.sleep(0.02)  # not to synchronise: the kill shall hit anywhere in the loop
            child.kill()
        make().close()
        assert shm_names() == []

    def test_a_killed_consumer_gives_back_what_it_held(self, make: Any, children: Children) -> None:
        producer = make(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=30)
        _, _, metadata = producer.put("a", "b", "1", payloads.array(3 * MIB))
        child = children.with_connector()
        child.run("view = c.get('a', 'b', '1', md)", md=metadata)
        assert producer.health()["live_blocks"] == 1
        child.kill()

        start = time.monotonic()
        ok, _, metadata = producer.put("a", "b", "2", payloads.array(3 * MIB, 2))

        assert ok
        assert time.monotonic() - start < 15, "the space came only after a wait"
        assert payloads.same(producer.get("a", "b", "2", metadata)[0], payloads.array(3 * MIB, 2))

    def test_a_producer_that_already_waits_notices_the_death(
        self, make: Any, children: Children, run_thread: Any
    ) -> None:
        producer = make(segment_bytes=4 * MIB, max_bytes=4 * MIB, put_timeout_s=20)
        _, _, metadata = producer.put("a", "b", "1", payloads.array(3 * MIB))
        child = children.with_connector()
        child.run("view = c.get('a', 'b', '1', md)", md=metadata)
        waiting = run_thread(producer.put, "a", "b", "2", payloads.array(3 * MIB))
        with pytest.raises(NotYet):
            waiting.result(0.3)
        child.kill()
        assert waiting.result(10)[0], "nobody rings when a holder dies: the waiting producer has to look"

    def test_the_views_of_the_living_are_not_given_back_with_those_of_the_dead(
        self, make: Any, children: Children
    ) -> None:
        producer, consumer = make(segment_bytes=MIB, max_bytes=4 * MIB, put_timeout_s=0), make()
        first, second = children.with_connector(), children.with_connector()
        _, _, metadata = producer.put("0", "1", "r", payloads.array(500_000, 7), consumers=3)
        view = consumer.get("0", "1", "r", metadata)[0]
        take = "view = c.get('0', '1', 'r', md)[0]; result = int(view.sum())"
        assert first.run(take, md=metadata) == second.run(take, md=metadata) == int(view.sum())
        first.kill()
        for n in range(60):
            ok, _, again = producer.put("0", "1", n, payloads.array(500_000, n))
            assert ok
            assert producer.get("0", "1", n, again)
        assert payloads.same(view, payloads.array(500_000, 7))
        assert second.run("result = int(view.sum())") == int(view.sum())
        # The dead one's hold is looked for when room is needed, and those of the living stay.
        assert not producer.put("0", "1", "all", payloads.array(int(3.6 * MIB)))[0]
        del view
        assert not producer.put("0", "1", "all", payloads.array(int(3.6 * MIB)))[0]
        second.run("del view")
        assert producer.put("0", "1", "all", payloads.array(int(3.6 * MIB)))[0]

    def test_a_consumer_killed_in_its_wait_disturbs_nobody(self, make: Any, children: Children, namespace: str) -> None:
        settings = {"key_lookup": True, "namespace": namespace}
        producer = make(**settings)
        waiters = [children.with_connector(**settings) for _ in range(3)]
        for n, child in enumerate(waiters):
            child.start("emit(0); result = c.get('a', 'b', rid, timeout=None)[0]", rid=n)
            child.event()
        waiters[1].kill()
        for n in (0, 2):
            producer.put("a", "b", n, n * 10)
            assert waiters[n].finish() == n * 10
        producer.put("a", "b", 1, 10)
        assert producer.get("a", "b", 1)[0] == 10

    def test_readers_may_come_and_die_without_end(self) -> None:
        run_script("dying_readers.py", "36")

    def test_a_producer_that_ends_without_close_takes_its_segments_along(
        self, children: Children, shm_names: Any
    ) -> None:
        child = children.with_connector()
        child.run(PUT_BIG, rid="r", seed=1)
        assert shm_names()
        assert child.stop() == 0
        assert shm_names() == []
        assert child.stderr() == ""

    def test_the_last_one_removes_the_directory(self, make: Any, children: Children, shm_names: Any) -> None:
        child = children.with_connector()
        first = make()
        first.put("a", "b", "r", payloads.array(100_000))
        first.close()
        assert child.run(PUT_BIG, rid="r", seed=1)[0]
        child.run("c.cleanup('r'); c.close()")
        assert shm_names() == []

    def test_other_namespaces_are_not_swept(self, make: Any, children: Children, namespace: str) -> None:
        for other in (namespace + "x", namespace[:-1] + "-"):
            child = children.with_connector(namespace=other, orphan_ttl_s=0)
            metadata = child.run(PUT_BIG, rid="r", seed=1)[2]
            child.kill()
            names = leftovers.names(other)
            make().close()
            assert leftovers.names(other) == names
            cleaner = make(namespace=other)
            assert cleaner.get("0", "1", "r", metadata) is None
            cleaner.close()
            assert leftovers.names(other) == []
