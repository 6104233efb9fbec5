"""What a snapshot of the shm mount says, and that taking it changes nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children
from support.planted import dangling, fifo, folder, link, other_user

from omni_fastshm import directory, inventory, janitor, reading, segments
from omni_fastshm._core import BLOCK_LIMIT, CONTROL_SIZE, LOCK_MAKER, LOCK_OWNER, Segment, layout
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

ENDPOINT = "0123456789abcdef"
FIELDS = {(structure, field): (offset, size) for structure, field, offset, size in layout()}
DEAD = "c = SharedMemoryConnector({'orphan_ttl_s': ttl}); result = c.put('a', 'b', 'r', np.arange(50_000))[2]"


@pytest.fixture
def make(connect: Callable[..., Any]) -> Callable[..., Any]:
    small = {"segment_bytes": 1 << 20, "max_bytes": 8 << 20}
    return lambda **settings: connect(SharedMemoryConnector, **{**small, **settings})


@pytest.fixture
def look(namespace: str) -> Callable[[], inventory.Snapshot]:
    return lambda: inventory.take_snapshot(namespace)


@pytest.fixture
def plant(namespace: str) -> Iterator[Callable[..., Path]]:
    """A function that makes a file under a name of ours, of this user or another prefix."""

    def put_there(suffix: str, content: bytes = b"", prefix: str = "") -> Path:
        path = leftovers.MOUNT / f"{prefix or segments.owner_prefix()}{namespace}.{suffix}"
        path.write_bytes(content)
        path.chmod(0o600)
        return path

    yield put_there
    leftovers.remove(namespace)


Killed = Callable[..., str]


@pytest.fixture
def killed(children: Children, namespace: str) -> Iterator[Killed]:
    """A function that leaves a killed producer with one untaken payload; gives its control segment's name."""

    def kill(ttl: float = 60) -> str:
        child = children.with_connector()
        metadata = child.run(DEAD, ttl=ttl)
        child.kill()
        assert child.process.returncode == -signal.SIGKILL
        return str(metadata["shm"]["name"])

    yield kill
    leftovers.remove(namespace)


@pytest.fixture
def abandoned(make: Callable[..., Any], namespace: str) -> Iterator[str]:
    """The same, quicker: copies of a living producer's segments, which nobody owns; the name of the control segment."""
    connector = make()
    connector.put("a", "b", "r", np.arange(50_000))
    for name in (connector._producer.name, segments.data_name(connector._producer.name, 0)):
        copy = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{ENDPOINT}.{name.rpartition('.')[2]}"
        status = (leftovers.MOUNT / name).stat()
        with open(leftovers.MOUNT / name, "rb") as source, open(copy, "wb", buffering=0) as target:
            target.truncate(status.st_size)
            for at in range(0, status.st_size, 4096):  # without its holes
                page = source.read(4096)
                if any(page):
                    os.pwrite(target.fileno(), page, at)
    connector.close()
    yield segments.control_name(namespace, int(ENDPOINT, 16))
    leftovers.remove(namespace)


def write_field(path: Path, structure: str, field: str, value: int) -> None:
    offset, size = FIELDS[structure, field]
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(value.to_bytes(size, "little"))


def put(connector: Any, request: str, count: int = 20_000, **options: Any) -> Any:
    ok, _, metadata = connector.put("a", "b", request, np.arange(count), **options)
    assert ok
    return metadata


@pytest.mark.skipif(not (Path(__file__).parents[2] / "src").is_dir(), reason="the sources are not beside these tests")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OFS_MAGIC_CONTROL", reading.MAGIC_CONTROL),
        ("OFS_MAGIC_DIRECTORY", reading.MAGIC_DIRECTORY),
        ("OFS_LOCK_READER0", reading.LOCK_READER0),
        ("OFS_FLAG_EXTERNAL", reading.FLAG_EXTERNAL),
    ],
)
def test_constants_are_those_of_the_layout(name: str, value: int) -> None:
    header = (Path(__file__).parents[2] / "src" / "ofs_layout.h").read_text()
    found = re.search(rf"#define {name} (\w+)", header)
    assert found is not None
    assert int(found[1].rstrip("u"), 0) == value


class TestFigures:
    """Each figure is that of what was done."""

    def test_nothing_there(self, look: Any, namespace: str) -> None:
        snapshot = look()
        assert (snapshot.endpoints, snapshot.directories, snapshot.oddities) == ((), (), ())
        assert (snapshot.namespace, snapshot.uid, snapshot.mount) == (namespace, os.geteuid(), "/dev/shm")
        assert 0 < snapshot.free <= snapshot.size

    def test_a_producer_and_its_segments(self, make: Any, look: Any, namespace: str) -> None:
        connector = make()
        sizes = [put(connector, f"r{n}", 100_000)["size"] for n in range(2)]  # each needs most of a segment
        (endpoint,) = look().endpoints
        control = connector._producer.name
        assert (endpoint.namespace, endpoint.name, endpoint.state) == (namespace, control, "alive")
        assert endpoint.endpoint == control.split(".")[3]
        assert endpoint.orphan_left_s is None
        assert [each.number for each in endpoint.data] == [0, 1]
        for name, length, allocated in [
            (control, endpoint.length, endpoint.allocated),
            *((each.name, each.length, each.allocated) for each in endpoint.data),
        ]:
            found = (leftovers.MOUNT / name).stat()
            assert (length, allocated) == (found.st_size, found.st_blocks * 512)
        assert endpoint.allocated < endpoint.length, "a control segment is sparse"
        names = [name for name in leftovers.names(namespace) if not name.endswith(".dir")]
        assert endpoint.memory == sum((leftovers.MOUNT / name).stat().st_blocks * 512 for name in names)
        assert endpoint.control.pid == os.getpid()
        assert 0 < endpoint.control.age_s < 30
        assert endpoint.control.dead_s is None
        assert endpoint.control.orphan_ttl_s == 60
        assert endpoint.control.blocks.pending_bytes == sum(sizes)

    def test_blocks_by_state(self, make: Any, look: Any) -> None:
        producer, consumer = make(), make()
        metadata = {name: put(producer, name, consumers=n) for name, n in [("a", 1), ("b", 3), ("c", 2), ("d", 1)]}
        views = [consumer.get("a", "b", name, metadata[name]) for name in ("c", "d")]
        blocks = look().endpoints[0].control.blocks
        assert (blocks.pending, blocks.held_untaken, blocks.held) == (2, 1, 1)
        assert (blocks.takes, blocks.untaken) == (1 + 3 + 1, 3)
        assert blocks.free == 256 - 4
        assert blocks.pending_bytes == sum(metadata[name]["size"] for name in "abc")
        assert blocks.held_bytes == sum(metadata[name]["size"] for name in "cd")
        assert blocks.oldest_s is not None
        assert 0 < blocks.oldest_s < 30
        del views
        producer.cleanup("a")
        blocks = look().endpoints[0].control.blocks
        assert (blocks.pending, blocks.held_untaken, blocks.held, blocks.takes) == (2, 0, 0, 4)
        for name in "bc":
            producer.cleanup(name)
        assert look().endpoints[0].control.blocks.oldest_s is None

    def test_the_oldest_is_one_that_still_waits(self, make: Any, look: Any) -> None:
        producer = make()
        view = producer.get("a", "b", "first", put(producer, "first"))
        assert look().endpoints[0].control.blocks.oldest_s is None
        before = time.monotonic()
        put(producer, "second")
        oldest = look().endpoints[0].control.blocks.oldest_s
        assert 0 < oldest <= time.monotonic() - before
        del view

    def test_holders_and_whether_they_live(self, make: Any, look: Any, children: Children) -> None:
        producer = make()
        metadata = put(producer, "r", consumers=3)
        assert look().endpoints[0].control.holders == ()
        living, dying = children.with_connector(), children.with_connector()
        for child in (living, dying):
            child.run("view = c.get('a', 'b', 'r', md)[0]", md=metadata)
        dying.kill()
        control = look().endpoints[0].control
        assert [(h.slot, h.pid, h.alive, h.blocks) for h in control.holders] == [
            (0, living.pid, True, 1),
            (1, dying.pid, False, 1),
        ]
        assert all(0 < h.since_s < 30 for h in control.holders)
        assert control.held_segments == (0,)
        living.run("del view")
        control = look().endpoints[0].control
        assert [(h.alive, h.blocks) for h in control.holders] == [(True, 0), (False, 1)]
        assert control.held_segments == (), "only what the living look at counts"

    def test_a_loan_may_be_looked_at_anywhere(self, make: Any, look: Any) -> None:
        producer, consumer = make(), make()
        loan = producer.allocate(20_000, np.int64)
        loan[:] = 1
        ok, _, metadata = producer.put("a", "b", "r", [loan])
        assert ok
        assert look().endpoints[0].control.held_segments == ()
        view = consumer.get("a", "b", "r", metadata)
        assert look().endpoints[0].control.held_segments is None
        del view

    def test_the_directory(self, make: Any, look: Any, namespace: str) -> None:
        connectors = [make(key_lookup=True, namespace=namespace) for _ in range(3)]
        put(connectors[0], "r")
        (found,) = look().directories
        assert (found.namespace, found.name) == (namespace, segments.directory_name(namespace))
        assert (found.in_use, found.users) == (True, 3)
        assert found.producers == (connectors[0]._producer.name.split(".")[3],)
        assert (found.length, found.allocated) == (directory.SIZE, directory.SIZE)

    def test_a_directory_that_nobody_uses(self, look: Any, children: Children, namespace: str) -> None:
        child = children.with_connector(key_lookup=True, namespace=namespace)
        child.kill()
        (found,) = look().directories
        leftovers.remove(namespace)
        assert (found.in_use, found.users, found.producers) == (False, 0, ())

    def test_where_the_kernel_lists_no_locks(self, make: Any, look: Any, namespace: str, monkeypatch: Any) -> None:
        make(key_lookup=True, namespace=namespace)
        real = open

        def refuse(path: Any, *args: Any, **options: Any) -> Any:
            if path == "/proc/locks":
                raise FileNotFoundError(path)
            return real(path, *args, **options)

        monkeypatch.setattr("builtins.open", refuse)
        (found,) = look().directories
        assert (found.in_use, found.users) == (True, None)

    def test_namespaces_do_not_mix(self, make: Any, look: Any, namespace: str) -> None:
        make(namespace=namespace + "x").put("a", "b", "r", np.arange(20_000))
        make(namespace=namespace[:-1]).put("a", "b", "r", np.arange(20_000))
        put(make(), "r")
        assert [each.namespace for each in look().endpoints] == [namespace]
        everywhere = {each.namespace for each in inventory.take_snapshot().endpoints}
        assert everywhere >= {namespace, namespace + "x", namespace[:-1]}


class TestStates:
    """Who lives is told by the owner's lock."""

    def test_orphaned_and_not_yet_noticed(self, look: Any, killed: Killed) -> None:
        name = killed()
        (endpoint,) = look().endpoints
        assert (endpoint.name, endpoint.state, endpoint.control.dead_s) == (name, "orphaned", None)
        assert endpoint.orphan_left_s == 60

    def test_orphaned_and_noticed(self, look: Any, killed: Killed, namespace: str) -> None:
        killed()
        janitor.sweep(namespace)
        (endpoint,) = look().endpoints
        assert endpoint.state == "orphaned"
        assert endpoint.control.dead_s is not None
        assert 0 < endpoint.control.dead_s < 30
        assert endpoint.orphan_left_s == pytest.approx(60 - endpoint.control.dead_s)

    def test_dead_when_the_payloads_time_is_over(self, look: Any, killed: Killed) -> None:
        killed(ttl=0)
        (endpoint,) = look().endpoints
        assert (endpoint.state, endpoint.orphan_left_s) == ("dead", None)

    def test_dead_when_nothing_is_untaken(self, make: Any, look: Any, children: Children, namespace: str) -> None:
        child = children.with_connector()
        metadata = child.run(DEAD, ttl=60)
        assert make().get("a", "b", "r", metadata) is not None
        child.kill()
        (endpoint,) = look().endpoints
        leftovers.remove(namespace)
        assert endpoint.state == "dead"

    def test_a_pid_that_somebody_else_has_now(self, look: Any, killed: Killed) -> None:
        name = killed()
        write_field(leftovers.MOUNT / name, "ofs_control", "pid", os.getpid())
        (endpoint,) = look().endpoints
        assert (endpoint.control.pid, endpoint.state) == (os.getpid(), "orphaned")

    def test_closing(self, make: Any, look: Any) -> None:
        connector = make()
        put(connector, "r")
        connector._producer.outbox.mark_closed()
        assert look().endpoints[0].state == "closing"


class TestOddities:
    """What is not a segment in good order is a line with the reason, never an exception or a wait."""

    def only(self, snapshot: inventory.Snapshot) -> inventory.Oddity:
        assert (snapshot.endpoints, snapshot.directories) == ((), ())
        (oddity,) = snapshot.oddities
        return oddity

    @pytest.mark.parametrize("suffix", [f"{ENDPOINT}.ctl", f"{ENDPOINT}.d0", "dir"])
    @pytest.mark.parametrize("kind", [link, dangling, folder, fifo])
    def test_other_things_under_our_names(self, look: Any, namespace: str, kind: Any, suffix: str) -> None:
        path = leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{suffix}"
        kind(path)
        oddity = self.only(look())
        leftovers.remove(namespace)
        assert (oddity.name, oddity.kind, oddity.uid) == (path.name, "refused", os.geteuid())
        assert "link" in oddity.reason or "not a shared memory object" in oddity.reason

    @pytest.mark.root
    @pytest.mark.parametrize("suffix", [f"{ENDPOINT}.ctl", f"{ENDPOINT}.d0", "dir"])
    def test_another_users_object_under_our_name(self, look: Any, namespace: str, suffix: str) -> None:
        other_user(leftovers.MOUNT / f"{segments.owner_prefix()}{namespace}.{suffix}")
        oddity = self.only(look())
        leftovers.remove(namespace)
        assert (oddity.kind, oddity.uid) == ("foreign", 12345)
        assert "12345" in oddity.reason

    def test_another_users_names_are_not_looked_at(self, look: Any, plant: Any) -> None:
        path = plant(f"{ENDPOINT}.ctl", b"x" * 5000, prefix=f"omnifs.{os.geteuid() + 1}.")
        oddity = self.only(look())
        assert (oddity.name, oddity.kind, oddity.length, oddity.allocated) == (path.name, "foreign", 5000, 8192)

    @pytest.mark.parametrize(
        "suffix", ["nonsense", f"{ENDPOINT}.d", f"{ENDPOINT}.dx", f"{ENDPOINT}.ctl.old", "a\n\x1b[2J"]
    )
    def test_names_that_we_never_give(self, look: Any, plant: Any, suffix: str) -> None:
        plant(suffix)
        assert self.only(look()).kind == "refused"

    @pytest.mark.parametrize("length", [0, 1, 4095, 4096, CONTROL_SIZE])
    def test_half_made(self, look: Any, plant: Any, length: int) -> None:
        os.truncate(plant(f"{ENDPOINT}.ctl"), length)
        oddity = self.only(look())
        assert (oddity.kind, oddity.reason) == ("half-made", "its maker died before it was finished")

    @pytest.mark.parametrize("length", [0, 1, directory.SIZE])
    def test_half_made_directory(self, look: Any, plant: Any, length: int) -> None:
        os.truncate(plant("dir"), length)
        assert self.only(look()).kind == "half-made"

    @pytest.mark.parametrize(("suffix", "byte"), [(f"{ENDPOINT}.ctl", LOCK_OWNER), ("dir", LOCK_MAKER)])
    def test_being_made(self, look: Any, plant: Any, suffix: str, byte: int) -> None:
        path = plant(suffix)
        fd = os.open(path, os.O_RDWR)
        assert Segment.lock(fd, path.name, byte)
        oddity = self.only(look())
        os.close(fd)
        assert (oddity.kind, oddity.reason) == ("starting", "being made by a living process")
        assert self.only(look()).kind == "half-made"

    def test_a_stray(self, look: Any, plant: Any) -> None:
        plant(f"{ENDPOINT}.d3", b"x" * 100)
        oddity = self.only(look())
        assert (oddity.kind, oddity.length) == ("stray", 100)

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("magic", 5, "overwritten"),
            ("version", 99, "another version of omni-fastshm (layout 99"),
            ("size", 5, "sizes disagree"),
        ],
    )
    def test_damaged(self, look: Any, abandoned: str, namespace: str, field: str, value: int, said: str) -> None:
        name = abandoned
        write_field(leftovers.MOUNT / name, "ofs_control", field, value)
        snapshot = look()
        leftovers.remove(namespace)
        assert snapshot.endpoints == ()
        control, data = sorted(snapshot.oddities, key=lambda each: each.name)
        assert (control.name, control.kind) == (name, "damaged")
        assert said in control.reason
        assert (data.kind, data.reason) == ("damaged", f"belongs to {name}")

    @pytest.mark.parametrize("length", [4096, CONTROL_SIZE - 1, CONTROL_SIZE + 1])
    def test_of_another_length(self, look: Any, abandoned: str, length: int) -> None:
        os.truncate(leftovers.MOUNT / abandoned, length)
        snapshot = look()
        assert snapshot.endpoints == ()
        assert {each.kind for each in snapshot.oddities} == {"damaged"}
        assert "its sizes disagree" in {each.reason for each in snapshot.oddities}

    def test_a_control_segment_that_came_after_the_names_were_read(
        self, look: Any, abandoned: str, monkeypatch: Any
    ) -> None:
        real = segments.list_names
        monkeypatch.setattr(segments, "list_names", lambda prefix: [n for n in real(prefix) if n != abandoned])
        assert look().oddities == ()

    @pytest.mark.parametrize(("field", "value"), [("magic", 5), ("version", 99), ("size", 5)])
    def test_a_damaged_directory(self, look: Any, children: Children, namespace: str, field: str, value: int) -> None:
        child = children.with_connector(key_lookup=True, namespace=namespace)
        child.kill()
        write_field(leftovers.MOUNT / segments.directory_name(namespace), "ofs_directory", field, value)
        oddity = self.only(look())
        leftovers.remove(namespace)
        assert oddity.kind == "damaged"

    def test_a_lying_number_of_blocks_costs_no_memory(self, look: Any, abandoned: str, namespace: str) -> None:
        path = leftovers.MOUNT / abandoned
        before = path.stat().st_blocks
        write_field(path, "ofs_control", "blocks_ready", 2**32 - 1)
        (endpoint,) = look().endpoints
        after = path.stat().st_blocks
        leftovers.remove(namespace)
        assert (endpoint.control.blocks.pending, endpoint.control.blocks.free) == (1, 131071)
        assert after == before

    def test_any_bytes_at_all(self, look: Any, make: Any, abandoned: str, namespace: str) -> None:
        """Whatever stands in the segments of a dead producer, the answer is a snapshot."""
        control, path = leftovers.MOUNT / abandoned, leftovers.MOUNT / segments.directory_name(namespace)
        connector = make(key_lookup=True, namespace=namespace)
        whole_directory = path.read_bytes()
        connector.close()
        path.write_bytes(whole_directory)
        whole = control.read_bytes()
        blocks = CONTROL_SIZE - BLOCK_LIMIT * 128
        pieces = [
            (control, 0, whole[:4096]),
            (control, blocks, whole[blocks : blocks + 4096]),
            (path, 0, whole_directory),
        ]
        assert any(pieces[1][2])
        rng = random.Random(5)
        kinds = set()
        for _ in range(300):
            for path, at, content in pieces:
                broken = bytearray(content)
                for _ in range(rng.choice([0, 1, 3, 50])):
                    place = rng.randrange(rng.choice([24, 400, len(broken)]))
                    broken[place : place + 8] = rng.randbytes(min(8, len(broken) - place))
                with open(path, "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), broken, at)
            snapshot = look()
            kinds |= {each.kind for each in snapshot.oddities} | {each.state for each in snapshot.endpoints}
        leftovers.remove(namespace)
        assert kinds >= {"damaged", "orphaned"}

    @pytest.mark.parametrize("suffix", [f"{ENDPOINT}.ctl", f"{ENDPOINT}.d0", "dir"])
    def test_what_vanishes_meanwhile(self, look: Any, namespace: str, suffix: str, monkeypatch: Any) -> None:
        gone = f"{segments.owner_prefix()}{namespace}.{suffix}"
        monkeypatch.setattr(segments, "list_names", lambda prefix: [gone])
        snapshot = look()
        assert (snapshot.endpoints, snapshot.directories, snapshot.oddities) == ((), (), ())


class TestReadOnly:
    """Nobody notices that somebody looked."""

    def state(self, namespace: str) -> list[Any]:
        found: list[Any] = []
        for name in leftovers.names(namespace):
            path = leftovers.MOUNT / name
            status = path.lstat()
            found.append(
                (name, status.st_ino, status.st_size, status.st_blocks, status.st_mtime_ns, status.st_ctime_ns)
            )
            found.append(path.read_bytes() if path.is_file() else None)
        inodes = {str(os.lstat(leftovers.MOUNT / name).st_ino) for name in leftovers.names(namespace)}
        rows = [line.split()[1:] for line in Path("/proc/locks").read_text().splitlines()]
        found.append(sorted(row for row in rows if row[4].split(":")[-1] in inodes))
        return found

    def test_neither_bytes_nor_locks_change(
        self, make: Any, look: Any, children: Children, killed: Killed, plant: Any, namespace: str
    ) -> None:
        producer, consumer = make(key_lookup=True, namespace=namespace), make()
        view = consumer.get("a", "b", "r", put(producer, "r", consumers=2))
        reader = children.with_connector()
        reader.run("view = c.get('a', 'b', 'q', md)", md=put(producer, "q"))
        reader.kill()
        killed()
        os.truncate(plant(f"{ENDPOINT}.ctl"), CONTROL_SIZE)
        plant(f"{ENDPOINT[::-1]}.d0", b"x" * 100)
        before = self.state(namespace)
        assert len(before[-1]) >= 3, "owner, reader and users of the directory have locks"
        snapshot = look()
        assert (len(snapshot.endpoints), len(snapshot.oddities)) == (2, 2)
        assert self.state(namespace) == before
        del view

    def test_no_lock_is_taken(self, make: Any, look: Any, namespace: str, monkeypatch: Any) -> None:
        class OnlyLooks:
            inspect = staticmethod(Segment.inspect)
            locked = staticmethod(Segment.locked)

        producer = make(key_lookup=True, namespace=namespace)
        view = producer.get("a", "b", "r", put(producer, "r"))
        for module in (inventory, reading):
            monkeypatch.setattr(module, "Segment", OnlyLooks)
        snapshot = look()
        assert (len(snapshot.endpoints), len(snapshot.directories)) == (1, 1)
        assert len(snapshot.endpoints[0].control.holders) == 1
        del view

    def test_a_slot_and_a_lock_stay_free_for_others(self, make: Any, look: Any, children: Children) -> None:
        """While a snapshot is being taken again and again, others start, take and close as if nobody looked."""
        producer = make()
        child = children.with_connector()
        child.start(
            "emit(0)\n"
            "result = 0\n"
            "for _ in range(25):\n"
            "    with SharedMemoryConnector({'segment_bytes': 1 << 20}) as d:\n"
            "        md = d.put('a', 'b', 'r', np.arange(20_000))[2]\n"
            "        result += c.get('a', 'b', 'r', md) is not None"
        )
        child.event()
        seen = 0
        for n in range(25):
            metadata = put(producer, str(n))
            seen += len(look().endpoints)
            assert producer.get("a", "b", str(n), metadata) is not None
        assert child.finish() == 25
        assert seen >= 25


def test_what_is_untaken_by_edge(make: Any, namespace: str) -> None:
    """As the rows say it, over several pieces; what `close` tells of it agrees."""
    producer = make(key_lookup=True, namespace=namespace)
    for number in range(5000):
        producer.put("a", "b" if number % 3 else "c", number, number, consumers=2 if number % 5 else 1)
        if number % 2:
            producer.get("a", "b" if number % 3 else "c", number)
    fd = producer._producer.outbox.control.fd
    found = reading.read_untaken(fd)
    rows = [row for row in reading.read_rows(fd)[0] if row.takes]
    assert found == {
        edge: (len(here), sum(row.total_size for row in here))
        for edge in {row.edge for row in rows}
        for here in [[row for row in rows if row.edge == edge]]
    }
    assert len(found) == 2
    owner = producer._producer
    producer.close()
    assert owner.untaken == found
    assert sum(number for number, _ in found.values()) == producer.health()["dropped"]
