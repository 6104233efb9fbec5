"""SIGKILL while a process grows, closes or tidies up, beside others that hold views."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from support.child import Child, Children

DIE_AT = """
import os, signal
from omni_fastshm import janitor, segments
def die_after(function, calls):
    "SIGKILL right after that call of the function, or before the first one."
    real, left = getattr(segments, function), [calls]
    def counted(*args, **kwargs):
        if calls == 0: os.kill(os.getpid(), signal.SIGKILL)
        made = real(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
        return made
    setattr(segments, function, counted)
"""
SETTINGS = {"segment_bytes": 1 << 20, "max_bytes": 8 << 20, "orphan_ttl_s": 0}


def dies(child: Child, code: str) -> None:
    child.killed = True
    child.start(code)
    assert child.process.wait(60) == -signal.SIGKILL, "it never came to that step"


class TestProducer:
    """What was sent before can be got; what was begun is taken away."""

    @pytest.mark.parametrize("function", ["_create", "make"])
    def test_killed_while_it_grows(self, make: Any, children: Children, shm_names: Any, function: str) -> None:
        child, consumer = children.with_connector(**{**SETTINGS, "orphan_ttl_s": 60}), make()
        sent = child.run("result = [c.put('a', 'b', n, np.full(30_000, n))[2] for n in range(4)]")
        dies(child, f"{DIE_AT}die_after('{function}', 1)\nc.put('a', 'b', 'r', np.arange(300_000))")
        make()  # runs the janitor
        for n, metadata in enumerate(sent):
            assert (consumer.get("a", "b", n, metadata)[0] == n).all()
        self.a_fresh_one_works_and_leaves_nothing(make, shm_names)

    @pytest.mark.parametrize("removed", [0, 1, 2, 3, 4])
    def test_killed_while_it_closes(self, make: Any, children: Children, shm_names: Any, removed: int) -> None:
        child, consumer = children.with_connector(**SETTINGS), make()
        sent = child.run("result = [c.put('a', 'b', n, np.full(90_000, n))[2] for n in range(2)]")
        view = consumer.get("a", "b", 0, sent[0])[0]
        dies(child, f"{DIE_AT}die_after('unlink', {removed})\nc.close()")
        assert consumer.get("a", "b", 1, sent[1]) is None, "closing drops what is untaken"
        self.a_fresh_one_works_and_leaves_nothing(make, shm_names, view)

    def a_fresh_one_works_and_leaves_nothing(self, make: Any, shm_names: Any, view: Any = None) -> None:
        fresh = make()
        metadata = fresh.put("a", "b", "r", np.arange(20_000))[2]
        assert np.array_equal(fresh.get("a", "b", "r", metadata)[0], np.arange(20_000))
        fresh.close()
        assert view is None or (view == 0).all()
        del view
        make().close()
        assert [name for name in shm_names() if not name.endswith(".dir")] == []


class TestJanitor:
    """Whoever comes next goes on where the dead one stopped; nobody's view suffers."""

    @pytest.mark.parametrize("removed", [0, 1, 2, 3])
    def test_killed_while_it_tidies(self, make: Any, children: Children, shm_names: Any, removed: int) -> None:
        dead, tidying, consumer = children.with_connector(**SETTINGS), children.with_connector(), make()
        sent = dead.run("result = [c.put('a', 'b', n, np.full(90_000, n))[2] for n in range(2)]")
        view = consumer.get("a", "b", 0, sent[0])[0]
        dead.kill()
        dies(tidying, f"{DIE_AT}die_after('unlink', {removed})\njanitor.sweep(c.namespace)")
        assert (view == 0).all()
        assert consumer.get("a", "b", 1, sent[1]) is None
        make().close()
        assert (view == 0).all()
        assert [name for name in shm_names() if not name.endswith(".dir")] == []
        del view
