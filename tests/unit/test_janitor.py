"""Sweeping beside things that the sweeper must leave alone, and what it takes, in which order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Child, Children
from support.planted import dangling, fifo, folder, link, other_user

from omni_fastshm import consumer, directory, janitor, segments
from omni_fastshm._core import CONTROL_SIZE, LOCK_OWNER, Inbox, Segment
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import MetadataError
from omni_fastshm.reading import ENDPOINT_LIMIT

ENDPOINT = "0123456789abcdef"
OBJECTS = [f"{ENDPOINT}.ctl", f"{ENDPOINT}.d0", f"{ENDPOINT}.d17", "dir"]


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    # Of a megabyte, which needs no thread to get its memory: nothing changes behind a test that looks twice.
    return lambda **settings: connect(SharedMemoryConnector, **{"segment_bytes": 1 << 20, **settings})


KINDS = [link, dangling, folder, fifo, pytest.param(other_user, marks=pytest.mark.root)]


@pytest.fixture
def plant(namespace: str) -> Iterator[Callable[[Any, str], Path]]:
    """A function that puts something that is not ours under one of our names."""

    def put_there(kind: Callable[[Path], None], suffix: str) -> Path:
        path = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{suffix}"
        kind(path)
        return path

    yield put_there
    leftovers.remove(namespace)


@pytest.mark.parametrize("kind", KINDS)
class TestForeign:
    """What stands under one name keeps nobody from working with the others."""

    @pytest.mark.parametrize("suffix", OBJECTS[:-1])
    @pytest.mark.parametrize("key_lookup", [False, True])
    def test_connectors_start_and_work(self, make: Any, plant: Any, kind: Any, suffix: str, key_lookup: bool) -> None:
        path = plant(kind, suffix)
        before = os.lstat(path)
        one, two = make(key_lookup=key_lookup), make(key_lookup=key_lookup)
        ok, _, metadata = one.put("a", "b", "r", np.arange(50_000))
        assert ok
        assert two.get("a", "b", "r", None if key_lookup else metadata) is not None
        one.close()
        two.close()
        assert os.lstat(path).st_ino == before.st_ino

    def test_in_place_of_the_directory(self, make: Any, plant: Any, kind: Any, namespace: str) -> None:
        path = plant(kind, "dir")
        connector = make()
        assert connector.get("a", "b", "r", connector.put("a", "b", "r", 1)[2])[0] == 1
        with pytest.raises(MetadataError, match=rf"{path.name}.*refused"):
            make(key_lookup=True)
        connector.close()
        assert os.path.lexists(path)

    @pytest.mark.parametrize("suffix", OBJECTS)
    def test_a_sweep_names_it_and_goes_on(
        self, plant: Any, kind: Any, suffix: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = plant(kind, suffix)
        stray = plant(Path.touch, "fedcba9876543210.d3")
        swept = janitor.sweep(os.environ["OMNI_FASTSHM_NAMESPACE"])
        assert swept.removed == [stray.name]
        assert os.path.lexists(path)
        assert f"{path.name} left alone" in caplog.text

    @pytest.mark.parametrize("number", ["1", "07", "\u00b2", "\u0663", "x", ""])
    def test_among_the_segments_of_a_dead_producer(
        self, make: Any, plant: Any, kind: Any, children: Children, shm_names: Any, caplog: Any, number: str
    ) -> None:
        child = children.with_connector(orphan_ttl_s=0)
        name = child.run("result = c.put('a', 'b', 'r', np.arange(50_000))[2]['shm']['name']")
        child.kill()
        assert child.process.returncode == -signal.SIGKILL
        path = plant(kind, f"{name.split('.')[-2]}.d{number}")
        make(orphan_ttl_s=0).close()
        assert shm_names() == [path.name]
        caplog.clear()  # the log keeps the error, and with it the descriptors of the functions it went through


def test_a_data_segment_made_after_the_look_round_goes_as_well(
    children: Children, namespace: str, shm_names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producer grew, and died, between a sweep's listing of all names and its getting the lock."""
    child = children.with_connector(orphan_ttl_s=0)
    child.run("result = c.put('a', 'b', 'r', np.arange(50_000))[0]")
    child.kill()
    assert child.process.returncode == -signal.SIGKILL
    listings = []

    def list_names(prefix: str) -> list[str]:
        listings.append(prefix)
        names = real(prefix)
        return [name for name in names if name.endswith(".ctl")] if len(listings) == 1 else names

    real = segments.list_names
    monkeypatch.setattr(segments, "list_names", list_names)
    janitor.sweep(namespace)
    assert shm_names() == []


@pytest.fixture
def dead_ones(children: Children, namespace: str) -> Iterator[Callable[..., list[str]]]:
    """A function that leaves killed producers, one for each dict of settings, each with one untaken payload.

    It gives the names of their control segments. They die together: the start of each would sweep those before.
    """

    def kill(*settings: dict[str, Any]) -> list[str]:
        started = [children.with_connector(segment_bytes=1 << 20, **each) for each in settings]
        put = "result = c.put('a', 'b', request, np.arange(100_000), consumers=2)[2]['shm']['name']"
        names = [child.run(put, request=f"r{n}") for n, child in enumerate(started)]
        for child in started:
            child.kill()
        return names

    yield kill
    leftovers.remove(namespace)


@pytest.fixture
def dead(dead_ones: Callable[..., list[str]]) -> Callable[..., str]:
    """The same for one."""
    return lambda **settings: dead_ones(settings)[0]


def data_of(control: str) -> Path:
    return leftovers.MOUNT / segments.data_name(control, 0)


class TestWhatIsKept:
    """The answer says what is kept, for how long, and what was given back."""

    def test_within_its_time_and_after(self, dead: Any, namespace: str, shm_names: Any) -> None:
        name = dead(orphan_ttl_s=100)
        first, second = janitor.sweep(namespace), janitor.sweep(namespace)
        for swept in (first, second):
            assert (swept.removed, swept.alive, swept.left_alone, swept.dropped, swept.freed) == ([], [], {}, 0, 0)
            (kept,) = swept.kept
            assert (kept.name, kept.payloads) == (name, 1)
            assert kept.seconds_left + kept.dead_s == pytest.approx(100)
        assert second.kept[0].seconds_left < first.kept[0].seconds_left <= 100
        memory = sum((leftovers.MOUNT / each).stat().st_blocks * 512 for each in shm_names())
        forced = janitor.sweep(namespace, force=True)
        assert (len(forced.removed), forced.kept, forced.dropped) == (3, [], 1)
        assert forced.freed == memory
        assert shm_names() == []

    def test_what_a_reader_looks_at_is_not_given_back(self, dead: Any, namespace: str) -> None:
        name = dead(orphan_ttl_s=0)
        inbox = consumer.open_inbox(name)
        assert inbox is not None
        lease = inbox.hold(0, 1)
        assert lease is not None
        with open(data_of(name), "rb") as file:
            swept = janitor.sweep(namespace)
            assert os.fstat(file.fileno()).st_size > 800_000
        assert (len(swept.removed), swept.dropped) == (3, 1)
        assert swept.freed == directory.SIZE, "the data and its descriptors take memory for as long as they are held"
        assert len(bytes(lease)) > 800_000
        del lease, inbox

    def test_memory_comes_back_though_a_reader_has_it_mapped(self, dead: Any, namespace: str) -> None:
        name = dead(orphan_ttl_s=0)
        inbox = consumer.open_inbox(name)
        assert inbox is not None
        lease = inbox.hold(0, 1)
        assert lease is not None
        lease.release()
        with open(data_of(name), "rb") as file:
            swept = janitor.sweep(namespace)
            assert os.fstat(file.fileno()).st_blocks == 0
        assert swept.freed > 800_000
        del lease, inbox

    def test_a_reader_that_begins_while_it_is_swept(self, dead: Any, namespace: str, monkeypatch: Any) -> None:
        name = dead(orphan_ttl_s=0)
        reader = consumer.open_inbox(name)
        assert reader is not None
        leases: list[Any] = []

        class Late:
            """The janitor's view of the producer; a reader sets its bit after the janitor looked for the first time."""

            def __init__(self, *args: Any) -> None:
                self._inner = Inbox(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def reap(self) -> int:
                leases.append(reader.hold(0, 1))
                return int(self._inner.reap())

        monkeypatch.setattr(janitor, "Inbox", Late)
        with open(data_of(name), "rb") as file:
            assert janitor.sweep(namespace).dropped == 1
            assert os.fstat(file.fileno()).st_size > 800_000
        assert leases.pop() is not None

    def test_the_living(self, make: Any, namespace: str) -> None:
        connector = make()
        connector.put("a", "b", "r", np.arange(50_000))
        swept = janitor.sweep(namespace, force=True)
        assert (swept.alive, swept.removed, swept.kept) == ([connector._producer.name], [], [])


class OnlyLooks:
    """`Segment` as the janitor sees it, without the right to lock anything."""

    inspect = staticmethod(Segment.inspect)
    locked = staticmethod(Segment.locked)

    @staticmethod
    def lock(*args: Any) -> bool:
        raise AssertionError("took a lock")


def stand(namespace: str) -> list[tuple[Any, ...]]:
    found = [(name, (leftovers.MOUNT / name).lstat()) for name in leftovers.names(namespace)]
    return [(name, s.st_ino, s.st_size, s.st_blocks, s.st_mtime_ns, s.st_ctime_ns) for name, s in found]


class TestPreview:
    """What would be done is what is done, and nothing is done."""

    @pytest.mark.parametrize("force", [False, True])
    def test_it_foretells_the_sweep(
        self, make: Any, dead_ones: Any, plant: Any, namespace: str, force: bool, caplog: Any
    ) -> None:
        reader = make(key_lookup=True, namespace=namespace)
        held = dead_ones(*[{"orphan_ttl_s": ttl} for ttl in (0, 0, 100)])[0]
        inbox = consumer.open_inbox(held)
        assert inbox is not None
        lease = inbox.hold(0, 1)
        plant(Path.touch, f"{ENDPOINT}.ctl")
        plant(Path.touch, f"{ENDPOINT}.d4")
        plant(Path.touch, "00000000000000ff.d0")
        plant(link, "00000000000000fe.d0")
        reader.put("a", "b", "r", np.arange(50_000))
        before = stand(namespace)
        told = janitor.preview(namespace, force=force)
        assert stand(namespace) == before
        assert caplog.text == ""
        done = janitor.sweep(namespace, force=force)
        for swept in (told, done):
            swept.kept = [janitor.Kept(each.name, each.payloads, 0, 0) for each in swept.kept]
        assert told == done
        assert (len(done.kept), len(done.left_alone), done.dropped) == (0 if force else 1, 1, 2 + force)
        assert done.freed > 800_000 * (1 + force)
        leftovers.remove(namespace)
        del lease, inbox

    def test_the_last_directory(self, dead: Any, namespace: str) -> None:
        name = dead(orphan_ttl_s=0, key_lookup=True, namespace=namespace)
        told = janitor.preview(namespace)
        assert told.removed == [data_of(name).name, name, segments.directory_name(namespace)]
        assert janitor.sweep(namespace) == told
        assert janitor.preview(namespace) == janitor.Swept()

    def test_no_lock_is_taken(self, dead: Any, make: Any, namespace: str, monkeypatch: Any) -> None:
        make(key_lookup=True, namespace=namespace).put("a", "b", "r", 1)
        dead(orphan_ttl_s=0)
        monkeypatch.setattr(janitor, "Segment", OnlyLooks)
        assert len(janitor.preview(namespace).removed) == 2
        with pytest.raises(AssertionError, match="took a lock"):
            janitor.sweep(namespace)

    def test_death_is_not_noted(self, dead: Any, namespace: str) -> None:
        dead(orphan_ttl_s=100)
        for _ in range(2):
            assert janitor.preview(namespace).kept[0].seconds_left == 100
        janitor.sweep(namespace)
        assert janitor.preview(namespace).kept[0].seconds_left < 100


class TestNobodysMemory:
    """Memory is only taken back where it is certain that nobody looks at it: elsewhere that would be a SIGBUS."""

    def test_a_living_producer_whose_control_segment_was_removed(self, children: Children, namespace: str) -> None:
        child = children.with_connector(segment_bytes=1 << 20)
        name = child.run("md = c.put('a', 'b', 'r', np.arange(50_000))[2]; result = md['shm']['name']")
        child.run("view = c.get('a', 'b', 'r', md)[0]")
        (leftovers.MOUNT / name).unlink()
        swept = janitor.sweep(namespace)
        assert swept.removed == []
        assert swept.left_alone == {data_of(name).name: "its producer is alive"}
        # It notices, and says so in its log; what it must not do is die.
        child.run("import logging; logging.disable()")
        child.run("for n in range(20): c.put('a', 'b', n, np.arange(50_000)); c.cleanup(n)")
        assert child.run("result = int(view.sum())") == sum(range(50_000))

    def test_a_reader_of_a_dead_producer_whose_control_segment_was_damaged(
        self, dead: Any, make: Any, children: Children, namespace: str
    ) -> None:
        name = dead(orphan_ttl_s=0)
        metadata = {
            "shm": {
                "name": name,
                "size": 0,
                "block": 0,
                "sequence": 1,
                "from_stage": "a",
                "to_stage": "b",
                "request_id": "r",
                "host": segments.host_identity(),
            },
            "size": 0,
        }
        child = children.start()
        child.run(
            "import numpy as np\n"
            "from omni_fastshm import janitor\n"
            "from omni_fastshm.consumer import open_inbox\n"
            "lease = open_inbox(md['shm']['name']).hold(0, 1)\n"
            "view = np.frombuffer(lease.view(0, 800_000), np.uint8)",
            md=metadata,
        )
        with open(leftovers.MOUNT / name, "r+b") as file:
            file.write(b"\xff" * 16)
        assert name in janitor.sweep(namespace).removed
        assert child.run("result = len(bytes(view))") == 800_000

    @pytest.mark.root
    def test_a_half_made_one_on_a_full_mount(self, children: Children, namespace: str) -> None:
        """Its maker had set the length and died before it had the memory: looking at it must not need any."""
        child = children.start(command=mounted("8m"))
        swept = child.run(
            "import os\n"
            "from omni_fastshm import janitor, segments\n"
            "name = segments.control_name(namespace, 5)\n"
            "with open('/dev/shm/' + name, 'wb') as file: os.truncate(file.fileno(), size)\n"
            "with open('/dev/shm/filler', 'wb') as file:\n"
            "    free = os.statvfs('/dev/shm')\n"
            "    os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)\n"
            "assert segments.mount_free() == 0\n"
            "result = janitor.preview(namespace).removed, janitor.sweep(namespace).removed, os.listdir('/dev/shm')",
            namespace=namespace,
            size=CONTROL_SIZE,
        )
        name = segments.control_name(namespace, 5)
        assert swept == ([name], [name], ["filler"])


class TestDirectory:
    """A directory's places are given back, however their owners went."""

    def test_the_dead_leave_it(self, make: Any, dead: Any, namespace: str) -> None:
        keyed = {"key_lookup": True, "namespace": namespace}
        living = make(**keyed)
        living.put("a", "b", "mine", 1)
        dead(orphan_ttl_s=0, **keyed)
        assert len(living._directory.endpoints()) == 2
        janitor.preview(namespace)
        assert len(living._directory.endpoints()) == 2
        janitor.sweep(namespace)
        assert living._directory.endpoints() == [living._producer.endpoint]

    def test_ids_that_lead_nowhere(self, make: Any, dead: Any, namespace: str) -> None:
        """A janitor that is killed right after it removed a control segment leaves its producer's id."""
        keyed = {"key_lookup": True, "namespace": namespace}
        living = make(**keyed)
        living.put("a", "b", "mine", 1)
        name = dead(**keyed)
        for path in (leftovers.MOUNT / name, data_of(name)):
            path.unlink()
        own = living._producer.endpoint
        assert sorted(living._directory.endpoints()) == sorted([own, int(name.split(".")[3], 16)])
        janitor.sweep(namespace)
        assert len(living._directory.endpoints()) == 2, "one does no harm, and may be of a living one that was unlinked"
        for n in range(ENDPOINT_LIMIT // 2):
            assert living._directory.enter(n + 1)
        janitor.preview(namespace)
        assert len(living._directory.endpoints()) == 2 + ENDPOINT_LIMIT // 2
        janitor.sweep(namespace)
        assert living._directory.endpoints() == [own]
        assert make(**keyed).get("a", "b", "mine")[0] == 1

    def test_it_stays_for_orphans_that_are_found_through_it(self, make: Any, dead_ones: Any, namespace: str) -> None:
        keyed = {"key_lookup": True, "namespace": namespace}
        dead_ones({"orphan_ttl_s": 100, **keyed}, {"orphan_ttl_s": 0, **keyed})
        assert len(janitor.sweep(namespace).removed) == 2
        got = make(**keyed).get("a", "b", "r0")
        assert got is not None
        assert got[0][-1] == 99_999

    def test_a_maker_that_stands_still_keeps_nobody(self, dead: Any, namespace: str) -> None:
        """A process that was stopped while it makes the directory holds its lock for as long as it likes."""
        dead(orphan_ttl_s=0)
        path = leftovers.MOUNT / segments.directory_name(namespace)
        path.unlink()
        path.touch(0o600)
        fd = os.open(path, os.O_RDWR)
        assert Segment.lock(fd, path.name, 0)
        swept = janitor.sweep(namespace)
        os.close(fd)
        assert len(swept.removed) == 2
        assert janitor.sweep(namespace).removed == [path.name]


def test_what_is_left_alone_is_logged_once(plant: Any, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    """A put that waits for room on a full mount sweeps twenty times a second."""
    path = plant(fifo, f"{ENDPOINT}.ctl")
    for _ in range(30):
        assert path.name in janitor.sweep(namespace).left_alone
    assert len(caplog.records) == 1
    path.unlink()


def test_one_that_is_swept_by_somebody_else_is_not_touched(dead: Any, namespace: str) -> None:
    name = dead(orphan_ttl_s=0)
    fd = os.open(leftovers.MOUNT / name, os.O_RDWR)
    assert Segment.lock(fd, name, LOCK_OWNER)
    swept = janitor.sweep(namespace, force=True)
    os.close(fd)
    assert (swept.alive, swept.removed) == ([name], [])
    assert name in janitor.sweep(namespace).removed


def mounted(size: str) -> tuple[str, ...]:
    """A command that gives a child a shared memory mount of its own."""
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"', "sh")


@pytest.mark.root
class TestWanted:
    """For want of room orphans go before their time: oldest first, and only until there is room."""

    @pytest.fixture
    def judge(self, children: Children) -> Child:
        """A child with a mount of its own, which sweeps there."""
        child = children.start(command=mounted("64m"))
        child.run(
            "import os\n"
            "from omni_fastshm import janitor, segments\n"
            "def sweep(namespace, more):\n"
            "    return janitor.sweep(namespace, force=True, wanted=segments.mount_free() + more)\n"
            "def short(names): return sorted({n.split('.')[2] + n.rpartition('.')[2][:1] for n in names})"
        )
        return child

    def orphan(self, children: Children, judge: Child, namespace: str, ttl: float = 3600) -> Child:
        child = children.start(command=("nsenter", "-t", str(judge.pid), "-m", "--"))
        child.run(
            "import numpy as np\n"
            "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
            "c = SharedMemoryConnector({'orphan_ttl_s': ttl, 'segment_bytes': 4 << 20, 'namespace': namespace})\n"
            "result = c.put('a', 'b', 'r', np.ones(4_000_000, np.uint8))[0]",
            namespace=namespace,
            ttl=ttl,
        )
        return child

    def left(self, judge: Child) -> Any:
        return judge.run("result = [n.split('.')[2] for n in sorted(os.listdir('/dev/shm')) if n.endswith('.ctl')]")

    def test_the_one_that_has_been_dead_for_longest_goes_first(self, children: Children, judge: Child) -> None:
        one, two, three = (self.orphan(children, judge, "n") for _ in range(3))
        names = {}
        for key, child in [("second", two), ("first", one), ("third", three)]:  # not the order in which they began
            names[child.run("result = c._producer.name")] = key
            child.kill()
            judge.run("janitor.sweep('n')")  # and with it the death is noted
        order = []
        for _ in range(3):
            removed = judge.run("result = [n for n in sweep('n', 1).removed if n.endswith('.ctl')]")
            order += [names[name] for name in removed]
        assert order == ["second", "first", "third"]
        assert judge.run("result = os.listdir('/dev/shm')") == []

    def test_as_many_as_are_needed(self, children: Children, judge: Child) -> None:
        for child in [self.orphan(children, judge, "n") for _ in range(4)]:
            child.kill()
        assert judge.run("done = sweep('n', 5_000_000); result = done.dropped, len(done.kept)") == (2, 2)
        assert len(self.left(judge)) == 2
        assert judge.run("done = sweep('n', 1 << 30); result = done.dropped, len(done.kept)") == (2, 0)
        assert judge.run("result = os.listdir('/dev/shm')") == []

    def test_what_nobody_needs_goes_before_and_may_be_enough(self, children: Children, judge: Child) -> None:
        for child in (self.orphan(children, judge, "n"), self.orphan(children, judge, "n", ttl=0)):
            child.kill()
        assert judge.run("done = sweep('n', 1); result = done.dropped, len(done.kept)") == (1, 1)
        for child in (self.orphan(children, judge, "other", ttl=0), self.orphan(children, judge, "other2")):
            child.kill()
        assert judge.run("done = sweep('n', 1); result = done.dropped, len(done.kept), short(done.removed)") == (
            1,
            2,
            ["otherc", "otherd"],
        )
        assert self.left(judge) == ["n", "other2"]

    def test_own_orphans_before_those_of_other_namespaces(self, children: Children, judge: Child) -> None:
        other, own = self.orphan(children, judge, "a"), self.orphan(children, judge, "n")
        for child in (other, own):
            child.kill()
            judge.run("janitor.sweep()")
        living = self.orphan(children, judge, "a")
        assert judge.run("result = short(sweep('n', 1).removed)") == ["nc", "nd"]
        assert self.left(judge) == ["a", "a"]
        assert judge.run("result = short(sweep('n', 1).removed)") == ["ac", "ad"]
        assert self.left(judge) == ["a"], "the living keep theirs, however much is wanted"
        assert judge.run("done = sweep('n', 1 << 30); result = done.removed, len(done.alive)") == ([], 1)
        assert living.run("result = c.health()['live_blocks']") == 1

    def test_another_limit_than_the_mounts(self, children: Children, judge: Child) -> None:
        """Memory was refused though the mount has room, as by a cgroup: one orphan goes for each time."""
        for child in [self.orphan(children, judge, "n") for _ in range(2)]:
            child.kill()
        assert judge.run("result = janitor.sweep('n', force=True, wanted=1).dropped") == 1
        assert len(self.left(judge)) == 1

    def test_without_a_wish_all_of_the_namespace_goes(self, children: Children, judge: Child) -> None:
        for child in [self.orphan(children, judge, name) for name in ("n", "n", "a")]:
            child.kill()
        assert judge.run("result = janitor.sweep('n', force=True).dropped") == 2
        assert self.left(judge) == ["a"]
