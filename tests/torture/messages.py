"""Millions of payloads of random sizes, let go of in random order: nothing wrong, nothing lost, memory flat.

Once between two processes, once within one. Each payload is looked at when it arrives (its number, four of its words)
and when it is let go (one of them again), every thousandth in full. What a payload looks like follows from its number,
so both sides know it; only places go through the pipe, many at a time, so that the pipe is not what is measured.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from support import leftovers
from torture.content import PATTERN
from torture.forked import Forked
from torture.mount import Mount

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

KIB, MIB = 1 << 10, 1 << 20
SEGMENT, MAX_BYTES = MIB, 4 * MIB
CONTROL = 2 * MIB  # more than a control segment takes for the descriptors that are needed here
CHUNK = 256
HELD_BYTES = 512 * KIB  # the receiver lets go of something when it holds more
SAMPLES = 200
WARM_UP = 0.2  # of the messages, before memory has to be flat; at least so many bytes through the ring:
WARM_UP_BYTES = 5 * MAX_BYTES
FLAT_BYTES = MIB
SHARED_BYTES = 2 * (MAX_BYTES + CONTROL)  # all that may be on the mount, mapped once by each end in one process
FULL_CHECK = 1000
PUT_TIMEOUT_S = 30.0  # a put that waits so long has been forgotten
PLACE = struct.Struct("<IQQ")


@dataclass
class Chunk:
    """What `CHUNK` payloads look like: lengths in words, where they start in the pattern, four samples of each."""

    first: int
    words: list[int]
    starts: list[int]
    at: list[list[int]]
    values: list[list[int]]


def chunks(count: int, seed: int) -> Iterator[Chunk]:
    """The same for sender and receiver."""
    for number, first in enumerate(range(0, count, CHUNK)):
        rng = np.random.default_rng((seed, number))
        words = np.exp(rng.uniform(0, np.log(1024), min(CHUNK, count - first))).astype(np.int64)
        large = rng.random(words.size)
        words[large < 0.01] *= 8
        words[large < 0.0002] = 40_000  # 320 KiB
        starts = rng.integers(0, PATTERN.size - words)
        at = np.stack([np.zeros_like(words), words - 1, rng.integers(0, words), rng.integers(0, words)], 1)
        values = PATTERN[starts[:, None] + at]
        yield Chunk(first, words.tolist(), starts.tolist(), at.tolist(), values.tolist())


@dataclass
class Report:
    """One side's figures."""

    messages: int = 0
    payload_bytes: int = 0
    full_checks: int = 0
    errors: list[str] = field(default_factory=list)
    samples: list[tuple[int, int, int, int]] = field(default_factory=list)  # bytes through, RssAnon, RssShmem, names
    blocked_s: float = 0.0
    left: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        if len(self.errors) < 20:
            self.errors.append(text)


def _resident() -> tuple[int, int]:
    with open("/proc/self/status") as file:
        found = {line.split(":")[0]: line.split()[1] for line in file if line.startswith(("RssAnon", "RssShmem"))}
    return int(found["RssAnon"]) * KIB, int(found["RssShmem"]) * KIB


class Side:
    """A connector, and what is known about its process's memory."""

    def __init__(self, namespace: str, count: int) -> None:
        self.connector = SharedMemoryConnector(
            {
                "namespace": namespace,
                "shm_threshold_bytes": 0,
                "segment_bytes": SEGMENT,
                "max_bytes": MAX_BYTES,
                "put_timeout_s": PUT_TIMEOUT_S,
            }
        )
        self.report = Report()
        self._mount = Mount(namespace)
        self._every = max(count // SAMPLES, 1)
        self._next = 0

    def sample(self) -> None:
        if self.report.messages >= self._next:
            self._next = self.report.messages + self._every
            self.report.samples.append((self.report.payload_bytes, *_resident(), self._mount.look()[0]))

    def end(self) -> Report:
        gc.collect()
        health = self.connector.health()
        self.report.blocked_s = health["blocked_s"]
        if health["leases"] or health["live_blocks"] or health["refused"] or health["errors"]:
            self.report.left.append(str(health))
        self.connector.close()
        return self.report


class Sender(Side):
    """Puts; `send` gives the places of a few payloads at a time."""

    def send(self, chunk: Chunk) -> Iterator[list[tuple[int, int, int]]]:
        put = self.connector.put
        places: list[tuple[int, int, int]] = []
        unsent = 0
        for index, (words, start) in enumerate(zip(chunk.words, chunk.starts, strict=True)):
            number = chunk.first + index
            if places and (unsent > 32 * KIB or words > 4 * KIB):
                yield places  # a put may have to wait for room: what is there must be known to the receiver before
                places, unsent = [], 0
            ok, size, metadata = put("a", "b", str(number % 1024), (number, PATTERN[start : start + words]))
            if not ok:
                self.report.wrong(f"put of {number} ({words} words) was refused")
                return
            place = metadata["shm"]
            self.name, self.host = place["name"], place["host"]
            places.append((place["block"], place["sequence"], size))
            unsent += size
            self.report.payload_bytes += size
        self.report.messages += len(chunk.words)
        yield places
        self.sample()


class Receiver(Side):
    """Gets, looks, holds on for a while, lets go in random order."""

    def __init__(self, namespace: str, count: int, seed: int) -> None:
        super().__init__(namespace, count)
        self._rng = random.Random(seed)
        self._held: list[tuple[Any, int, int, int]] = []
        self._held_bytes = 0
        self._place: dict[str, Any] = {"from_stage": "a", "to_stage": "b"}

    def meet(self, name: str, host: str) -> None:
        self._place |= {"name": name, "host": host}

    def receive(self, chunk: Chunk, index: int, block: int, sequence: int, size: int) -> None:
        number = chunk.first + index
        request = str(number % 1024)
        place = self._place
        place["block"], place["sequence"], place["size"], place["request_id"] = block, sequence, size, request
        got = self.connector.get("a", "b", request, {"shm": place, "size": size}, copy=False)
        if got is None:
            self.report.wrong(f"payload {number} is not there")
            return
        said, array = got[0]
        where, want, words = chunk.at[index], chunk.values[index], chunk.words[index]
        item = array.item
        if said != number or array.size != words or [item(at) for at in where] != want:
            self.report.wrong(f"payload {number} arrived as {said}, {array.size} of {words} words, or with wrong words")
        if number % FULL_CHECK == 0:
            self.report.full_checks += 1
            start = chunk.starts[index]
            if not np.array_equal(array, PATTERN[start : start + words]):
                self.report.wrong(f"payload {number} differs")
        self.report.messages += 1
        self.report.payload_bytes += size
        self._held.append((array, where[2], want[2], number))
        self._held_bytes += array.nbytes
        while self._held_bytes > HELD_BYTES:
            self.let_go()

    def let_go(self) -> None:
        """Of any one."""
        held = self._held
        if not held:
            return
        at = int(self._rng.random() * len(held))
        held[at], held[-1] = held[-1], held[at]
        array, where, want, number = held.pop()
        self._held_bytes -= array.nbytes
        if array.item(where) != want:
            self.report.wrong(f"payload {number} changed while it was held")

    def end(self) -> Report:
        while self._held:
            self.let_go()
        return super().end()


# ---- within one process, and between two


def same_process(count: int, seed: int, namespace: str) -> list[Report]:
    """Put and get by turns."""
    sender, receiver = Sender(namespace, count), Receiver(namespace, count, seed)
    for chunk in chunks(count, seed):
        index = 0
        for places in sender.send(chunk):
            receiver.meet(sender.name, sender.host)
            for place in places:
                receiver.receive(chunk, index, *place)
                index += 1
        receiver.sample()
        if sender.report.errors or receiver.report.errors:
            break
    received = receiver.end()
    return [sender.end(), received]


def send_all(count: int, seed: int, namespace: str, pipe: int) -> Report:
    """The sending process."""
    sender = Sender(namespace, count)
    named = False
    with os.fdopen(pipe, "wb", buffering=0) as out:
        for chunk in chunks(count, seed):
            for places in sender.send(chunk):
                if not named:
                    out.write(json.dumps([sender.name, sender.host]).encode().ljust(256))
                    named = True
                out.write(b"".join(PLACE.pack(*place) for place in places))
            if sender.report.errors:
                break
    deadline = time.monotonic() + PUT_TIMEOUT_S
    while sender.connector.health()["live_blocks"] and time.monotonic() < deadline:
        select.select([], [], [], 0.01)  # the receiver is still at it
    return sender.end()


def receive_all(count: int, seed: int, namespace: str, pipe: int) -> Report:
    """The receiving process."""
    receiver = Receiver(namespace, count, seed)
    buffer = bytearray()

    def need(size: int) -> bool:
        while len(buffer) < size:
            while not select.select([pipe], [], [], 0.01)[0]:
                receiver.let_go()  # the sender may wait for this very room
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return False
            buffer.extend(piece)
        return True

    if need(256):
        receiver.meet(*json.loads(bytes(buffer[:256])))
        del buffer[:256]
    for chunk in chunks(count, seed):
        for index in range(len(chunk.words)):
            if not need(PLACE.size):
                receiver.report.wrong(f"the sender ended after {receiver.report.messages} payloads")
                return receiver.end()
            place = PLACE.unpack_from(buffer)
            del buffer[: PLACE.size]
            receiver.receive(chunk, index, *place)
        receiver.sample()
    return receiver.end()


def one_process(count: int, seed: int, namespace: str) -> list[Report]:
    """Both sides in one child."""
    return _reports(Forked(lambda: [asdict(each) for each in same_process(count, seed, namespace)]))


def two_processes(count: int, seed: int, namespace: str) -> list[Report]:
    """Each side in a child of its own."""
    theirs, ours = os.pipe()
    receiver = Forked(lambda: [asdict(receive_all(count, seed, namespace, theirs))], ours)
    sender = Forked(lambda: [asdict(send_all(count, seed, namespace, ours))], theirs)
    os.close(theirs)
    os.close(ours)
    return [*_reports(sender), *_reports(receiver)]


def _reports(child: Forked) -> list[Report]:
    return [Report(**each) for each in child.answer() or [{"errors": ["a process ended badly"]}]]


def growth(samples: list[tuple[int, int, int, int]], column: int) -> float | None:
    """By how many bytes the fitted line rises after the warm-up; None when there is too little to fit one."""
    start = max(WARM_UP_BYTES, samples[-1][0] * WARM_UP) if samples else 0
    kept = np.array([sample for sample in samples if sample[0] >= start], dtype=float)
    if len(kept) < 8:
        return None
    slope: float = np.polyfit(kept[:, 0], kept[:, column], 1)[0]
    return slope * float(kept[-1, 0] - kept[0, 0])


@dataclass
class Result:
    """Both ways together."""

    asked: int
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "asked": self.asked,
            "messages": sum(part["messages"] for part in self.parts.values()),
            "per_second": round(sum(part["messages"] for part in self.parts.values()) / max(self.seconds, 1e-9)),
            "parts": self.parts,
            "faults": len(self.faults),
            "seconds": round(self.seconds, 1),
        }

    def add(self, name: str, count: int, sent: Report, got: Report, seconds: float, namespace: str) -> None:
        """Judge one way."""
        part: dict[str, Any] = {
            "messages": got.messages,
            "payload_bytes": got.payload_bytes,
            "laps_of_the_ring": round(got.payload_bytes / MAX_BYTES, 1),
            "full_checks": got.full_checks,
            "per_second": round(got.messages / max(seconds, 1e-9)),
            "blocked_s": round(sent.blocked_s, 2),
            "errors": len(sent.errors) + len(got.errors),
        }
        self.parts[name] = part
        self.faults += [f"{name}: {text}" for text in (*sent.errors, *got.errors, *sent.left, *got.left)]
        if sent.messages != count or got.messages != count:
            self.faults.append(f"{name}: {sent.messages} sent, {got.messages} received, of {count}")
        for side, report in (("sender", sent), ("receiver", got)):
            for column, what in ((1, "anonymous"), (2, "shared")):
                rise = growth(report.samples, column)
                part[f"{side}_{what}_growth_bytes"] = None if rise is None else round(rise)
                # Shared memory is bounded, not flat: it grows to the most that was ever on its way at one time.
                if what == "anonymous" and rise is not None and rise > FLAT_BYTES:
                    self.faults.append(f"{name}: {what} memory of the {side} grew by {rise:.0f} bytes")
            most = part[f"{side}_shared_bytes_max"] = max((sample[2] for sample in report.samples), default=0)
            if most > SHARED_BYTES:
                self.faults.append(f"{name}: the {side} had {most} bytes of shared memory mapped and touched")
        names = [sample[3] for sample in (*sent.samples, *got.samples)]
        part["names_bytes_max"] = max(names, default=0)
        if part["names_bytes_max"] > MAX_BYTES + CONTROL:
            self.faults.append(f"{name}: {part['names_bytes_max']} bytes on the mount")
        self.faults += [f"{name}: left {left}" for left in leftovers.names(namespace)]


def run(count: int, *, seed: int, namespace: str) -> Result:
    """Half of `count` messages between two processes, half within one."""
    result = Result(count)
    begin = time.monotonic()
    ways = (("two processes", two_processes, count - count // 2), ("same process", one_process, count // 2))
    for number, (name, way, share) in enumerate(ways):
        place = f"{namespace}-{number}"
        start = time.monotonic()
        reports = way(share, seed + number, place)
        result.add(name, share, reports[0], reports[-1], time.monotonic() - start, place)
    result.seconds = time.monotonic() - begin
    return result
