"""Reports from the field about segments that stay, vanish or are taken for others, each with its input."""

from __future__ import annotations

import gc
import json
import mmap
from typing import Any

import numpy as np
import pytest
from support import leftovers, payloads
from support.child import Children, run_script

from omni_fastshm.errors import CodecError, MetadataError

BIG = "np.arange(262144, dtype=np.float32)"


def idle(connector: Any) -> bool:
    health = connector.health()
    return bool(health["live_blocks"] == 0 and health["used_bytes"] == 0 and health["leases"] == 0)


class TestR01LeakOnCrash:
    """A refused write, an undecodable read or a killed sender left files until the next boot."""

    def killed(self, children: Children) -> dict[str, Any]:
        child = children.with_connector(shm_threshold_bytes=0, orphan_ttl_s=0)
        metadata = child.run(f"result = c.put('0', '1', 'r1', {{'t': {BIG}}})[2]")
        child.kill()
        assert isinstance(metadata, dict)
        return metadata

    def test_a_and_d_a_killed_sender(self, make: Any, children: Children, shm_names: Any) -> None:
        dead = self.killed(children)
        assert shm_names()

        connector = make(shm_threshold_bytes=0)

        assert connector.get("0", "1", "r1", dead) is None
        ok, _, metadata = connector.put("0", "1", "r1", payloads.big(3))
        assert ok is True
        assert payloads.same(connector.get("0", "1", "r1", metadata)[0], payloads.big(3))
        connector.close()
        assert shm_names() == []

    def test_b_a_refused_write(self, make: Any, shm_names: Any) -> None:
        connector = make(shm_threshold_bytes=0)
        names = shm_names()
        with pytest.raises(CodecError):
            connector.put("0", "1", "r2", object())
        assert idle(connector)
        assert shm_names() == names
        connector.close()
        assert shm_names() == []

    def test_c_bytes_that_cannot_be_decoded(self, make: Any, namespace: str, shm_names: Any) -> None:
        producer, consumer = make(shm_threshold_bytes=0), make()
        _, _, metadata = producer.put("0", "1", "r3", payloads.big())
        for name in leftovers.data_names(namespace):
            with open(leftovers.MOUNT / name, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[:] = b"\xc1" * len(memory)

        with pytest.raises(MetadataError):
            consumer.get("0", "1", "r3", metadata)

        gc.collect()
        assert consumer.health()["errors"] == 1
        assert consumer.health()["leases"] == 0
        producer.cleanup("r3")
        assert idle(producer)
        _, _, metadata = producer.put("0", "1", "r3", payloads.big(1))
        assert payloads.same(consumer.get("0", "1", "r3", metadata)[0], payloads.big(1))
        producer.close()
        consumer.close()
        assert shm_names() == []


class TestR03LeakOnAbort:
    """Chunks of a cancelled request were never freed; false payloads stayed; the sender's list only grew."""

    def test_a_cancelled_request(self, make: Any, shm_names: Any) -> None:
        connector = make()
        _, _, metadata = connector.put("0", "1", "r", payloads.big())
        connector.cleanup("r")
        assert connector.get("0", "1", "r", metadata) is None
        connector.cleanup("r")
        assert idle(connector)
        connector.close()
        assert shm_names() == []

    @pytest.mark.parametrize("value", [{}, [], 0, "", b"", False, None], ids=repr)
    def test_payloads_that_are_false(self, make: Any, value: Any, shm_names: Any) -> None:
        producer, consumer = make(shm_threshold_bytes=0), make(shm_threshold_bytes=0)
        _, size, metadata = producer.put("0", "1", "f", value)
        got = consumer.get("0", "1", "f", metadata)
        assert size > 0
        assert got[1] == size
        assert payloads.same(got[0], value)
        assert idle(producer)
        producer.close()
        consumer.close()
        assert shm_names() == []

    def test_a_thousand_that_only_the_consumer_read(self, make: Any, children: Children) -> None:
        producer, there = make(), children.with_connector()
        for start in range(0, 1000, 50):
            sent = [(n, producer.put("0", "1", n, payloads.array(70_000, n))[2]) for n in range(start, start + 50)]
            assert there.run("result = [int(c.get('0', '1', n, md)[0][0]) for n, md in sent]", sent=sent) == list(
                range(start, start + 50)
            )
        assert producer.health()["live_blocks"] == 0
        assert producer.health()["used_bytes"] == 0


class TestR04DroppedUnread:
    """A result for a cancelled request was thrown away with its segment still there."""

    def test_from_the_consumer_and_at_a_normal_exit(self, children: Children, shm_names: Any) -> None:
        producer, consumer = children.with_connector(), children.with_connector()
        metadata = producer.run(f"result = c.put('0', '1', 'r1', {{'t': {BIG}}})[2]")
        producer.run(f"c.put('0', '1', 'r2', {{'t': {BIG}}})")
        assert producer.run("result = c.health()['live_blocks']") == 2

        consumer.run("c.cleanup('r1')", md=metadata)

        assert producer.run("result = c.health()['live_blocks']") == 1
        health = consumer.run("result = c.health()")
        assert (health["gets"], health["bytes_transferred"], health["leases"]) == (0, 0, 0)
        assert producer.stop() == 0  # without close
        assert consumer.stop() == 0
        assert shm_names() == []
        assert producer.stderr() == ""
        assert consumer.stderr() == ""


@pytest.mark.root
class TestR05ReaperDeletesALiveSegment:
    """Cleanup that trusts process ids destroys what a process in another PID namespace still uses."""

    def test_an_owner_whose_pid_nobody_here_can_see(self, make: Any, children: Children) -> None:
        owner = children.start(command=("unshare", "--pid", "--fork"))
        metadata = owner.run(
            "import numpy as np, os\n"
            "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
            "c = SharedMemoryConnector({'orphan_ttl_s': 0})\n"
            "assert os.getpid() < 5, 'not in a PID namespace of its own'\n"
            "ok, _, result = c.put('0', '1', 'r', np.arange(100_000))"
        )
        for _ in range(3):
            make().close()  # each start runs the janitor
        assert np.array_equal(make().get("0", "1", "r", metadata)[0], np.arange(100_000))
        assert owner.run("result = c.health()['live_blocks']; c.close()") == 0


class TestR07PrematureUnlink:
    """The segment vanished when any process that had merely attached ended."""

    def test_a_reader_that_looks_and_ends(self, make: Any, children: Children, shm_names: Any) -> None:
        producer = make()
        _, _, metadata = producer.put("0", "1", "r1", payloads.big())

        for end in ("", "c.close()"):
            looker = children.with_connector()
            looker.run(
                "try:\n"
                "    c.get('0', '1', 'another', md)\n"  # attaches, reads the header, finds another request
                "except ValueError:\n"
                "    pass\n"
                "c.cleanup('unknown')\n" + end,
                md=metadata,
            )
            assert looker.stop() == 0
            assert looker.stderr() == ""

        reader = children.with_connector()
        same = "import torch; result = torch.equal(c.get('0', '1', 'r1', md)[0]['t'], torch.arange(262144.))"
        assert reader.run(same, md=metadata)
        assert reader.stop() == 0
        assert reader.stderr() == ""
        assert idle(producer)
        producer.close()
        assert shm_names() == []


class TestR08ForkInherit:
    """A forked child removed what its parent still used, or hung on a lock held at the time of the fork."""

    def test_fifty_forks_while_another_thread_puts(self) -> None:
        run_script("fork_loop.py")


class TestR09AlreadyGone:
    """The name is removed by someone else, and the owner's own cleanup dies."""

    def test_views_cleanup_and_close_do_not_mind(self, make: Any, namespace: str) -> None:
        producer, consumer = make(), make()
        _, _, metadata = producer.put("0", "1", "r1", payloads.big())
        view = consumer.get("0", "1", "r1", metadata)[0]["t"]
        want = float(view.sum())
        leftovers.remove(namespace)

        assert float(view.sum()) == want
        producer.cleanup("r1")
        del view
        for connector in (consumer, producer):
            connector.close()
            connector.close()

    def test_a_put_never_says_true_for_what_nobody_can_reach(
        self, make: Any, children: Children, namespace: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        producer = make()
        assert producer.put("0", "1", "r1", payloads.big())[0]
        leftovers.remove(namespace)
        ok, _, metadata = producer.put("0", "1", "r2", payloads.big(1))
        assert ok, "there is room for new names"
        code = "got = c.get('0', '1', 'r2', md); result = got is not None"
        assert children.with_connector().run(code, md=metadata)
        assert "removed" in caplog.text


@pytest.mark.root
class TestR10SeveralUsers:
    """A second user of the host could neither open nor delete what the first one's run had left."""

    def test_the_second_user_works_and_leaves_the_first_one_alone(self) -> None:
        run_script("two_users.py")


class TestR11DescriptorLimit:
    """One descriptor per received tensor: a consumer that kept results ran out of them."""

    def test_five_hundred_results_with_64_descriptors(self, children: Children) -> None:
        child = children.with_connector()
        answer = child.run(
            "import resource, os\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
            "before = len(os.listdir('/proc/self/fd'))\n"
            "WANT, kept = np.arange(25_000), []\n"
            "for n in range(500):\n"
            "    ok, _, md = c.put('0', '1', n, WANT + n)\n"
            "    kept.append(c.get('0', '1', n, md)[0])\n"
            "result = (len(os.listdir('/proc/self/fd')) - before,\n"
            "          all(bool((a == WANT + n).all()) for n, a in enumerate(kept)), len(kept))\n"
        )
        grown, equal, count = answer
        assert equal
        assert count == 500
        assert grown <= 8
        assert child.run("del kept, md; result = c.health()['live_blocks']") == 0


class TestR59AnotherHost:
    """Shared memory was chosen between hosts: the reader waited for ever, or opened a local namesake."""

    def foreign(self, metadata: dict[str, Any]) -> dict[str, Any]:
        changed = json.loads(json.dumps(metadata))
        assert "host" in changed["shm"], "metadata has to say which host its memory is on"
        changed["shm"]["host"] = "another-host"
        return changed  # type: ignore[no-any-return]

    def test_shared_memory_of_another_host(self, make: Any) -> None:
        producer, consumer = make(), make()
        _, _, metadata = producer.put("0", "1", "r", payloads.big())
        foreign = self.foreign(metadata)

        with pytest.raises(MetadataError) as caught:
            consumer.get("0", "1", "r", foreign)

        assert "another-host" in str(caught.value)
        assert str(metadata["shm"]["host"]) in str(caught.value)
        assert consumer.health()["errors"] == 1
        # The local segment of the same name was not touched.
        assert producer.health()["live_blocks"] == 1
        assert payloads.same(consumer.get("0", "1", "r", metadata)[0], payloads.big())

    def test_inline_payloads_arrive_anywhere(self, make: Any) -> None:
        import sys

        producer, consumer = make(), make()
        _, _, metadata = producer.put("0", "1", "r", b"x" * 100)
        assert "shm" not in metadata
        assert consumer.get("0", "1", "r", metadata)[0] == b"x" * 100
        _, _, metadata = make(shm_threshold_bytes=sys.maxsize).put("0", "1", "r", payloads.big())
        assert set(metadata) == {"inline_bytes", "size"}
        assert payloads.same(consumer.get("0", "1", "r", metadata)[0], payloads.big())


class TestR24UseAfterUnmap:
    """An array over shared memory outlived the mapping, and the process crashed."""

    def test_slices_after_close(self, make: Any) -> None:
        import torch

        producer, consumer = make(), make()
        source = np.arange(262_144.0)
        _, _, metadata = producer.put("0", "1", "r", {"a": source})
        a = consumer.get("0", "1", "r", metadata)[0]["a"]
        s = a[5:10]
        u = torch.from_numpy(a)
        del a
        assert producer.health()["live_blocks"] == 1
        consumer.cleanup("r")
        consumer.close()
        gc.collect()
        other = make()
        for n in range(200):
            _, _, metadata = other.put("0", "1", n, {"a": np.full(262_144, -1.0)})
            assert other.get("0", "1", n, metadata)
        assert producer.health()["live_blocks"] == 1
        assert s.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]
        assert torch.equal(u, torch.from_numpy(source))
        del s
        assert producer.health()["live_blocks"] == 1
        del u
        assert producer.health()["live_blocks"] == 0

    def test_the_child_that_reads_after_everything_is_closed_does_not_crash(self, children: Children) -> None:
        child = children.with_connector()
        code = (
            "_, _, md = c.put('0', '1', 'r', {'a': np.arange(262144.)})\n"
            "a = c.get('0', '1', 'r', md)[0]['a']; s = a[5:10]; del a\n"
            "c.cleanup('r'); c.close(); c = None\n"
            "import gc; gc.collect()\n"
            "result = s.tolist()"
        )
        assert child.run(code) == [5.0, 6.0, 7.0, 8.0, 9.0]
        assert child.stop() == 0  # with the view alive at the interpreter's end
