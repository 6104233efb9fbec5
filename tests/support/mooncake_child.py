"""What children with a MooncakeConnector ``c`` run."""

from __future__ import annotations

import os
import signal
from typing import Any

from support.child import Child, Children

START = """
import hashlib, logging, os, sys, threading, time
import numpy as np
from omni_fastshm.connectors.mooncake import MooncakeConnector
from omni_fastshm.errors import *
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("omni_fastshm").addHandler(Keep())

def payload(seed, nbytes=1 << 20):
    return {"a": np.arange(nbytes // 8) + seed}

def is_payload(got, seed, nbytes=1 << 20):
    return got is not None and bool(np.array_equal(got[0]["a"], np.arange(nbytes // 8) + seed))

def timed(call, *arguments, **options):
    start = time.monotonic()
    answer = call(*arguments, **options)
    return answer, time.monotonic() - start

c = MooncakeConnector(settings)
"""


def settings_for(master: Any, **more: Any) -> dict[str, Any]:
    """Small and quick settings of a connector at this master."""
    return {"master": master.address, "host": master.host, "segment": "64MB", "localbuf": "32MB", **more}


def freeze(child: Child) -> None:
    """Stop it with SIGSTOP; returns when all its threads stand still."""
    child.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def start(children: Children, master: Any, *, command: tuple[str, ...] = (), **settings: Any) -> Child:
    """A child with a connector.

    Args:
        children: of the test.
        master: to connect to.
        command: what to put in front of the interpreter.
        settings: of the connector.
    """
    child = children.start(command=command)
    child.run(START, settings=settings_for(master, **settings))
    return child
