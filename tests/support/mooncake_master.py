"""A real Mooncake master on free ports of the loopback interface, ended by its process."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

MASTER = Path(sys.executable).with_name("mooncake_master")


def require_mooncake() -> None:
    """Skip where Mooncake cannot be loaded, visibly; in CI that is a failure."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        reason = f"Mooncake's store cannot be loaded: {error}"
        if os.environ.get("OMNI_FASTSHM_CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


_given: set[int] = set()


def free_port() -> int:
    """One that stays free until it is used: below those that the kernel gives to whoever connects somewhere.

    Of these, a client that tries again and again to reach a master that is not there may get the very one: then it is
    connected to itself, and the master cannot listen there any more.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(min(20_000, end - 1_000), end), 900):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
    raise RuntimeError("no port is free")


class Master:
    """One master.

    Args:
        flags: further flags of ``mooncake_master``.
        http_metadata: also serve the HTTP metadata.
        host: address to listen on.
        command: what to put in front of the program, as ``["ip", "netns", "exec", "x"]``.
    """

    def __init__(
        self, *flags: str, http_metadata: bool = False, host: str = "127.0.0.1", command: tuple[str, ...] = ()
    ) -> None:
        self.port, self._http, self._metadata = free_port(), free_port(), free_port()
        self.host, self._command, self._flags = host, command, list(flags)
        if http_metadata:
            self._flags += ["--enable_http_metadata_server=true", f"--http_metadata_server_port={self._metadata}"]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def metadata_url(self) -> str:
        return f"http://{self.host}:{self._metadata}/metadata"

    def start(self) -> None:
        """Start it, or start it again on the same ports; returns when it is healthy."""
        assert self.process is None
        self.process = subprocess.Popen(
            [
                *self._command,
                str(MASTER),
                f"--rpc_address={self.host}",
                f"--rpc_port={self.port}",
                f"--metrics_host={self.host}",
                f"--metrics_port={self._http}",
                "--minloglevel=2",
                *self._flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.healthy():
                return
            time.sleep(0.02)
        self.stop()
        raise RuntimeError("mooncake_master did not start")

    def healthy(self) -> bool:
        if self._command:  # in another network namespace: its own client has to wait
            return True
        url = f"http://{self.host}:{self._http}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
        return False

    def ask(self, path: str) -> list[str]:
        """The lines of what the master's HTTP port answers."""
        with urllib.request.urlopen(f"http://{self.host}:{self._http}{path}", timeout=30) as answer:
            return [line for line in answer.read().decode().splitlines() if line.strip()]

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGSTOP:  # its threads go on for a moment, in which it may answer
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End it, by default without a goodbye: what it knew is gone."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(60)


@contextlib.contextmanager
def running(*flags: str, http_metadata: bool = False) -> Iterator[Master]:
    """A master while the block runs; the ports are chosen anew where somebody else was faster."""
    for attempt in range(5):
        master = Master(*flags, http_metadata=http_metadata)
        try:
            master.start()
        except RuntimeError:
            if attempt == 4:
                raise
            continue
        try:
            yield master
        finally:
            master.stop()
        return
