"""A producer here and a consumer in another process, driven message by message."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from bench import payloads
from bench.control import Mailbox
from bench.peers import Peer, load_peer

REPLY_WITHIN_S = 60.0


@dataclass
class Samples:
    """One-way times in nanoseconds, one entry per message, from the moment before `put`."""

    put: list[int] = field(default_factory=list)
    usable: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    preempted: int = 0

    @property
    def seconds(self) -> float:
        """How long all messages took together."""
        return sum(self.read) / 1e9


@dataclass(frozen=True)
class Usage:
    """What the kernel counted for a process, from its start or between two moments.

    Args:
        faults: page faults that needed no disk.
        preempted: how often it lost its core although it could have gone on.
    """

    faults: int
    preempted: int

    @classmethod
    def so_far(cls) -> Usage:
        counted = resource.getrusage(resource.RUSAGE_SELF)
        return cls(counted.ru_minflt, counted.ru_nivcsw)

    def until_now(self) -> Usage:
        now = Usage.so_far()
        return Usage(now.faults - self.faults, now.preempted - self.preempted)


def mark(moment: str) -> None:
    """Leave a line in a trace of system calls: a look at a file that cannot exist, named after the moment."""
    os.access(f"/omni-bench-mark/{moment}", os.F_OK)


def consume(commands: Connection, name: str, mailbox_name: str, core: int | None, yields: bool) -> None:
    """The consumer's whole life: obey commands from the pipe, take messages announced in the mailbox."""
    import torch

    torch.set_num_threads(1)
    if core is not None:
        os.sched_setaffinity(0, {core})
    peer = load_peer(name)
    mailbox = Mailbox(mailbox_name, create=False, yields=yields)
    end: Any = None
    sent: Any = None
    commands.send("ready")
    while True:
        what, value = commands.recv()
        answer: Any = None
        try:
            if what == "open":
                place, load, depth = value
                mailbox.reset(depth)
                sent = payloads.make(load)
                end = peer.open(place, "get", load, depth)
                gc.collect()
                gc.disable()
            elif what == "check":
                answer = payloads.difference(sent, _next(peer, end, mailbox))
            elif what == "take":
                answer = _take(peer, end, mailbox, *value)
            elif what == "drain":
                _drain(peer, end, mailbox, *value)
            elif what == "close":
                end.close()
                end = sent = None
                gc.enable()
            else:
                mailbox.close()
                return
        except Exception as error:
            commands.send(error)
            mailbox.fail()
        else:
            commands.send(answer)


def _take(peer: Peer, end: Any, mailbox: Mailbox, count: int, tag: str) -> Usage:
    """Take `count` messages, read each; what this process used meanwhile."""
    now, get, own = time.monotonic_ns, peer.get, peer.own_channel
    before = Usage.so_far()
    mark(f"begin-{tag}")
    for _ in range(count):
        if own:
            data = get(end, None)
            mailbox.taken_elsewhere()
        else:
            data = get(end, mailbox.receive())
        got = now()
        payloads.read_all(data)
        read = now()
        data = None
        mailbox.answer(got, read)
    mark(f"end-{tag}")
    return before.until_now()


def _drain(peer: Peer, end: Any, mailbox: Mailbox, count: int, read: bool) -> None:
    """Take `count` messages as they come, and read each or not."""
    for _ in range(count):
        data = _next(peer, end, mailbox)
        if read:
            payloads.read_all(data)
        data = None
        mailbox.answer(0, 0)


def _next(peer: Peer, end: Any, mailbox: Mailbox) -> Any:
    if not peer.own_channel:
        return peer.get(end, mailbox.receive())
    data = peer.get(end, None)
    mailbox.taken_elsewhere()
    return data


def _state(pid: int | None) -> str:
    """What a process does, as the kernel's letter for it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Pair:
    """A peer's producer in this process and its consumer in a process of its own.

    Args:
        name: the peer, one of `bench.peers.NAMES`.
        place: prefix of everything it may create in /dev/shm.
        core: where the consumer shall stay, None for anywhere.
        yields: see `Mailbox`.
    """

    def __init__(self, name: str, place: str, core: int | None, yields: bool = True) -> None:
        self.name = name
        self.peer = load_peer(name)
        self.place = f"{place}-{name.replace('_', '')}"[:40]
        control = f"{self.place}-control"
        self.mailbox = Mailbox(control, create=True, yields=yields)
        # Children of a process that has loaded torch once begin at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.two_process", "torch"])
        self.commands, theirs = context.Pipe()
        self.child = context.Process(target=consume, args=(theirs, name, control, core, yields), daemon=True)
        self.child.start()
        theirs.close()
        self.end: Any = None
        self.data: Any = None
        self._answer()

    def open(self, load: str, depth: int = 1) -> None:
        """Both ends, for a load; the ends of the load before are closed.

        Args:
            load: its name.
            depth: how many messages may be under way at once.
        """
        self.data = payloads.make(load)
        self.mailbox.reset(depth)
        self.end = self.peer.open(self.place, "put", load, depth)
        self._command("open", (self.place, load, depth))

    def check(self, prepare: Callable[[], Any] | None = None) -> None:
        """Send one payload and have the other side compare it with the original; not timed.

        Args:
            prepare: gives a payload that equals the load's own.

        Raises:
            AssertionError: it did not arrive as it was sent.
        """
        self.commands.send(("check", None))
        with self._both_stop():
            self._send(self.data if prepare is None else prepare())
        difference = self._answer()
        assert difference is None, f"{self.name}: {difference}"

    def run(
        self,
        count: int,
        samples: Samples | None = None,
        tag: str = "run",
        prepare: Callable[[], Any] | None = None,
    ) -> list[Usage]:
        """Send `count` messages one after the other.

        Args:
            count: how many.
            samples: where to append the times.
            tag: names this run's marks in a trace of system calls.
            prepare: gives each message's payload, before its time begins; without it all are the load's.

        Returns:
            What the producer and the consumer used meanwhile.
        """
        now = time.monotonic_ns
        put, end, data, mailbox, own = self.peer.put, self.end, self.data, self.mailbox, self.peer.own_channel
        self.commands.send(("take", (count, tag)))
        before = Usage.so_far()
        mark(f"begin-{tag}")
        with self._both_stop():
            for _ in range(count):
                if prepare is not None:
                    data = prepare()
                start = now()
                note = put(end, data)
                handed = now()
                if own:
                    mailbox.sent_elsewhere()
                else:
                    mailbox.send(note)
                got, read = mailbox.answers()
                if samples is not None:
                    samples.put.append(handed - start)
                    samples.usable.append(got - start)
                    samples.read.append(read - start)
        mark(f"end-{tag}")
        used = [before.until_now(), self._answer()]
        if samples is not None:
            samples.preempted += sum(each.preempted for each in used)
        return used

    def asleep(self, within_s: float = 5.0) -> None:
        """Wait until the consumer sleeps in the kernel.

        Raises:
            TimeoutError: it does not.
        """
        limit = time.monotonic() + within_s
        while _state(self.child.pid) != "S":
            if time.monotonic() > limit:
                raise TimeoutError(f"{self.name}: the consumer did not fall asleep within {within_s} s")

    def stream(self, count: int, read: bool) -> float:
        """Send `count` messages, as many under way as the ends were opened for.

        Args:
            count: how many.
            read: the consumer reads every byte of each; else it drops what it got at once.

        Returns:
            Seconds from the first `put` until the last message was dropped.
        """
        self.commands.send(("drain", (count, read)))
        with self._both_stop():
            start = time.monotonic()
            for _ in range(count):
                self.mailbox.room()
                self._send(self.data)
            self.mailbox.answers()
            spent = time.monotonic() - start
        self._answer()
        return spent

    def _send(self, data: Any) -> None:
        note = self.peer.put(self.end, data)
        if self.peer.own_channel:
            self.mailbox.sent_elsewhere()
        else:
            self.mailbox.send(note)

    def close_ends(self) -> None:
        if self.end is None:
            return
        self._command("close", None)
        self.end.close()
        self.end = self.data = None

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child.is_alive():
            self.commands.send(("exit", None))
            self.child.join(10)
        if self.child.is_alive():
            self.child.kill()
            self.child.join(10)
        if self.end is not None:
            self.end.close()
        self.commands.close()
        self.mailbox.close()

    @contextlib.contextmanager
    def _both_stop(self) -> Iterator[None]:
        """When one side fails the other must not wait for it: the next load would find it still waiting."""
        try:
            yield
        except BrokenPipeError:
            pass  # the consumer's own error follows through the pipe, and says more
        except BaseException:
            self.mailbox.fail()
            with contextlib.suppress(Exception):
                self._answer()
            raise

    def _command(self, what: str, value: Any) -> Any:
        self.commands.send((what, value))
        return self._answer()

    def _answer(self) -> Any:
        if not self.commands.poll(REPLY_WITHIN_S):
            raise TimeoutError(f"{self.name}: the consumer did not answer within {REPLY_WITHIN_S} s")
        answer = self.commands.recv()
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self.name}: the consumer failed: {answer!r}") from answer
        return answer
