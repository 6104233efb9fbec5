"""Targets that go wrong in a known way: a fuzzer that does not notice them notices nothing."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from fuzz.chance import Chance

from omni_fastshm.errors import MetadataError

AT = 7  # the input that goes wrong


def _crash() -> None:
    ctypes.string_at(8)


def _bus() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def _hang() -> None:
    while True:
        pass


def _flood() -> None:
    bytearray(os.urandom(1)) * (200 << 20)


def _vast() -> None:
    bytearray(1 << 40)


def _foreign() -> None:
    raise ValueError("not one of ours")


class _Lookalike(MetadataError):
    """Of our kind, but not one that errors.py knows."""


def _lookalike() -> None:
    raise _Lookalike("somebody else's subclass")


def _ours() -> None:
    raise MetadataError("as it should be")


SPRINGS: dict[str, Callable[[], None]] = {
    "crash": _crash,
    "bus": _bus,
    "hang": _hang,
    "flood": _flood,
    "vast": _vast,
    "foreign": _foreign,
    "lookalike": _lookalike,
    "ours": _ours,
}


class Trap:
    """Goes wrong at one input.

    Args:
        name: how, one of `SPRINGS`.
    """

    def __init__(self, name: str) -> None:
        self._spring = SPRINGS[name]

    def run(self, chance: Chance) -> str:
        if chance.index == AT:
            self._spring()
        return "read"

    def check(self) -> None:
        pass

    def describe(self, chance: Chance) -> str:
        return "nothing"

    def close(self) -> None:
        pass
