"""Where received bytes lie: views, copies, who may write, and when memory is given back."""

from __future__ import annotations

import collections
import gc
import pathlib
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.codec_tools import FakeLease, leased, round_trip, same

import omni_fastshm
from omni_fastshm import CodecError, MetadataError, SegmentError
from omni_fastshm.codec import COPY_BELOW, decode, plan


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory must come back by reference counting alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


LARGE = COPY_BELOW // 4 + 1  # float32 items, one more than what is copied out


def payload() -> dict[str, Any]:
    return {
        "t": torch.arange(float(LARGE)),
        "a": np.arange(LARGE, dtype="f4"),
        "flag": torch.tensor(True),
        "n": np.ones(3),
    }


def test_large_leaves_are_views_and_small_ones_copies() -> None:
    got, lease = leased(payload())
    assert same(got, payload())
    assert lease.live == 2
    assert [size for _, size, _ in lease.asked] == [LARGE * 4] * 2
    got["t"][0] = 5
    got["a"][0] = 6
    offsets = [offset for offset, _, _ in lease.asked]
    assert lease.frame[offsets[0] : offsets[0] + 4] == np.float32(5).tobytes()
    assert lease.frame[offsets[1] : offsets[1] + 4] == np.float32(6).tobytes()


def test_the_border_between_copies_and_views() -> None:
    at, over = torch.ones(COPY_BELOW, dtype=torch.uint8), torch.ones(COPY_BELOW + 1, dtype=torch.uint8)
    assert leased([at, over])[1].live == 0
    got, lease = leased([at, over])
    assert lease.live == 1
    del got
    got, lease = leased([at, over], copy_below=10)
    assert lease.live == 2
    del got
    _, lease = leased([at, over], copy_below=10**6)
    assert lease.live == 0


def test_copy_true_gives_own_memory_and_false_gives_views() -> None:
    got, lease = leased(payload(), copy=True)
    assert same(got, payload())
    assert lease.asked == []
    got["t"].add_(1)
    got["a"] += 1
    got, lease = leased(payload(), copy=False)
    assert same(got, payload())
    assert lease.live == 4


def test_several_takers() -> None:  # R43
    lease = FakeLease(plan(payload()))
    first = decode(lease.frame, source=lease, writable=False)
    assert not first["a"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        first["a"][0] = 1
    first["t"].add_(1)  # a private copy
    first["flag"].logical_not_()
    first["n"] += 1
    second = decode(lease.frame, source=lease, writable=False)
    assert same(second, payload())
    shared = decode(lease.frame, source=lease, writable=False, copy=False)
    assert not shared["a"].flags.writeable
    assert lease.asked[-4:][0][2] is False
    shared["t"].add_(1)
    assert same(decode(lease.frame, source=lease, writable=False)["t"], payload()["t"] + 1)
    copied = decode(lease.frame, source=lease, writable=False, copy=True)
    copied["a"] += 1
    assert same(second, payload())


def test_inline_leaves_are_private_and_writable() -> None:  # fine print 8
    frame = plan(payload()).to_bytes()
    first = decode(frame)
    for leaf in first.values():
        leaf[...] = 0
    assert same(decode(frame), payload())
    assert same(decode(memoryview(frame)), payload())
    own = np.frombuffer(frame, "u1")
    assert not np.shares_memory(first["a"], own)
    assert first["a"].flags.owndata


def test_leaves_never_share_storage() -> None:
    got, _ = leased([torch.zeros(10), torch.zeros(10), torch.zeros(5000), torch.zeros(5000)])
    got[0].fill_(1)
    got[2].fill_(1)
    assert [tensor.sum().item() for tensor in got] == [10, 0, 5000, 0]
    assert got[0].untyped_storage().nbytes() == 40


def test_large_leaves_are_aligned() -> None:
    value = ["x" * n for n in range(3)] + [torch.ones(5001, dtype=torch.uint8), np.ones(5003, "u1"), torch.ones(1500)]
    got, lease = leased(value)
    assert lease.address % 64 == 0
    assert got[3].data_ptr() % 64 == 0
    assert got[4].ctypes.data % 64 == 0
    assert got[5].data_ptr() % 64 == 0
    assert decode(plan(value).to_bytes())[3].data_ptr() % 64 == 0


@pytest.mark.usefixtures("no_collector")
def test_memory_comes_back_when_the_last_view_dies() -> None:
    got, lease = leased({"x": [{"t": torch.ones(5000), "a": np.ones(5000)}], "r": np.rec.array([(1, 2.0)] * 500)})
    tensor, array = got["x"][0]["t"], got["x"][0]["a"]
    part, shaped = tensor[10:20], array.reshape(50, 100)[3, ::2]
    record = got["r"].f0
    del got, tensor, array
    assert lease.live == 3
    assert (part.sum(), shaped.sum(), record.sum()) == (10, 50, 500)
    other = torch.from_numpy(shaped)
    del part
    assert lease.live == 2
    del shaped, record
    assert lease.live == 1
    assert other.sum() == 50
    del other
    assert lease.live == 0


@pytest.mark.usefixtures("no_collector")
def test_a_failed_decode_gives_everything_back() -> None:
    lease = FakeLease(plan([torch.ones(5000), np.ones(5000), collections.OrderedDict(a=1)]))
    name = bytes(lease.frame).index(b"collections:")
    lease.frame[name : name + 11] = b"collectians"
    with pytest.raises(CodecError, match="collectians:OrderedDict"):
        decode(lease.frame, source=lease)
    assert len(lease.asked) == 2
    assert lease.live == 0


@pytest.mark.usefixtures("no_collector")
def test_plans_and_frames_are_let_go() -> None:
    memory = bytearray(5000)
    array = np.frombuffer(memory, "u1")
    planned = plan({"a": array, "b": memory})
    del array
    with pytest.raises(BufferError):
        memory.append(1)  # held, so that the bytes cannot move away under the plan
    frame = bytearray(planned.to_bytes())
    del planned
    memory.append(1)
    decode(frame)
    frame.append(1)


def test_errors_of_the_source_pass_through() -> None:
    class Gone(FakeLease):
        def view(self, offset: int, nbytes: int, readonly: bool) -> Any:
            raise SegmentError("the segment is gone")

    lease = Gone(plan(payload()))
    with pytest.raises(SegmentError, match="the segment is gone"):
        decode(lease.frame, source=lease)


def test_views_die_in_any_thread() -> None:
    got, lease = leased([torch.ones(2000) for _ in range(64)])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: got.pop().sum(), range(64)))
    assert lease.live == 0


def test_external_pieces_stay_where_they_are() -> None:
    lent = bytearray(1 << 16)
    start = np.frombuffer(lent, "u1").ctypes.data

    class Loans:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def claim(self, address: int, nbytes: int) -> tuple[int, int] | None:
            self.asked.append(nbytes)
            return (7, address - start) if start <= address < start + len(lent) else None

    loans = Loans()
    tensor = torch.frombuffer(lent, dtype=torch.float32, count=2000).fill_(2)
    array = np.frombuffer(lent, "f4", count=3000, offset=8192)
    array[:] = 3
    small = torch.frombuffer(lent, dtype=torch.uint8, count=8, offset=32768)
    strided = torch.frombuffer(lent, dtype=torch.float32, count=4000)[::2]
    value = {
        "t": tensor,
        "again": tensor,
        "part": tensor[100:1900],
        "a": array,
        "s": small,
        "other": torch.ones(5000),
        "n": strided,
    }
    planned = plan(value, loans=loans)
    assert planned.external
    assert sorted(loans.asked) == sorted([8000, 8000, 7200, 12000, 20000, 8000])
    inside = 8000 + 7200 + 8 + 20000 + 8000
    assert planned.size == planned.frame_size + 8000 + 12000
    assert 0 < planned.frame_size - inside < 1000
    with pytest.raises(CodecError, match="cannot travel as bytes"):
        planned.to_bytes()
    lease = FakeLease(planned)
    with pytest.raises(MetadataError, match="lies in a shared segment"):
        decode(lease.frame)
    lease.outside[7] = lent
    expected = {key: item.clone() if isinstance(item, torch.Tensor) else item.copy() for key, item in value.items()}
    got = decode(lease.frame, source=lease)
    assert same(got, expected)
    got["t"][0] = 9
    assert lent[:4] == np.float32(9).tobytes()
    assert got["again"][0] == 2
    copied = decode(lease.frame, source=lease, copy=True)
    before = lease.live
    copied["a"][:] = 0
    assert array[0] == 3
    del copied
    assert lease.live == before
    readonly = decode(lease.frame, source=lease, writable=False)
    assert not readonly["a"].flags.writeable


def test_each_byte_is_copied_once() -> None:
    size = 16 << 20
    value = {
        "a": np.ones(size, "u1"),
        "t": torch.ones(size, dtype=torch.uint8),
        "b": bytes(size),
        "ba": bytearray(size),
    }
    tracemalloc.start()
    try:
        planned = plan(value)
        assert tracemalloc.get_traced_memory()[1] < 100_000  # planning copies nothing
        value["a"][:] = 2
        value["t"].fill_(3)
        lease = FakeLease(planned)  # its own memory, once
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 4 * size + 200_000
    finally:
        tracemalloc.stop()
    got = decode(lease.frame, source=lease)
    assert (got["a"][-1], got["t"][-1]) == (2, 3)


def test_after_packing_the_source_may_change() -> None:
    tensor, array, numbers, memory = torch.ones(5000), np.ones(5000), list(range(5000)), bytearray(b"a" * 5000)
    frame = plan([tensor, array, numbers, memory]).to_bytes()
    tensor.zero_()
    array[:] = 0
    numbers[:] = [0] * 5000
    memory[:] = b"b" * 5000
    got = decode(frame)
    assert (got[0].sum(), got[1].sum(), got[2][-1], got[3][:1]) == (5000, 5000, 4999, b"a")


def test_sources_live_as_long_as_the_plan() -> None:
    planned = plan([torch.full((100_000,), 7.0).t()[::2], np.full(100_000, 7.0)[::2], b"7" * 100_000, "7" * 100_000])
    noise = [torch.zeros(100_000) for _ in range(20)]
    got = decode(planned.to_bytes())
    assert got[0].unique().tolist() == [7]
    assert np.unique(got[1]).tolist() == [7]
    assert len(noise) == 20


def test_old_bytes_of_the_place_do_not_travel() -> None:
    planned = plan([torch.ones(3, dtype=torch.uint8), torch.ones(5001, dtype=torch.uint8), b"x" * 5001, "y"])
    dirty = np.full(planned.frame_size, 0xAA, "u1")
    planned.pack_into(dirty.ctypes.data)
    assert dirty.tobytes() == planned.to_bytes()
    again = np.full(planned.frame_size, 0x55, "u1")
    planned.pack_into(again.ctypes.data)
    assert again.tobytes() == dirty.tobytes()


def test_many_leaves() -> None:
    value = {f"t{i}": torch.full((i + 1,), i) for i in range(300)}
    assert same(round_trip(value), value)


def test_threads_encode_and_decode_in_parallel() -> None:
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        start.wait()
        value = {
            "n": number,
            "t": torch.full((30_000,), number),
            "a": [np.full(9, number)],
            "s": {number: "x" * number},
        }
        return all(same(round_trip(value), value) and same(leased(value)[0], value) for _ in range(30))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_views_at_the_end_of_the_interpreter() -> None:
    code = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import torch, numpy as np
from omni_fastshm.codec import plan, decode
from support.codec_tools import FakeLease
lease = FakeLease(plan({"t": torch.ones(5000), "a": np.ones(5000)}))
kept = decode(lease.frame, source=lease)
t = torch.nn.Module(); t.kept = kept["t"]; t.loop = t
graph = (kept["t"].requires_grad_() * 2).sum()
threading.Thread(target=lambda: globals().update(other=decode(lease.frame, source=lease))).start()
print("done")
"""
    tests = str(pathlib.Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, tests],
        capture_output=True, text=True, timeout=150, check=False, cwd=pathlib.Path(omni_fastshm.__file__).parents[1],
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_importing_the_codec_imports_no_heavy_package() -> None:
    code = "import sys, omni_fastshm.codec, omni_fastshm.views; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    root = pathlib.Path(omni_fastshm.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, cwd=root, check=True
    )
    assert done.stdout == "set()\n"


def test_a_large_copy_is_asked_for_in_huge_pages() -> None:
    huge = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge.exists() or "[never]" in huge.read_text():
        pytest.skip("this kernel gives no huge pages to anybody")
    size = 40 << 20  # more than malloc ever takes from what it has
    got = decode(memoryview(plan({"t": torch.ones(size, dtype=torch.uint8)}).to_bytes()))["t"]
    assert "hg" in flags_of(got.data_ptr() + size // 2)


def flags_of(address: int) -> list[str]:
    """What the kernel was told about the memory at an address."""
    found = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        place, _, rest = line.partition(" ")
        if not place.endswith(":"):
            start, end = (int(each, 16) for each in place.split("-"))
            found = start <= address < end
        elif found and place == "VmFlags:":
            return rest.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")
