"""All targets, with their part of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from fuzz import control, dicts, frames, names, traps
from fuzz.runner import Target


@dataclass(frozen=True)
class Kind:
    """A target and its part of a run.

    Args:
        make: makes it, in the child; None for the core's program, which is a child by itself.
        share: of the inputs, by weight.
        time: of the seconds, by weight.
        batch: how many inputs one child runs.
    """

    make: Callable[[], Target] | None
    share: float
    time: float
    batch: int


TARGETS: dict[str, Kind] = {
    "frame": Kind(frames.Frame, 60, 8, 20_000),
    "lease": Kind(frames.Lease, 12, 4, 5_000),
    "race": Kind(frames.Race, 3, 1, 5_000),
    "metadata": Kind(dicts.Metadata, 20, 3, 5_000),
    "control": Kind(control.Control, 3, 4, 500),
    "scribble": Kind(control.Scribble, 3, 4, 500),
    "directory": Kind(control.Directory, 1, 2, 500),
    "names": Kind(names.Names, 1, 2, 500),
}

TRAPS = {f"trap-{name}": Kind(functools.partial(traps.Trap, name), 1, 1, 10) for name in traps.SPRINGS}
"""Targets with a known fault, to see that each kind of fault is found; they run only when they are asked for."""
