"""Fresh interpreters that a test drives step by step, with the code of each step in the test itself."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ANSWER_S = 90.0  # for a hang: importing torch on a busy machine has taken 20 s


class ChildError(AssertionError):
    """The code in the child raised, or the child died."""


def environment() -> dict[str, str]:
    """The environment of a child: it finds the same omni_fastshm as this process, and the test helpers."""
    from omni_fastshm import errors

    package = str(Path(errors.__file__).parents[1])
    path = os.pathsep.join([package, str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def complaints(stderr: str) -> str:
    """What a process wrote to stderr, without what `close` says of payloads that a test left untaken."""
    return re.sub(r"^closed with \d+ payloads? that nobody had taken: dropped .*\n", "", stderr, flags=re.MULTILINE)


class Child:
    """One interpreter.

    Args:
        warnings_are_errors: start it with ``-W error``.
        command: what to put in front of the interpreter, as ``["unshare", "-m"]``.
    """

    def __init__(self, warnings_are_errors: bool = True, command: tuple[str, ...] = ()) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        flags = ["-W", "error"] if warnings_are_errors else []
        self.process = subprocess.Popen(
            [*command, sys.executable, "-X", "faulthandler", *flags, str(HERE / "child_main.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment(),
        )
        self.pid = self.process.pid
        self.killed = False
        self._events: collections.deque[Any] = collections.deque()
        self._buffer = bytearray()

    def run(self, code: str, timeout: float = ANSWER_S, **variables: Any) -> Any:
        """Run `code` in the child and give the value of its variable ``result``."""
        self.start(code, **variables)
        return self.finish(timeout)

    def start(self, code: str, **variables: Any) -> None:
        """Let the child run `code`; `finish` waits for the end."""
        assert self.process.stdin is not None
        pickle.dump((code, variables), self.process.stdin, protocol=5)
        self.process.stdin.flush()

    def finish(self, timeout: float = ANSWER_S) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            kind, value = self._message(deadline)
            if kind == "event":
                self._events.append(value)
            elif kind == "done":
                return value
            else:
                raise ChildError(f"in the child:\n{value}")

    def event(self, timeout: float = ANSWER_S) -> Any:
        """The next value that the child's code gave to ``emit(value)``."""
        if self._events:
            return self._events.popleft()
        kind, value = self._message(time.monotonic() + timeout)
        if kind != "event":
            raise ChildError(f"the child ended its step instead of sending an event: {value}")
        return value

    def _message(self, deadline: float) -> tuple[str, Any]:
        head = self._read(8, deadline)
        return pickle.loads(self._read(int.from_bytes(head, "little"), deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while len(self._buffer) < count:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ChildError(f"no answer from the child in time; its stderr: {self.stderr()}")
            piece = os.read(fd, 1 << 20)
            if not piece:
                code = self.process.wait(60)
                raise ChildError(f"the child died (exit code {code}); its stderr: {self.stderr()}")
            self._buffer += piece
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def kill(self) -> None:
        """End it with SIGKILL, as the kernel would when memory runs out."""
        self.killed = True
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def stop(self, timeout: float = 60.0) -> int:
        """Let it run to its normal end (its connectors are not closed by hand) and give the exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout)

    def stderr(self) -> str:
        self.errors.flush()
        size = os.fstat(self.errors.fileno()).st_size
        return complaints(os.pread(self.errors.fileno(), size, 0).decode(errors="replace"))

    def end(self) -> str | None:
        """Stop it if it still runs, free what belongs to it, and say what was wrong with it."""
        try:
            code = self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
            code = None
        assert self.process.stdout is not None
        self.process.stdout.close()
        errors = self.stderr()
        self.errors.close()
        if self.killed:
            return None
        if code != 0:
            what = "did not end in time" if code is None else f"ended with code {code}"
            return f"child {self.pid} {what}; its stderr: {errors}"
        return f"child {self.pid} wrote to stderr: {errors}" if errors else None


class Children:
    """The interpreters of one test."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, **options: Any) -> Child:
        child = Child(**options)
        self._all.append(child)
        return child

    def with_connector(self, **settings: Any) -> Child:
        """A child whose variable ``c`` is a SharedMemoryConnector; NumPy is there as ``np``, torch is not."""
        child = self.start()
        child.run(
            "import numpy as np\n"
            "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
            "c = SharedMemoryConnector(settings)",
            settings=settings,
        )
        return child

    def end(self) -> list[str]:
        problems = [problem for child in self._all if (problem := child.end())]
        self._all.clear()
        return problems


def run_script(name: str, *arguments: str, timeout: float = 150) -> None:
    """Run ``tests/support/<name>`` in a fresh interpreter; it must end well, with ``ok`` and no complaint."""
    done = subprocess.run(
        # From Python 3.12 on, a fork beside other threads warns: here it is the very thing under test.
        [sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", str(HERE / name), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1:] == ["ok"], done.stdout + done.stderr
    assert not complaints(done.stderr), done.stderr
