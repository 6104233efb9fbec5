"""Ends a process with an open MooncakeConnector in one of several ways; the last line must be ``ok``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Any

import numpy as np
from support.forking import fork, join

from omni_fastshm.connectors.mooncake import MooncakeConnector
from omni_fastshm.errors import ConnectorClosed, ForkedConnector


def end(connector: Any) -> None:
    """Views, and a connector that nobody closes."""
    _, _, metadata = connector.put("0", "1", "r", np.arange(100_000))
    view = connector.get("0", "1", "r", metadata)[0]
    globals()["kept"] = (connector, view)


def raise_(connector: Any) -> None:
    end(connector)
    sys.stdout.write("ok\n")
    raise SystemExit(0)


def waiting_thread(connector: Any) -> None:
    """A daemon thread inside the store when the interpreter ends."""
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        with contextlib.suppress(ConnectorClosed):
            connector.get("0", "1", "never", timeout=None)

    threading.Thread(target=wait, daemon=True).start()
    begun.wait()
    end(connector)


def background_put(connector: Any) -> None:
    for n in range(20):
        connector.put("0", "1", n, np.arange(200_000), wait=False)


def fork_(connector: Any) -> None:
    """The child's copy refuses to work, and its end touches nothing of the parent's."""
    _, _, metadata = connector.put("0", "1", "r", np.arange(100_000))

    def child() -> None:
        for call in (lambda: connector.put("0", "1", "x", 1), lambda: connector.get("0", "1", "r", metadata)):
            try:
                call()
            except ForkedConnector:
                continue
            raise AssertionError("an inherited connector works")
        assert connector.health()["status"] == "forked"
        connector.cleanup("r")
        connector.close()

    join(fork(child))
    got = connector.get("0", "1", "r", metadata)
    assert np.array_equal(got[0], np.arange(100_000))
    fresh = MooncakeConnector(connector.config)
    fresh.close()
    assert connector.put("0", "1", "s", np.arange(100_000))[0]


if __name__ == "__main__":
    ways = {
        "end": end,
        "raise": raise_,
        "waiting-thread": waiting_thread,
        "background-put": background_put,
        "fork": fork_,
    }
    # A namespace for each way: they run side by side, and use the same request.
    namespace = f"{os.environ['OMNI_FASTSHM_NAMESPACE']}-{sys.argv[1]}"
    settings = {**json.loads(sys.argv[2]), "key_lookup": True, "namespace": namespace}
    ways[sys.argv[1]](MooncakeConnector(settings))
    print("ok")
