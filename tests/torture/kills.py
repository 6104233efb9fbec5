"""SIGKILL at random moments: producers, consumers and janitors die in the middle of whatever they do, others go on.

The referee starts all processes, tells each what to do next, kills some, starts others in their place, and keeps the
book (`ledger`). It holds no connector, so that its children inherit nothing. A run is a series of rounds; at the end of
each, survivors get what can be got, the orphans' time goes by, one sweep runs, and nothing of the dead may be left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support import leftovers
from torture import worker
from torture.ledger import Fault, Ledger
from torture.mount import Mount
from torture.schedule import Life, Schedule
from torture.worker import PHASES, Spec, Times, be_worker

from omni_fastshm import janitor

KIB, MIB = 1 << 10, 1 << 20
PUT_TIMEOUT_S = 0.25
LATE_NS = 1_000_000_000  # a call may last so much longer than its own timeout, time without a processor not counted
SEGMENT, MAX_BYTES = 256 * KIB, 2 * MIB
ENDPOINT = MAX_BYTES + 4 * MIB  # with its control segment: a key table of 2 MiB, descriptors
QUEUE = 24  # commands that a worker has ahead of it
AIMS = (
    worker.FILL,
    worker.PUT,
    worker.PUT,
    worker.GET,
    worker.GET,
    worker.RELEASE,
    worker.CLEANUP,
    worker.CLOSE,
    worker.SWEEP,
)
STUCK_S = 60.0
DESCRIPTORS, MAPS = 64, 128  # of a survivor: its own, and some for the handful of processes that lived to the end
TIDY_S = 10.0  # after an orphan's time, how long its memory may stay until somebody sweeps


@dataclass(frozen=True)
class Plan:
    """What a round is like.

    Args:
        kills: how many.
        rate: of them in a second, at most.
        ttl_s: how long orphans are kept.
        mortals: roles of those that are killed and started again.
        survivors: roles of those that are not.
        backlog: payloads that lie there, taken or not, before consumers hurry.
    """

    kills: int
    rate: float = 25.0
    ttl_s: float = 1.0
    mortals: tuple[str, ...] = ("producer", "producer", "consumer", "consumer", "both", "janitor")
    survivors: tuple[str, ...] = ("producer", "consumer")
    backlog: int = 20


@dataclass
class Result:
    """What all rounds together brought."""

    asked: int = 0
    kills: int = 0
    rounds: int = 0
    killed_while: Counter[str] = field(default_factory=Counter)
    killed_roles: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    slowest_ms: dict[str, float] = field(default_factory=dict)
    names_bytes_max: int = 0
    mount_bytes_max: int = 0
    survivors: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON."""
        kinds = ("corrupt", "changed", "double", "lost", "overslept", "undead", "ghost", "late", "left", "memory")
        plain = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "examples"}
        plain["faults"] = {**dict.fromkeys(kinds, 0), **Counter(fault.kind for fault in self.faults)}
        plain["seconds"] = round(self.seconds, 1)
        plain["complete"] = self.kills >= self.asked
        return plain


class Round:
    """One round, from the first fork to the look at what is left."""

    def __init__(
        self, plan: Plan, namespace: str, rng: random.Random, result: Result, first_uid: int, own_mount: bool = False
    ) -> None:
        self.plan = plan
        self._own_mount = own_mount
        self.namespace = namespace
        self.rng = rng
        self.result = result
        self.ledger = Ledger()
        self.schedule = Schedule(rng, self.ledger, plan.backlog, first_uid)
        self.mount = Mount(namespace)
        self.killing = True
        self.kills = 0
        self._lives: dict[int, Life] = {}  # by serial
        self._next_serial = 1
        self._deaths: list[int] = []
        self._phases = mmap.mmap(-1, mmap.PAGESIZE)
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._buffer = bytearray()
        self._heard_at = time.monotonic()

    def run(self, until: float) -> None:
        """All of it; no more kills after the time `until` (monotonic seconds)."""
        try:
            for slot, role in enumerate((*self.plan.survivors, *self.plan.mortals)):
                self._start(role, slot, mortal=slot >= len(self.plan.survivors))
            self._kill_some(until)
            self._drain()
            self._leave()
        finally:
            for life in list(self._lives.values()):
                os.kill(life.pid, signal.SIGKILL)
                os.waitpid(life.pid, 0)
                os.close(life.commands)
            os.close(self._reader)
            os.close(self._writer)
            self._phases.close()
            self._hand_in()

    def _hand_in(self) -> None:
        result = self.result
        result.rounds += 1
        result.kills += self.kills
        result.fates += self.ledger.fates
        result.counts += self.ledger.counts
        result.faults += self.ledger.faults
        result.names_bytes_max = max(result.names_bytes_max, self.mount.names_max)
        result.mount_bytes_max = max(result.mount_bytes_max, self.mount.used_max)

    # ---- processes

    def _start(self, role: str, slot: int, mortal: bool) -> None:
        rng, serial = self.rng, self._next_serial
        self._next_serial += 1
        settings = {
            "namespace": self.namespace,
            "segment_bytes": SEGMENT,
            "max_bytes": MAX_BYTES,
            "put_timeout_s": PUT_TIMEOUT_S,
            "shm_threshold_bytes": worker.THRESHOLD,
            "orphan_ttl_s": self.plan.ttl_s,
            "idle_segment_s": rng.choice((0.0, 0.05, 2.0)),
            "linger_s": rng.choice((0.0, 0.0, 0.02)),
        }
        keyed = rng.random() < 0.5 or not self.killing
        spec = Spec(slot, serial, rng.getrandbits(32), role, keyed, settings)
        self.ledger.born(serial, self.plan.ttl_s)
        self._phases[slot] = worker.START
        theirs, commands = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            for fd in (self._reader, commands, *(life.commands for life in self._lives.values())):
                os.close(fd)
            be_worker(spec, theirs, self._writer, self._phases)
        os.close(theirs)
        life = self._lives[serial] = Life(spec, pid, commands, mortal)
        if mortal and self.killing and rng.random() < 0.2:
            life.dies_at = time.monotonic_ns() + rng.randrange(15_000_000)  # in its first moments

    def _command(self, life: Life, *command: Any) -> None:
        life.queued += 1
        with contextlib.suppress(BrokenPipeError):  # it crashed: that is found, and counted, soon
            os.write(life.commands, worker.frame(command))

    def _kill(self, life: Life) -> None:
        at = time.monotonic_ns()
        os.kill(life.pid, signal.SIGKILL)
        _, status = os.waitpid(life.pid, 0)
        phase = PHASES[self._phases[life.spec.slot]]
        self._listen(0)  # all that it wrote is in the pipe
        self._bury(life, at)
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            self.kills += 1
            self._deaths.append(at)
            self.result.killed_while[phase] += 1
            self.result.killed_roles[life.spec.role] += 1
        else:
            self._crashed(life, status)
        self._start(life.spec.role, life.spec.slot, mortal=True)

    def _bury(self, life: Life, at: int) -> None:
        os.close(life.commands)
        del self._lives[life.spec.serial]
        self.ledger.dies(life.spec.serial, at)
        self.schedule.died(life)

    def _crashed(self, life: Life, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.ledger.fault("crashed", f"a {life.spec.role} (process {life.spec.serial}) ended with {code} by itself")

    def _look_for_crashes(self) -> None:
        for life in list(self._lives.values()):
            pid, status = os.waitpid(life.pid, os.WNOHANG)
            if pid:
                at = time.monotonic_ns()
                self._listen(0)
                self._bury(life, at)
                if not life.stopped:
                    self._crashed(life, status)
                    if self.killing:
                        self._start(life.spec.role, life.spec.slot, life.mortal)

    # ---- reports

    def _listen(self, timeout_s: float) -> None:
        """Read what was reported, waiting for the first at most so long."""
        if timeout_s > 0 and not select.select([self._reader], [], [], timeout_s)[0]:
            return
        try:
            while piece := os.read(self._reader, 1 << 18):
                self._heard_at = time.monotonic()
                self._buffer += piece
                for kind, serial, *values in worker.unframe(self._buffer):
                    getattr(self, "_on_" + kind)(self._lives[serial], *values)
        except BlockingIOError:
            pass

    def _on_up(self, life: Life, took_ns: int) -> None:
        life.up = True
        self._slowest("start", took_ns)

    def _on_done(self, life: Life) -> None:
        """The answer to a command is complete."""
        life.queued -= 1

    def _on_put(self, life: Life, uid: int, rid: str, takers: int, at: int) -> None:
        self.ledger.put_begins(uid, rid, takers, life.spec.serial, at)

    def _on_put_end(self, life: Life, uid: int, rid: str, takers: int, metadata: Any, times: Times) -> None:
        self._measure("put", PUT_TIMEOUT_S, times, life)
        inline = metadata is not None and "inline_bytes" in metadata
        self.ledger.put_ends(uid, metadata is not None, times[1], inline=inline)
        self.ledger.counts["inline"] += inline
        self.schedule.put_ended(life, rid, uid, takers, metadata)

    def _on_get(self, life: Life, token: int, at: int) -> None:
        rid, uid, _ = self.schedule.gets[token]
        self.ledger.get_begins(token, rid, uid, life.spec.serial, at)

    def _on_get_end(self, life: Life, token: int, brought: int | None, problem: str, times: Times) -> None:
        rid, _, timeout = self.schedule.gets[token]
        self._measure("get", timeout, times, life)
        if problem:
            self.ledger.fault("corrupt", problem, rid)
        self.ledger.get_ends(token, brought, times)
        self.schedule.get_ended(life, token)

    def _on_changed(self, life: Life, uid: int, rid: str, problem: str) -> None:
        self.ledger.fault("changed", f"a view held by process {life.spec.serial} changed: {problem}", rid)

    def _on_cleanup(self, life: Life, rid: str, at: int) -> None:
        self.ledger.cancel_begins(rid, life.spec.serial, at)

    def _on_cleanup_end(self, life: Life, rid: str, times: Times) -> None:
        self._measure("cleanup", 0, times, life)
        self.ledger.cancel_ends(rid, life.spec.serial, times[0], times[1])
        self.schedule.cleaned(life, rid)

    def _on_close(self, life: Life, at: int) -> None:
        self.ledger.closes(life.spec.serial, at)

    def _on_close_end(self, life: Life, times: Times) -> None:
        self._measure("close", life.spec.settings["linger_s"], times, life)

    def _on_swept(self, life: Life, removed: int, times: Times) -> None:
        self._slowest("sweep", times[1] - times[0] - times[2])
        self.ledger.counts["removed by janitors"] += removed

    def _on_vitals(self, life: Life, vitals: dict[str, Any]) -> None:
        life.vitals = vitals

    def _on_stopped(self, life: Life) -> None:
        life.stopped = True

    def _on_warning(self, life: Life, kind: str, text: str) -> None:
        self.result.warnings[kind] += 1
        self.result.examples.setdefault(kind, text)

    def _on_error(self, life: Life, text: str) -> None:
        self.ledger.fault("error", f"in a {life.spec.role} (process {life.spec.serial}): {text}")

    def _measure(self, what: str, timeout_s: float, times: Times, life: Life) -> None:
        start, end, queued = times
        self._slowest(what, end - start - queued)
        if end - start - queued > timeout_s * 1e9 + LATE_NS:
            took = f"{(end - start) / 1e9:.3f} s, {queued / 1e9:.3f} s of it without a processor"
            self.ledger.fault("late", f"{what} by process {life.spec.serial} lasted {took}; its timeout: {timeout_s} s")

    def _slowest(self, what: str, ns: int) -> None:
        self.result.slowest_ms[what] = max(self.result.slowest_ms.get(what, 0.0), round(ns / 1e6, 1))

    # ---- the three acts

    def _kill_some(self, until: float) -> None:
        next_kill = time.monotonic() + 0.2
        while self.kills < self.plan.kills and time.monotonic() < until:
            self._work(min(max(next_kill - time.monotonic(), 0.0), 0.002))
            for life in [life for life in self._lives.values() if life.dies_at is not None]:
                if life.dies_at is not None and time.monotonic_ns() >= life.dies_at:
                    self._kill(life)
            if time.monotonic() >= next_kill:
                for _ in range(3 if self.rng.random() < 0.05 else 1):  # sometimes several at once
                    self._kill(self._victim())
                next_kill = time.monotonic() + self.rng.expovariate(self.plan.rate)
        self.killing = False
        for life in self._lives.values():
            life.dies_at = None

    def _victim(self) -> Life:
        """Somebody at random, or whoever is first seen in a certain phase, and then up to 0.2 ms later."""
        mortals = [life for life in self._lives.values() if life.mortal]
        if self.rng.random() < 0.4:
            return self.rng.choice(mortals)
        wanted = self.rng.choice(AIMS)
        give_up = time.monotonic() + 0.01
        while time.monotonic() < give_up:
            for life in mortals:
                if self._phases[life.spec.slot] == wanted:
                    moment = time.monotonic_ns() + self.rng.choice((0, 0, 10_000, 50_000, 200_000)) * self.rng.random()
                    while time.monotonic_ns() < moment:
                        pass
                    return life
        return self.rng.choice(mortals)

    def _work(self, wait_s: float) -> None:
        """Hear what happened, tell everybody what to do next."""
        self._listen(wait_s)
        for life in list(self._lives.values()):
            if life.up and life.spec.role == "janitor":
                if not life.queued:
                    self._command(life, "sweep", self.namespace)
                continue
            while life.up and life.queued < QUEUE and (command := self.schedule.next_command(life)):
                self._command(life, *command)
        self._watch()

    def _watch(self) -> None:
        now = time.monotonic_ns()
        if self.mount.due(now):
            kept = now - int((self.plan.ttl_s + TIDY_S) * 1e9)
            self._deaths = [at for at in self._deaths if at > kept]
            allowed = (len(self._lives) + len(self._deaths)) * ENDPOINT
            used, grown = self.mount.look()
            # Without a name, but there: segments that are gone, of which somebody still holds a view.
            if used > allowed or (self._own_mount and grown > 2 * allowed):
                self.ledger.fault("memory", f"{used} bytes behind names, {grown} in all; {allowed} would be enough")
            self._look_for_crashes()
        if time.monotonic() - self._heard_at > STUCK_S:
            for life in self._lives.values():
                os.kill(life.pid, signal.SIGABRT)  # with its stacks on stderr
            raise AssertionError(f"nobody reported anything for {STUCK_S:g} s")

    def _drain(self) -> None:
        """Nobody dies any more: what can be got is got, and everything finds its fate."""
        self.schedule.putting = self.schedule.disturbing = False
        last = len(self.plan.survivors) + len(self.plan.mortals)
        self._start("consumer", last, mortal=False)  # one that can get by key, whatever the others can
        deadline = time.monotonic() + STUCK_S
        while self.schedule.under_way and time.monotonic() < deadline:
            self._work(0.01)
        if self.schedule.under_way:
            self.ledger.fault("lost", f"{self.schedule.under_way} requests found no end")

    def _leave(self) -> None:
        """All but the survivors leave; then what is left of the dead must go, and the survivors must be as new."""
        for life in [life for life in self._lives.values() if life.mortal]:
            self._stop(life)
        self._all("release")
        self._sweep_orphans()
        self._nothing_kept()
        for life in list(self._lives.values()):
            self._stop(life)
        janitor.sweep(self.namespace)
        for name in leftovers.names(self.namespace):
            self.ledger.fault("left", name)
        if self._own_mount and (left := self.mount.grown()):
            self.ledger.fault("left", f"{left} bytes of the mount")

    def _sweep_orphans(self) -> None:
        janitor.sweep(self.namespace)  # finds who died last: from now on the orphans' time runs
        select.select([], [], [], self.plan.ttl_s + 0.05)
        janitor.sweep(self.namespace)

    def _all(self, command: str, *values: Any) -> None:
        for life in self._lives.values():
            self._command(life, command, *values)
        self._until(lambda: not any(life.queued for life in self._lives.values()))

    def _stop(self, life: Life) -> None:
        self._command(life, "stop")
        self._until(lambda: life.stopped)
        _, status = os.waitpid(life.pid, 0)
        if status:
            self._crashed(life, status)
        self._bury(life, time.monotonic_ns())

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_S
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError("a survivor does not answer")
            self._listen(0.05)

    def _nothing_kept(self) -> None:
        """Survivors have all their room again, and keep nothing of the dead."""
        self._all("fill", MAX_BYTES - 64 * KIB)
        self._all("vitals")
        makers = sum(life.vitals["puts"] > 0 for life in self._lives.values())
        for life in self._lives.values():
            vitals = life.vitals
            self.result.survivors[f"{life.spec.role} {life.spec.slot}"] = vitals
            who = f"in a survivor ({life.spec.role}): {vitals}"
            if vitals["leases"] or vitals["live_blocks"]:
                self.ledger.fault("left", f"blocks {who}")
            if vitals["descriptors"] > DESCRIPTORS or vitals["maps"] > MAPS:
                self.ledger.fault("left", f"descriptors or mappings of the dead {who}")
            if vitals["producers"] > makers:
                self.ledger.fault("left", f"{vitals['producers'] - makers} dead producers in the directory, seen {who}")


def random_plan(rng: random.Random, kills: int) -> Plan:
    """A round of some kind."""
    plan = Plan(
        kills,
        ttl_s=rng.choice((0.5, 1.0, 2.0)),
        backlog=rng.choice((0, 20, 60)),
        survivors=rng.choice((("producer", "consumer"), ("producer", "consumer"), ("both",), ())),
    )
    if rng.random() < 0.1:  # more readers of one producer than have a slot of their own
        crowd = ("consumer",) * 34
        plan = dataclasses.replace(plan, kills=min(kills, 100), survivors=("producer",), mortals=(*crowd, "janitor"))
    return plan


def run(
    kills: int,
    *,
    seed: int,
    seconds: float,
    namespace: str,
    per_round: int = 500,
    own_mount: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Kill so many processes, in rounds.

    Args:
        kills: how many SIGKILLs.
        seed: of everything that is drawn; timing stays the machine's.
        seconds: no kill comes later than this, however many are missing.
        namespace: base of the names that the rounds use.
        per_round: kills from one look at what is left to the next.
        own_mount: nobody else uses the shm mount, so all of its memory is judged, not only what has a name.
        say: gets a line of progress after each round.
    """
    start = time.monotonic()
    rng = random.Random(seed)
    result = Result(asked=kills)
    first_uid = 1
    while result.kills < kills and time.monotonic() < start + seconds and not result.faults:
        plan = random_plan(rng, min(per_round, kills - result.kills))
        descriptors = len(leftovers.descriptors())
        one = Round(plan, f"{namespace}-{result.rounds}", rng, result, first_uid, own_mount)
        try:
            one.run(start + seconds)
        except AssertionError as error:
            result.faults.append(Fault("stuck", str(error)))
        first_uid = one.schedule.next_uid
        if len(leftovers.descriptors()) != descriptors:
            result.faults.append(Fault("left", f"the referee had {descriptors} descriptors before the round"))
        say(f"{result.kills} kills, {result.counts['gets']} gets, {len(result.faults)} faults")
    result.seconds = time.monotonic() - start
    return result
