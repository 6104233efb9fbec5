"""What goes wrong in vllm-omni's own connector, tried on ours: real processes, real kills, nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.child import Children
from support.scarce import mounted

Make = Callable[..., Any]
MOUNT = Path("/dev/shm")
START = """
import os, time, multiprocessing.resource_tracker as tracker
import support.scarce  # what is logged does not go to stderr, which must stay empty
from omni_fastshm.integrations.vllm_omni import connector_class
make = lambda **config: connector_class("FastSharedMemoryConnector", keyed=True)(config)
"""


def names_with(text: str) -> list[str]:
    return sorted(name for name in os.listdir(MOUNT) if text in name)


def test_aborted_requests_leave_nothing(make: Make, namespace: str) -> None:
    """45 KB for each, and 258 MiB an hour, in the peer before 0.30."""
    sender, receiver = make(), make()
    chunk = {"codes": list(range(400)), "hidden": b"x" * 3000}
    sender.put("0", "1", "warm_0_0", chunk)
    sender.cleanup("warm_0_0")
    before, capacity = names_with(namespace), sender.health()["capacity_bytes"]
    for request in range(200):
        for number in range(8):
            assert sender.put("0", "1", f"r{request}_0_{number}", chunk)[0]
        receiver.get("0", "1", f"r{request}_0_0")
        for number in range(8):
            sender.cleanup(f"r{request}_0_{number}")
    after = sender.health()
    assert names_with(namespace) == before
    assert (after["capacity_bytes"], after["live_blocks"], after["used_bytes"]) == (capacity, 0, 0)
    assert len(sender._sent) == 0


def test_marks_that_nobody_reads_make_room_when_it_is_needed(make: Make, errors: Callable[[], list[str]]) -> None:
    sender, receiver = make(max_bytes=1 << 20, segment_bytes=1 << 20, unread_ttl_s=0), make()
    for number in range(40):
        assert sender.put("0", "1", f"r{number}_0_0", b"x" * 100_000)[0]
    assert receiver.get("0", "1", "r39_0_0") is not None
    assert receiver.get("0", "1", "r0_0_0") is None
    assert any("unread_ttl_s" in line for line in errors())


def test_a_stray_file_is_no_payload(make: Make) -> None:
    receiver, key = make(), f"stray-{os.getpid()}_0_0"
    stray = [MOUNT / key, MOUNT / f"shm_{key}_lockfile.lock"]
    try:
        for path in stray:
            path.write_bytes(b"\x81\xa1a\x01")
        assert receiver.get("0", "1", key) is None
        assert receiver.cleanup(key) is False
        assert all(path.exists() for path in stray)
    finally:
        for path in stray:
            path.unlink()


def test_another_namespace_has_its_own_keys(make: Make, namespace: str) -> None:
    sender, other, receiver = (
        make(namespace=f"{namespace}-a"),
        make(namespace=f"{namespace}-b"),
        make(namespace=f"{namespace}-a"),
    )
    sender.put("0", "1", "r_0_0", "ours")
    assert other.get("0", "1", "r_0_0") is None
    assert other.cleanup("r_0_0") is False
    assert receiver.get("0", "1", "r_0_0")[0] == "ours"


def test_no_file_for_each_message(make: Make, namespace: str) -> None:
    sender, receiver, keys = make(), make(), [f"k{os.getpid()}_{number}" for number in range(50)]
    sender.put("0", "1", "first", 1)
    before = names_with(namespace)
    for key in keys:
        sender.put("0", "1", key, 1)
    assert names_with(namespace) == before
    assert not names_with(f"k{os.getpid()}_")
    for key in keys:
        receiver.get("0", "1", key)
    assert names_with(namespace) == before


def test_a_damaged_payload_is_said_once_and_does_not_stay(
    make: Make, errors: Callable[[], list[str]], shm_names: Callable[[], list[str]]
) -> None:
    sender, receiver = make(), make()
    sender.put("0", "1", "k", {"a": 1})
    (data,) = [name for name in shm_names() if name.endswith(".d0")]
    with open(MOUNT / data, "r+b") as file:
        file.write(b"\xff" * 16)
    assert receiver.get("0", "1", "k") is None
    assert len(errors()) == 1
    assert receiver.get("0", "1", "k") is None
    assert len(errors()) == 1
    assert receiver.cleanup("k") is False
    sender.put("0", "1", "k", {"a": 2})
    assert receiver.get("0", "1", "k")[0] == {"a": 2}


def test_a_killed_stage_leaves_nothing_for_good(
    make: Make, children: Children, shm_names: Callable[[], list[str]]
) -> None:
    child = children.start()
    child.run(START + "c = make(orphan_ttl_s=0.05)\nfor n in range(20): c.put('0', '1', f'r_0_{n}', bytes(200_000))")
    assert len(shm_names()) > 2
    child.kill()
    deadline = time.monotonic() + 100
    while [name for name in shm_names() if not name.endswith(".dir")]:
        assert time.monotonic() < deadline, shm_names()
        make().close()  # the next start of any stage
    make().close()
    assert not shm_names()


def test_what_a_killed_stage_has_sent_still_arrives(make: Make, children: Children) -> None:
    receiver = make(stage_id=1)
    child = children.start()
    child.run(START + "import torch\nc = make()\nc.put('0', '1', 'r_0_0', {'t': torch.ones(50_000), 'end': True})")
    child.kill()
    got = receiver.get("0", "1", "r_0_0")[0]
    assert (bool((got["t"] == 1).all()), got["end"]) == (True, True)
    del got
    make().close()  # whoever starts next finds nothing unread there, and tidies up


def test_a_killed_reader_holds_nothing_up(make: Make, children: Children) -> None:
    sender = make(max_bytes=9 << 20, segment_bytes=4 << 20)
    sender.put("0", "1", "k", bytes(1 << 20))
    child = children.start()
    assert child.run(START + "c = make()\nv = None\nresult = c.get('0', '1', 'k')[1]") > 1 << 20
    for _ in range(3):
        sender.put("0", "1", "big", {"t": torch.ones(700_000)})
        child.run("v = c.get('0', '1', 'big')")
    child.kill()
    for number in range(8):
        assert sender.put("0", "1", "big", {"t": torch.ones(700_000), "n": number})[0]
    assert make().get("0", "1", "big")[0]["n"] == 7


def test_no_resource_tracker_takes_part(make: Make, children: Children) -> None:
    """In the peer a reader that exits takes an unread segment with it, and a sender warns of leaks."""
    sender = make()
    sender.put("0", "1", "for another", {"n": 5})
    for _ in range(2):
        reader = children.start()
        reader.run(START + "c = make()\nfor n in range(50): c.get('0', '1', f'nothing_{n}')")
        assert reader.run("result = tracker._resource_tracker._pid") is None
        assert reader.stop() == 0
    assert make().get("0", "1", "for another")[0] == {"n": 5}
    writer = children.start()
    writer.run(START + "c = make()\nc.put('0', '1', 'unread', bytes(200_000))")
    assert writer.stop() == 0  # and silently: the fixture looks at its stderr


def test_a_reader_never_sees_half_of_a_replaced_payload(make: Make, children: Children) -> None:
    writer = children.start()
    writer.run(START + "import torch\nc = make()")
    receiver = make()
    writer.start(
        "for n in range(3000):\n    assert c.put('0', '1', 'k', {'n': n, 't': torch.full((1 + n % 3 * 5000,), n)})[0]\n"
    )
    last, deadline = -1, time.monotonic() + 150
    while last < 2999 and time.monotonic() < deadline:
        found = receiver.get("0", "1", "k")
        if found is not None:
            number = found[0]["n"]
            assert number > last
            assert bool((found[0]["t"] == number).all())
            last = number
    assert last == 2999
    writer.finish()


def test_two_processes_on_many_keys_at_once(make: Make, children: Children) -> None:
    """As a decode step: every key is polled, found once, and holds what was put."""
    reader = children.start()
    reader.run(START + "c = make(stage_id=1)")
    sender = make(stage_id=0)
    reader.start(
        """
next_chunk, left, sums = [0] * 16, 16 * 60, 0
while left:
    seen = c.get_wakeup_generation()
    for r in range(16):
        found = c.get('0', '1', f'chatcmpl-{r}_0_{next_chunk[r]}', None)
        if found is not None:
            assert found[0]['meta'] == {'r': r, 'chunk': next_chunk[r]}, found
            sums += int(found[0]['embed'].sum())
            next_chunk[r] += 1
            left -= 1
    c.wait_for_change(seen, timeout=0.5)
result = sums
"""
    )
    for chunk in range(60):
        for request in range(16):
            data = {"meta": {"r": request, "chunk": chunk}, "embed": torch.ones(1, 64, dtype=torch.int32)}
            assert sender.put("0", "1", f"chatcmpl-{request}_0_{chunk}", data)[0]
        sender.reap_consumed()
    assert reader.finish(150) == 16 * 60 * 64
    assert sender.health()["live_blocks"] == 0


@pytest.mark.root
def test_a_full_mount_refuses_soon_and_recovers(children: Children) -> None:
    child = children.start(command=mounted("size=16m"))
    child.run(START + "c = make(); r = make()")
    answer = child.run(
        """
kept, times = 0, []
while True:
    start = time.monotonic()
    ok = c.put('0', '1', f'k_{kept}', {'n': kept, 't': bytes(800_000)})[0]
    times.append(time.monotonic() - start)
    if not ok:
        break
    kept += 1
result = kept, times[-1]
"""
    )
    assert answer[0] >= 10
    assert answer[1] < 10
    got = child.run("result = [r.get('0', '1', f'k_{n}')[0]['n'] for n in range(kept)]")
    assert got == list(range(answer[0]))
    assert child.run("result = c.put('0', '1', 'k', bytes(800_000))[0]") is True
    child.run("r.close(); c.close()")


def test_after_a_fork_it_answers_and_does_not_raise(children: Children) -> None:
    child = children.start(warnings_are_errors=False)
    answer = child.run(
        START
        + """
c = make()
c.put('0', '1', 'k', 1)
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, repr((c.put('0', '1', 'k', 2), c.get('0', '1', 'k'), c.cleanup('k'))).encode())
    os._exit(0)
os.wait()
result = os.read(read, 1000).decode(), c.get('0', '1', 'k')[0]
os.close(read); os.close(write)
c.close()
"""
    )
    assert answer == ("((False, 0, None), None, False)", 1)
