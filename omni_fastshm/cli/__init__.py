"""The command ``omni-fastshm``: one module per sub-command, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from omni_fastshm.errors import FastShmError

__all__ = ["main"]

# Sub-command -> module and help line; a module has add_arguments(parser) and main(arguments) -> exit status.
_COMMANDS = {
    "bench": ("omni_fastshm.cli.bench", "measure this library beside its peers; from a checkout of the project"),
    "ls": ("omni_fastshm.cli.ls", "list the segments on the shm mount, with owners, payloads and readers"),
    "reap": ("omni_fastshm.cli.reap", "take away what dead processes left on the shm mount"),
    "mooncake": ("omni_fastshm.cli.mooncake", "start a Mooncake master, for pipelines on several nodes"),
    "run": ("omni_fastshm.cli.run", "run a pipeline on real input and show what crossed its edges"),
    "plan": ("omni_fastshm.cli.plan", "say how much memory a pipeline needs, and how to give it"),
    "simulate": ("omni_fastshm.cli.simulate", "replay traffic against a pipeline's rings, in virtual time"),
    "top": ("omni_fastshm.cli.top", "watch a running namespace: rings, rates, waiting puts, readers, the dead"),
    "validate": ("omni_fastshm.cli.validate", "check a pipeline's file and show its edges"),
}


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("omni-fastshm")
        except PackageNotFoundError:
            number = "(not installed: run from its source)"
        print(f"omni-fastshm {number}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: the arguments, without the program's name; None takes those of the process.

    Returns:
        The exit status: 0 fine, 1 something is wrong, 2 the command line is wrong, 130 interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # Names in a pipeline's file may hold what the terminal cannot show; that must not raise.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`. Without another place to go, the last flush at
        # exit would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except FastShmError as error:
        print(f"omni-fastshm: {error}", file=sys.stderr)
        return 1


def _dispatch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="omni-fastshm", description="Move tensors between pipeline stages.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    module: Any = None
    for name, (module_name, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == wanted:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
    arguments = parser.parse_args(argv)
    status: int = module.main(arguments)
    return status
