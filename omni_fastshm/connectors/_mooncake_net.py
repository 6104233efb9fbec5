"""What has to be known, and set, before the store's client is set up, which says little and holds the GIL."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterator

__all__ = [
    "is_own_address",
    "own_address",
    "prepare_environment",
    "quiet_stderr",
    "shortest_timeout_s",
    "split_address",
    "wait_for_master",
]

_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\s]+)):(?P<port>\d{1,5})", re.ASCII)
_NOISE = ("Logging before InitGoogleLogging", "Local segment descriptor not found")

# Read when the client is imported or the process sets up its first one.
_VARIABLES = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # 20 tries of 4 s each would hold the GIL for 90 s
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
}
_TRANSFER_TIMEOUT = "MC_TCP_STATUS_TIMEOUT_SEC"
_TIMEOUTS = {"MC_RPC_TIMEOUT_MS": 1000, "MC_HANDSHAKE_CONNECT_TIMEOUT": 1, _TRANSFER_TIMEOUT: 1}  # parts of a second
# Names those that we set: a child process inherits them, and must not take them for the user's.
_SET_BY_US = "OMNI_FASTSHM_SET_FOR_MOONCAKE"


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``; None where it is something else."""
    found = _ADDRESS.fullmatch(text.strip())
    port = int(found["port"]) if found else 0
    return (found["v6"] or found["host"], port) if found and 0 < port < 65536 else None


def wait_for_master(master: str, seconds: float) -> bool:
    """Whether something accepts connections at the master's address, or begins to within `seconds`.

    Addresses of a master group (``etcd://…``) are not looked at: always True.
    """
    address = split_address(master)
    if address is None:
        return True
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(left, 0.2)).close()
            return True
        except OSError:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, 0.05))


def own_address(master: str) -> str:
    """The address of this machine that its way to the master starts from; nothing is sent."""
    address = split_address(master)
    if address is not None:
        with contextlib.suppress(OSError):
            family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_own_address(host: str) -> bool:
    """Whether peers that connect to `host` reach this machine, as far as one can tell from here."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def quiet_stderr() -> Iterator[list[str]]:
    """Hold back what native code writes to stderr; the list has its lines afterwards, less two that mean nothing.

    They are written out at the end: only the noise of a set-up that went well is lost.
    """
    lines: list[str] = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # there is none, or it is closed
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # a daemon has closed it: nobody hears anything
        yield lines
        return
    caught = os.memfd_create("mooncake-stderr")
    os.dup2(caught, 2)
    try:
        yield lines
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        text = os.pread(caught, 1 << 20, 0).decode(errors="replace")
        os.close(caught)
        lines += [line for line in text.splitlines() if line and not any(noise in line for noise in _NOISE)]
        if lines:
            with contextlib.suppress(OSError):  # a pipe that nobody reads any more
                os.write(2, ("\n".join(lines) + "\n").encode())


def prepare_environment(get_timeout_s: float) -> None:
    """Set what the client takes from the environment; what the user has set there stays."""
    ours = set(filter(None, os.environ.get(_SET_BY_US, "").split(",")))
    for name, value in {**_VARIABLES, _TRANSFER_TIMEOUT: str(math.ceil(get_timeout_s))}.items():
        if name not in os.environ or name in ours:
            os.environ[name] = value
            ours.add(name)
    os.environ[_SET_BY_US] = ",".join(sorted(ours))


def shortest_timeout_s() -> float:
    """What a call takes at least that fails because somebody does not answer, as `prepare_environment` left it."""
    known = []
    for name, parts in _TIMEOUTS.items():
        with contextlib.suppress(KeyError, ValueError):
            known.append(float(os.environ[name]) / parts)
    return min(known, default=1.0)
