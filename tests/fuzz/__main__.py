"""`python -m fuzz`, with tests/ on the path: bad bytes for everything that reads what others wrote."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # children are forked: no threads before that
os.environ.setdefault("MALLOC_ARENA_MAX", "1")

from fuzz.chance import Chance
from fuzz.native import run_core
from fuzz.runner import Batch, Finding, namespace_of_its_own, run_batch
from fuzz.targets import TARGETS, TRAPS, Kind

CORE = Kind(None, 10, 3, 0)
ALL = {**TARGETS, "core": CORE}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many in all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after that time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=[*ALL, *TRAPS], help="only these; may be repeated")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--hang", type=float, default=20.0, help="how many seconds one input may take")
    parser.add_argument("--show", action="store_true", help="print the first input instead of running it")
    parser.add_argument("--sites", action="store_true", help="also print which messages came how often")
    return parser.parse_args()


def share(names: list[str], inputs: int) -> dict[str, int]:
    """How many inputs each target gets; at least one."""
    weight = sum(kind_of(name).share for name in names)
    return {name: max(1, round(inputs * kind_of(name).share / weight)) for name in names}


def kind_of(name: str) -> Kind:
    return ALL[name] if name in ALL else TRAPS[name]


def run_target(total: Batch, stop: float, hang_s: float) -> None:
    """All inputs of one target, in batches; after a crash it goes on behind the culprit."""
    kind = kind_of(total.target)
    if kind.make is None:
        run_core(total, stop - time.monotonic())
        return
    at, end = total.first, total.first + total.count
    while at < end and time.monotonic() < stop and len(total.findings) < 20:
        batch = run_batch(Batch(total.target, total.seed, at, min(kind.batch, end - at)), kind.make, stop, hang_s)
        total.add(batch)
        at += batch.done
        if not batch.done:
            break  # it could not even be made


def report(total: Batch, sites: bool) -> None:
    rate = total.done / total.seconds if total.seconds else 0.0
    answers = ", ".join(f"{name} {count}" for name, count in total.answers.most_common())
    print(
        f"{total.target:>10}: {total.done} inputs, {rate:.0f}/s, {len(total.findings)} findings, "
        f"slowest {total.slowest_s * 1000:.0f} ms ({total.slowest}), peak {total.peak >> 20} MiB; {answers}",
        flush=True,
    )
    for text, count in total.sites.most_common() if sites else []:
        print(f"            {count:8} {text}")
    alike: dict[str, list[Finding]] = {}
    for finding in total.findings:
        alike.setdefault(finding.kind, []).append(finding)
    for group in alike.values():
        print(f"FOUND {len(group)} times: {group[0]}", flush=True)


def main() -> int:
    given = arguments()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    names = given.target or list(ALL)
    if given.show:
        make = kind_of(names[0]).make
        assert make is not None, "the core's inputs are written out when they are found"
        with namespace_of_its_own(f"fuzz-{os.getpid()}"):
            print(make().describe(Chance(given.seed, names[0], given.first)))
        return 0
    counts = share(names, given.inputs)
    begun = time.monotonic()
    found = done = 0
    with namespace_of_its_own(f"fuzz-{os.getpid()}"):
        for position, name in enumerate(names):
            left = given.seconds - (time.monotonic() - begun)
            # What the targets before it did not need is there for this one.
            stop = time.monotonic() + left * kind_of(name).time / sum(kind_of(n).time for n in names[position:])
            total = Batch(name, given.seed, given.first, counts[name])
            run_target(total, stop, given.hang)
            report(total, given.sites)
            found += len(total.findings)
            done += total.done
    print(f"{done} inputs, {found} findings, {time.monotonic() - begun:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
