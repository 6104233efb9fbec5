"""A child of a forked child: what either inherits neither works nor releases anything, and each builds its own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.forking import fork, join

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ForkedConnector

WANT = np.arange(20_000)


def build() -> tuple[Any, Any]:
    """A connector and a view that holds its payload."""
    connector: Any = SharedMemoryConnector({"segment_bytes": 1 << 20})
    return connector, connector.get("a", "b", "r", connector.put("a", "b", "r", WANT + os.getpid())[2])[0]


def check_inherited(connector: Any, view: Any, owner: int) -> None:
    assert connector.health()["status"] == "forked"
    assert np.array_equal(view, WANT + owner)
    with pytest.raises(ForkedConnector):
        connector.put("a", "b", "r", WANT)


def fork_from_child(body: Callable[[], None]) -> int:
    """As `fork`; but the normal exit of the child is still to come, so this one ends without it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
        os._exit(0)
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(7)


def main() -> None:
    namespace = os.environ["OMNI_FASTSHM_NAMESPACE"]
    first, first_view = build()
    parent = os.getpid()

    def child() -> None:
        second, second_view = build()
        middle = os.getpid()

        def grandchild() -> None:
            third, third_view = build()
            check_inherited(first, first_view, parent)
            check_inherited(second, second_view, middle)
            third.close()
            assert np.array_equal(third_view, WANT + os.getpid())

        join(fork_from_child(grandchild))
        check_inherited(first, first_view, parent)
        assert second.health()["leases"] == second.health()["live_blocks"] == 1
        assert np.array_equal(second_view, WANT + middle)
        second.close()

    join(fork(child), 20)
    assert first.health()["leases"] == first.health()["live_blocks"] == 1
    assert np.array_equal(first_view, WANT + parent)
    first.close()
    assert leftovers.names(namespace) == []
    print("ok")


if __name__ == "__main__":
    main()
