"""Little of everything: mounts that are small, full, read-only, gone or replaced, limits of a process, of a container.

Whatever is missing, the answer is an error or a refusal that says what was wanted and what is there; never a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import payloads
from support.child import Child, Children
from support.scarce import beside, mounted

MIB = payloads.MIB
IMPORTS = """
import numpy as np, os, resource, subprocess, sys, time
from support.scarce import *
from omni_fastshm import janitor
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import *
"""
# A put that is refused at once answers long before its time is over, however busy the machine.
PATIENT_S = 30
AT_ONCE_S = 5


def child_with(children: Children, command: tuple[str, ...] = (), **settings: Any) -> Child:
    """A child whose variable ``c`` is a connector that has not put anything yet."""
    child = children.start(command=command)
    child.run(IMPORTS)
    child.run("c = SharedMemoryConnector(settings)", settings={"put_timeout_s": PATIENT_S, **settings})
    return child


def mentions(text: str, *wanted: int) -> bool:
    return all(str(number) in text for number in wanted)


@pytest.mark.root
@pytest.mark.parametrize("mib", [8, 64])
class TestSmallMount:
    """A shared memory mount of a few megabytes, as containers have it."""

    def test_a_segment_that_does_not_fit_is_an_error_or_smaller_and_never_a_crash(
        self, children: Children, mib: int
    ) -> None:
        child = child_with(
            children, mounted(f"size={mib}m"), segment_bytes=8 * mib * MIB, max_bytes=16 * mib * MIB, put_timeout_s=0.1
        )
        answers = child.run("result = [c.put('a', 'b', n, np.ones(mib * 12_500))[0] for n in range(12)]", mib=mib)
        assert answers[0] is True
        assert answers[-1] is False
        assert child.run("c.close(); result = there()") == []

    def test_the_defaults_work_on_it(self, children: Children, mib: int) -> None:
        child = child_with(children, mounted(f"size={mib}m"))
        assert child.run("result = [carries(c, mib * 50_000) for _ in range(50)]", mib=mib) == [True] * 50
        assert child.run("c.close(); result = there()") == []

    def test_what_the_whole_mount_could_not_hold_is_refused_at_once(self, children: Children, mib: int) -> None:
        child = child_with(children, mounted(f"size={mib}m"), max_bytes=16 * mib * MIB, put_timeout_s=PATIENT_S)
        text, took = child.run("result = refused(c, mib << 21)", mib=mib)
        assert took < AT_ONCE_S
        assert mentions(text, child.run("result = free()"))

    def test_orphans_give_way_when_nothing_else_does(self, children: Children, mib: int) -> None:
        most = {"segment_bytes": mib * 5 // 8 * MIB, "max_bytes": mib * 5 // 8 * MIB}
        producer = child_with(children, mounted(f"size={mib}m"), **most, orphan_ttl_s=3600)
        assert producer.run("result = c.put('a', 'b', 'r', np.ones(mib * 75_000))[0]", mib=mib)
        fresh = child_with(children, beside(producer.pid), **most)
        producer.kill()
        assert fresh.run("result = carries(c, mib * 600_000)", mib=mib)
        assert fresh.run("c.close(); result = there()") == []


@pytest.mark.root
class TestFullMount:
    """Others have taken what there was."""

    def test_from_the_start(self, children: Children) -> None:
        child = child_with(children, mounted("size=8m"), put_timeout_s=PATIENT_S)
        child.run("fill()")
        text, took = child.run("result = refused(c, 1 << 20)")
        assert took < AT_ONCE_S
        assert "bytes wanted, 0 free" in text
        with_keys = "SharedMemoryConnector({'key_lookup': True, 'namespace': 'x'})"
        assert "bytes wanted, 0 free" in child.run(
            f"try: {with_keys}; result = ''\nexcept SegmentError as error: result = str(error)"
        )
        assert "bytes wanted, 0 free" in child.run(
            "try: c.allocate(1 << 20, np.uint8); result = ''\nexcept SegmentError as error: result = str(error)"
        )
        assert child.run("result = there()") == ["filler"]
        assert child.run("result = c.put('a', 'b', 'r', 'small')[0]"), "what travels in the metadata needs no room"

        child.run("empty()")

        assert child.run("result = carries(c, 1 << 20)")
        assert child.run("c.close(); result = there()") == []

    def test_while_it_is_in_use(self, children: Children) -> None:
        sizes = {"segment_bytes": MIB, "max_bytes": 7 * MIB}
        child = child_with(children, mounted("size=8m"), **sizes, put_timeout_s=0.2)
        there = child.run(
            "sent = [c.put('a', 'b', n, np.full(60_000, n))[2] for n in range(2)]\n"
            "view = c.get('a', 'b', 0, sent[0])[0]\n"
            "fill(spare=100_000)\n"
            "result = there()"
        )
        text, _ = child.run(
            "while c.put('a', 'b', 'more', np.ones(30_000))[0]: pass\nresult = refused(c, 480_000, 'request-3')"
        )
        assert mentions(text, 480_000 // 1000, child.run("result = free()"))
        assert child.run("result = there()") == there, "an attempt to grow left something"

        # What is there goes on: for views, for takers here, for takers that come only now.
        assert child.run("result = bool((view == 0).all())")
        late = child_with(children, beside(child.pid))
        assert late.run("result = float(c.get('a', 'b', 1, md)[0].sum())", md=child.run("result = sent[1]")) == 60_000
        late.run("c.close()")
        assert child.run("result = c.put('a', 'b', 'r', 'small')[0]")
        child.run("del view; c.cleanup('more')")
        assert child.run("result = carries(c, 480_000)"), "room of our own is no room of the mount"

        child.run("empty()")
        assert child.run("result = carries(c, 3 << 20)")
        assert child.run("c.close(); result = there()") == []

    def test_no_room_for_more_descriptors(self, children: Children) -> None:
        """A control segment grows by chunks of 256: small payloads run out of these before they run out of bytes."""
        child = child_with(children, mounted("size=8m"), shm_threshold_bytes=0, put_timeout_s=0)
        sent = child.run(
            "sent = [c.put('a', 'b', 0, 0)[2]]\n"
            "fill()\n"
            "while (metadata := c.put('a', 'b', len(sent), len(sent))[2]): sent.append(metadata)\n"
            "result = sent"
        )
        assert len(sent) == 256
        assert child.run("result = [c.get('a', 'b', n, md)[0] for n, md in enumerate(sent[:9])]") == list(range(9))
        assert child.run("result = [c.put('a', 'b', n, n)[0] for n in range(9)]") == [True] * 9
        child.run("empty()")
        assert child.run("result = [c.put('a', 'b', n, n)[0] for n in range(300)]") == [True] * 300
        assert child.run("c.close(); result = there()") == []

    def test_a_put_that_waits_leaves_to_others_what_is_free(self, children: Children) -> None:
        child = child_with(children, mounted("size=64m"), segment_bytes=32 * MIB, max_bytes=256 * MIB, put_timeout_s=1)
        other = child_with(children, beside(child.pid))
        child.run("c.put('a', 'b', 'r', np.ones(3_900_000)); fill(spare=24 << 20)")
        child.start("result = c.put('a', 'b', 'r', np.ones(3_900_000))[0]")
        least = other.run(
            "end, least = time.monotonic() + 0.8, free()\n"
            "while time.monotonic() < end: least = min(least, free())\n"
            "result = least"
        )
        assert child.finish() is False
        assert least == 24 * MIB
        child.run("empty(); c.close()")
        assert other.run("c.close(); result = there()") == []


@pytest.mark.root
class TestFewNames:
    """A mount with room for bytes, but not for files."""

    # The mount itself is one; then come the directory, the control segment, the first data segment.
    @pytest.mark.parametrize(("inodes", "fitting"), [(1, 0), (2, 0), (3, 0), (4, 1)])
    def test_no_name_left(self, children: Children, inodes: int, fitting: int) -> None:
        child = child_with(
            children, mounted(f"size=64m,nr_inodes={inodes}"), segment_bytes=MIB, max_bytes=8 * MIB, put_timeout_s=0.2
        )
        assert child.run("result = [c.put('a', 'b', n, np.ones(120_000))[0] for n in range(3)]") == [
            n < fitting for n in range(3)
        ]
        assert len(child.run("result = there()")) == inodes - 1
        child.run("refused(c, 960_000); subprocess.run(['mount', '-o', 'remount,nr_inodes=100', MOUNT], check=True)")
        assert child.run("result = carries(c, 960_000)")
        assert child.run("c.close(); result = there()") == []

    @pytest.mark.parametrize("inodes", [1, 3])
    def test_the_log_says_that_it_is_not_for_want_of_bytes(self, children: Children, inodes: int) -> None:
        child = child_with(children, mounted(f"size=64m,nr_inodes={inodes}"), put_timeout_s=0.2)
        text, _ = child.run("result = refused(c, 960_000)")
        child.run("c.close()")
        assert "inode" in text


class TestLimits:
    """Limits of one process."""

    def test_of_a_file_s_size(self, children: Children, shm_names: Any) -> None:
        child = child_with(children)
        child.run("resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))")
        text, took = child.run("result = refused(c, 2 << 20)")
        assert took < AT_ONCE_S
        assert os.strerror(27) in text  # EFBIG
        assert all(name.endswith(".dir") for name in shm_names()), "what was begun is still there"
        child.run("resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))")
        assert child.run("result = carries(c, 2 << 20)")

    @pytest.mark.parametrize("spare", range(4))
    def test_of_descriptors(self, children: Children, spare: int) -> None:
        """With none to spare, and with ever more: making segments fails at ever later steps."""
        child = child_with(children, segment_bytes=MIB)
        child.run(
            "view = np.ones(9); listed = len(os.listdir('/proc/self/fd')) - 1\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (listed + spare, 4096))",
            spare=spare,
        )
        answer = child.run(
            "try:\n"
            "    ok, _, md = c.put('a', 'b', 'r', np.arange(100_000))\n"
            "    view = c.get('a', 'b', 'r', md)[0] if ok else None\n"
            "    result = 'refused' if view is None else 'carried'\n"
            "except SegmentError as error:\n"
            "    result = str(error)"
        )
        assert answer in ("refused", "carried") or "open" in answer, answer
        assert spare or answer == "refused"
        child.run("resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")
        if answer not in ("refused", "carried"):
            assert child.run("result = c.get('a', 'b', 'r', md) is not None"), "a get that failed used the payload up"
        assert child.run("result = carries(c, 800_000)")

    def test_of_descriptors_while_views_are_held(self, children: Children) -> None:
        child = child_with(children, segment_bytes=MIB, max_bytes=4 * MIB, put_timeout_s=0)
        other = child_with(children)
        far = other.run("result = c.put('a', 'b', 'far', np.arange(100_000))[2]")
        child.run(
            "ok, _, md = c.put('a', 'b', 'r', np.arange(100_000))\n"
            "view = c.get('a', 'b', 'r', md)[0]\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))"
        )
        text, _ = child.run("result = refused(c, 800_000)")
        assert "files open" in text
        assert "files open" in child.run(
            "try: c.get('a', 'b', 'far', far); result = ''\nexcept SegmentError as error: result = str(error)", far=far
        )
        assert child.run("result = int(view[99_999])") == 99_999
        child.run("del view")
        assert child.run("result = carries(c, 800_000)"), "the room that the view had is there again"
        child.run("resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")
        assert child.run("result = int(c.get('a', 'b', 'far', far)[0][99_999])") == 99_999

    def test_of_locked_memory(self, children: Children) -> None:
        child = child_with(children)
        child.run("resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))")
        assert child.run("result = carries(c, 1 << 20)")

    def test_of_address_space(self, children: Children, shm_names: Any) -> None:
        child = child_with(children, segment_bytes=64 * MIB, max_bytes=256 * MIB, put_timeout_s=0)
        answer = child.run(
            "data = np.arange(3 << 20)  # 24 MiB\n"
            "with open('/proc/self/statm') as file: used = int(file.read().split()[0]) * 4096\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))\n"
            "result = c.put('a', 'b', 'r', data)[0]"
        )
        assert answer is False
        assert not [name for name in shm_names() if not name.endswith((".dir", ".ctl"))]
        child.run("resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))")
        assert child.run("result = carries(c, 24 << 20)")


def memory_groups() -> Path:
    """Where memory cgroups can be made, of whichever version; skips where that cannot be done."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        probe = Path(root) / f"omnifs-probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            try:
                if (probe / limit).exists():
                    return Path(root)
            finally:
                probe.rmdir()
    pytest.skip("no memory cgroup can be made here")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup that is gone again after the test."""
    group = memory_groups() / f"omnifs-{os.getpid()}"
    group.mkdir()
    yield group
    group.rmdir()


@pytest.mark.root
class TestMemoryGroup:
    """The memory limit of a container. Shared memory counts for whoever touches it first: its producer."""

    def test_a_producer_over_the_limit_is_killed_and_the_others_go_on(
        self, make: Any, memory_group: Path, children: Children, shm_names: Any
    ) -> None:
        child = child_with(children, segment_bytes=16 * MIB, max_bytes=1024 * MIB, orphan_ttl_s=60)
        limit = next(path for name in ("memory.limit_in_bytes", "memory.max") if (path := memory_group / name).exists())
        limit.write_text(str(160 * MIB))
        if (memory_group / "memory.swap.max").exists():
            (memory_group / "memory.swap.max").write_text("0")
        (memory_group / "cgroup.procs").write_text(str(child.pid))
        child.killed = True
        child.start("for n in range(100):\n    data = np.full(1 << 20, n)\n    emit((n, c.put('a', 'b', n, data)[2]))")
        sent = []
        with pytest.raises(AssertionError, match=rf"died \(exit code {-signal.SIGKILL}\)"):
            while True:
                sent.append(child.event())
        assert 2 < len(sent) < 30
        consumer = make()
        for n, metadata in sent:
            got = consumer.get("a", "b", n, metadata)
            assert got is not None, f"payload {n} of {len(sent)} went with its producer"
            assert np.array_equal(got[0], np.full(1 << 20, n))
        del got
        make().close()
        assert [name for name in shm_names() if not name.endswith(".dir")] == []


@pytest.mark.root
class TestMount:
    """The mount itself is unusable, or another one."""

    def test_read_only(self, children: Children) -> None:
        child = child_with(children, mounted("size=8m,ro"))
        text, took = child.run("result = refused(c, 1 << 20)")
        assert took < AT_ONCE_S
        assert "Read-only" in text
        assert "/dev/shm" in text
        child.run("subprocess.run(['mount', '-o', 'remount,rw', MOUNT], check=True)")
        assert child.run("result = carries(c, 1 << 20)")
        assert child.run("c.close(); result = there()") == []

    def test_read_only_for_the_consumer(self, children: Children) -> None:
        producer = child_with(children, mounted("size=8m"))
        metadata = producer.run("result = c.put('a', 'b', 'r', np.arange(100_000))[2]")
        consumer = child_with(
            children, (*beside(producer.pid), "unshare", "-m", "sh", "-c", READ_ONLY_HERE, "sh"), put_timeout_s=0
        )
        assert "Read-only" in consumer.run(
            "try: c.get('a', 'b', 'r', md); result = ''\nexcept SegmentError as error: result = str(error)",
            md=metadata,
        )
        assert producer.run("result = int(c.get('a', 'b', 'r', md)[0].sum())", md=metadata) == sum(range(100_000))

    def absent(self, children: Children, instead: str) -> Child:
        child = child_with(children, ("unshare", "-m"))
        child.run(f"subprocess.run(['mount', '-t', 'tmpfs', 'none', '/dev'], check=True)\n{instead}")
        return child

    @pytest.mark.parametrize("instead", ["pass", "open('/dev/shm', 'w').close()"], ids=["nothing", "a file"])
    def test_absent(self, children: Children, instead: str) -> None:
        child = self.absent(children, instead)
        assert child.run("result = refused(c, 1 << 20)")[1] < AT_ONCE_S
        assert child.run(
            "try: SharedMemoryConnector({'key_lookup': True, 'namespace': 'x'}); result = ''\n"
            "except SegmentError as error: result = str(error)"
        )
        assert child.run("result = c.get('a', 'b', 'r', c.put('a', 'b', 'r', 'small')[2])[0]") == "small"
        child.run(
            "if os.path.exists(MOUNT): os.unlink(MOUNT)\nos.mkdir(MOUNT)",
        )
        assert child.run("result = carries(c, 1 << 20)"), "a mount that comes later is used"
        assert child.run("c.close(); result = there()") == []

    def test_absent_is_what_the_log_says(self, children: Children) -> None:
        child = self.absent(children, "pass")
        text, _ = child.run("result = refused(c, 1 << 20)")
        assert "/dev/shm" in text
        assert "mounted" in text

    def test_made_smaller_and_larger_while_in_use(self, children: Children) -> None:
        child = child_with(children, mounted("size=64m"), segment_bytes=4 * MIB, max_bytes=64 * MIB, put_timeout_s=0)
        child.run("sent = [c.put('a', 'b', n, np.full(250_000, n))[2] for n in range(2)]")
        child.run("subprocess.run(['mount', '-o', 'remount,size=8m', MOUNT], check=True)")
        child.run("while (md := c.put('a', 'b', len(sent), np.full(250_000, len(sent)))[2]): sent.append(md)")
        text, _ = child.run("result = refused(c, 2_000_000)")
        assert mentions(text, child.run("result = free()"))
        assert child.run("result = [bool((c.get('a', 'b', n, md)[0] == n).all()) for n, md in enumerate(sent)]") == [
            True
        ] * child.run("result = len(sent)")
        child.run("subprocess.run(['mount', '-o', 'remount,size=64m', MOUNT], check=True)")
        assert child.run("result = carries(c, 20 << 20)")
        assert child.run("c.close(); result = there()") == []

    def test_another_one_mounted_over_it_while_in_use(self, children: Children) -> None:
        """Names are gone and memory stays: for views, for what is mapped, for the end of it all."""
        child = child_with(children, mounted("size=64m"), segment_bytes=4 * MIB, put_timeout_s=0)
        child.run(
            "sent = [c.put('a', 'b', n, np.full(250_000, n))[2] for n in range(2)]\n"
            "view = c.get('a', 'b', 0, sent[0])[0]\n"
            "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=8m', 'none', MOUNT], check=True)"
        )
        assert child.run("result = bool((view == 0).all())")
        assert child.run("result = bool((c.get('a', 'b', 1, sent[1])[0] == 1).all())"), (
            "it is mapped: no name is needed"
        )
        fresh = child_with(children, beside(child.pid), put_timeout_s=0)
        assert fresh.run("result = carries(c, 1 << 20)")
        assert "host" in fresh.run(
            "try: c.get('a', 'b', 'r', md); result = ''\nexcept MetadataError as error: result = str(error)",
            md=child.run("result = c.put('a', 'b', 'r', np.ones(250_000))[2]"),
        )
        fresh.run("c.close()")
        assert child.run("c.close(); result = bool((view == 0).all())")
        assert child.run("result = there()") == []


READ_ONLY_HERE = 'mount --bind /dev/shm /dev/shm && mount -o remount,bind,ro /dev/shm && exec "$@"'
