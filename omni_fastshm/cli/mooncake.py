"""``omni-fastshm mooncake up``: a Mooncake master on this machine, for trials, tests and small set-ups."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_fastshm.errors import ConfigError, FastShmError

__all__ = ["VARIABLE", "add_arguments", "main"]

VARIABLE = "MOONCAKE_MASTER"
_EXAMPLE = """examples:
  omni-fastshm mooncake up
  omni-fastshm mooncake up --host 10.0.0.1 --port 50051
  omni-fastshm mooncake up -- omni-fastshm run examples/qwen2_5_omni_mooncake.yaml

It prints the YAML to paste and runs until Ctrl-C. With a command behind `--` it sets $MOONCAKE_MASTER for that command,
and stops when the command ends. Whoever reaches the ports can read and change everything: keep them inside a network
that you trust. docs/mooncake.md has the master's own command line.
"""
_START_S = 15.0
_STOP_S = 5.0
_ANY = ("0.0.0.0", "::", "[::]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line.

    Args:
        parser: the sub-command's parser.
    """
    actions = parser.add_subparsers(dest="action", metavar="up", required=True)
    text = "start a Mooncake master, print the YAML for it, and stop it on Ctrl-C"
    up = actions.add_parser(
        "up", help=text, description=text, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    up.add_argument("--host", default="127.0.0.1", help="address to listen on and to name in the YAML (127.0.0.1)")
    up.add_argument("--port", type=_port, default=0, help="port for the nodes (a free one)")
    up.add_argument(
        "--http-port", type=_port, default=0, metavar="PORT", help="port for health and metrics (a free one)"
    )
    up.add_argument(
        "--ssd", type=Path, metavar="DIR", help="folder that all nodes see, for what does not fit into memory"
    )
    up.add_argument("run", nargs="*", metavar="COMMAND", help="command to run with the master, behind --")


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return port


def main(arguments: argparse.Namespace) -> int:
    """Run the master; see `add_arguments`.

    Args:
        arguments: as `add_arguments` defines them.

    Returns:
        0 after Ctrl-C or SIGTERM; the command's own status where one was given; 1 where the master does not start or
        ends by itself.
    """
    if arguments.ssd is not None:
        arguments.ssd.mkdir(parents=True, exist_ok=True)
    with _terminable(), tempfile.TemporaryFile() as said:
        try:
            master, address, http = _start(arguments, said)
        except KeyboardInterrupt:
            return 0
        try:
            # Through one write: what reads the block from a pipe finds it whole.
            print(_yaml(address, arguments), flush=True)
            if arguments.run:
                return _run(arguments.run, address)
            print(f"# metrics: http://{http}/metrics/summary    stop: Ctrl-C", flush=True)
            status = master.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            _stop(master)
        raise FastShmError(f"mooncake up: the master ended by itself with status {status}{_last_words(said)}")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this as Ctrl-C does, so that the master goes, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(arguments: argparse.Namespace, said: Any) -> tuple[subprocess.Popen[bytes], str, str]:
    """A healthy master, the address for the nodes and that of its HTTP port."""
    program = _program()
    host = arguments.host
    # Between choosing a free port and using it somebody else may take it; given ports get one try.
    for attempt in range(5):
        port, http = (_port_on(host, given) for given in (arguments.port, arguments.http_port))
        master = subprocess.Popen(
            [
                program,
                f"--rpc_address={host}",
                f"--rpc_port={port}",
                f"--metrics_host={host}",
                f"--metrics_port={http}",
                "--minloglevel=1",
                *([f"--root_fs_dir={arguments.ssd.resolve()}"] if arguments.ssd else []),
            ],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            preexec_fn=_end_with_parent,
        )
        reachable = "127.0.0.1" if host in _ANY else host
        try:
            if _wait_healthy(master, f"{reachable}:{http}"):
                return master, f"{host}:{port}", f"{reachable}:{http}"
        except BaseException:
            _stop(master)
            raise
        _stop(master)
        if (arguments.port and arguments.http_port) or attempt == 4:
            break
    raise FastShmError(f"mooncake up: the master does not start on {host}, ports {port} and {http}{_last_words(said)}")


def _program() -> str:
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if found is None:
        raise ConfigError(
            "mooncake up: there is no mooncake_master here; it comes with pip install 'omni-fastshm[mooncake]', "
            "in a checkout '.[mooncake]'"
        )
    return found


def _port_on(host: str, given: int) -> int:
    """That port, or a free one for 0. A master that cannot have its port may live on for a moment, and look healthy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only who listens is in the way
            probe.bind((host.strip("[]"), given))
            return int(probe.getsockname()[1])
    except OSError as error:
        if given and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"mooncake up: port {given} of {host} is in use, perhaps by another master: leave the option out for a "
                "free one, or stop the other program"
            ) from None
        raise ConfigError(f"mooncake up: cannot listen on {host!r}: {error.strerror or error}") from None


def _end_with_parent() -> None:
    """In the new process: end when the parent does, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    # Ctrl-C goes to all of a terminal's processes; the master has to outlive the command that uses it.
    os.setpgid(0, 0)


def _wait_healthy(master: subprocess.Popen[bytes], http: str) -> bool:
    deadline = time.monotonic() + _START_S
    while master.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{http}/health", timeout=1) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.02)
    return False


def _stop(master: subprocess.Popen[bytes]) -> None:
    if master.poll() is None:
        master.terminate()
        try:
            master.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()


def _last_words(said: Any) -> str:
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""


def _yaml(address: str, arguments: argparse.Namespace) -> str:
    host, _, port = address.rpartition(":")
    shown = f"ADDRESS-OF-THIS-NODE:{port}" if host in _ANY else address
    lines = ["connectors:", "  between_nodes:", "    name: MooncakeConnector", "    extra:", f"      master: {shown}"]
    lines.append("      segment: 512MiB   # memory that each node gives; its untaken payloads lie there")
    if arguments.ssd:
        lines.append(f"      hard_pin: false   # what does not fit goes to {arguments.ssd.resolve()}")
    return "\n".join(lines)


def _run(command: list[str], address: str) -> int:
    try:
        process = subprocess.Popen(command, env={**os.environ, VARIABLE: address})
    except OSError as error:
        raise ConfigError(f"mooncake up: cannot run {command[0]!r}: {error.strerror}") from None
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        status = process.wait()
    return status if status >= 0 else 128 - status
