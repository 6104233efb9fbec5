"""Children that answer once: forked from a process that holds no connector."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Forked:
    """Run `body` in a child; what it returns, plain data, comes back as JSON.

    `close`: descriptors of the parent that the child must not keep open.
    """

    def __init__(self, body: Callable[[], Any], *close: int) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        code = 1
        try:
            for fd in (self._read, *close):
                os.close(fd)
            text = json.dumps(body())
            with os.fdopen(write, "w") as out:
                out.write(text)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def answer(self) -> Any:
        """What it returned, or None when it came to no good end."""
        with os.fdopen(self._read) as text:
            said = text.read()
        _, status = os.waitpid(self.pid, 0)
        return json.loads(said) if status == 0 else None

    def kill(self) -> None:
        """End it now."""
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self._read)
