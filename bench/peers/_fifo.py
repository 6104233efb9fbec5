"""A pipe between processes that are not related: multiprocessing's own connection over a named one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

CAPACITY = 1 << 20  # the most that a user without privileges may ask for


class Fifo:
    """One end, or both; reading sleeps in the kernel until something comes."""

    def __init__(self, place: str, side: str) -> None:
        self.path = Path(tempfile.gettempdir()) / f"{place}.fifo"
        self.owner = side != "get"
        if self.owner:
            os.mkfifo(self.path, 0o600)
        # For both directions, so that neither end waits for the other one here.
        self.descriptor = os.open(self.path, os.O_RDWR)
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, CAPACITY)
        self.connection = Connection(self.descriptor)

    def close(self) -> None:
        self.connection.close()
        if self.owner:
            self.path.unlink()
