"""What one message costs in system calls, page faults and memory once everything is warm; run as a program.

``python -m bench.steady faults PEER same|two PLACE LOAD:WARM:MESSAGES…`` sends the messages of each load,
after some to warm up, between two marks that a trace of system calls can be cut at, and prints the page
faults. ``python -m bench.steady flat PEER PLACE LOAD MESSAGES`` prints how much memory there is at ten
moments of one long run.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench import payloads
from bench.conftest import shared_memory_of
from bench.peers import load_peer
from bench.two_process import Pair, Usage, mark

# Messages before the count begins: twice around a ring of the default size; of small ones also more than there
# are request ids that the library remembers the hashes of, so that remembering another takes no memory.
WARM_BYTES = 128 * payloads.MIB
WARM_SMALL = 12_000
PID_AND_CALL = re.compile(r"^(\d+)\s+(\w+)\((.*)")


def faults(name: str, mode: str, place: str, wanted: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Page faults during the messages of each load: of one process, or of producer and consumer."""
    gc.collect()
    gc.disable()
    return (_same if mode == "same" else _two)(name, place, wanted)


def _same(name: str, place: str, wanted: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    peer = load_peer(name)
    result = {}
    for load, (warm, count) in wanted.items():
        data = payloads.make(load)
        end = peer.open(place, "both", load, 1)
        _pump(peer, end, data, warm)
        before = Usage.so_far()
        mark(f"begin-{load}")
        _pump(peer, end, data, count)
        mark(f"end-{load}")
        result[load] = [before.until_now().faults]
        end.close()
    return result


def _pump(peer: Any, end: Any, data: Any, count: int) -> None:
    for _ in range(count):
        peer.get(end, peer.put(end, data))


def _two(name: str, place: str, wanted: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    result = {}
    with Pair(name, place, None, yields=False) as pair:
        for load, (warm, count) in wanted.items():
            pair.open(load)
            pair.run(warm)
            result[load] = [used.faults for used in pair.run(count, tag=load)]
            pair.close_ends()
    return result


def warm_up(load: str) -> int:
    """Messages of this load that have to go by before everything has been touched."""
    size = payloads.tensor_bytes(payloads.make(load))
    return WARM_SMALL if size <= 64 * payloads.KIB else max(20, WARM_BYTES // size)


def system_calls(trace: Path, load: str) -> Counter[str]:
    """Which system calls a trace (``strace -f -o``) shows between the marks of a load, by all processes and
    threads.

    Raises:
        ValueError: the trace lacks a mark; then nothing was counted.
    """
    begin, end = f"/omni-bench-mark/begin-{load}", f"/omni-bench-mark/end-{load}"
    lines = [match.groups() for match in map(PID_AND_CALL.match, trace.read_text().splitlines()) if match]
    marked = {pid for pid, _, rest in lines if begin in rest}
    if not marked or marked != {pid for pid, _, rest in lines if end in rest}:
        raise ValueError(f"{trace}: the marks of {load} are missing")
    found: Counter[str] = Counter()
    running: set[str] = set()
    for pid, call, rest in lines:
        if begin in rest:
            running.add(pid)
        elif end in rest:
            running.remove(pid)
        elif pid in running or (running and pid not in marked):  # threads without marks of their own count too
            found[call] += 1
            if "O_CREAT" in rest:
                found["file created"] += 1
    return found


def flat(name: str, place: str, load: str, count: int) -> list[dict[str, int]]:
    """Memory at ten moments of a run between two processes: resident bytes of both, bytes in /dev/shm."""
    moments = []
    with Pair(name, place, None) as pair:
        pair.open(load)
        for _ in range(10):
            pair.run(count // 10)
            resident = _resident(os.getpid()) + _resident(pair.child.pid)
            shared = sum(shared_memory_of(place).values())
            moments.append({"resident_bytes": resident, "shm_bytes": shared})
        pair.close_ends()
    return moments


def _resident(pid: int | None) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    what, name, *rest = arguments
    if what == "faults":
        mode, place, *loads = rest
        items = (item.split(":") for item in loads)
        wanted = {load: (int(warm), int(count)) for load, warm, count in items}
        print(json.dumps(faults(name, mode, place, wanted)))
    else:
        place, load, count = rest
        print(json.dumps(flat(name, place, load, int(count))))


if __name__ == "__main__":
    main(sys.argv[1:])
