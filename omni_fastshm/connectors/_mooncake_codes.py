"""What the store answers, as names and sentences; and what an installation that cannot be used lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from omni_fastshm.errors import ConfigError

__all__ = [
    "EXISTS",
    "FULL",
    "INVALID",
    "MASTER_LOST",
    "NOT_THERE",
    "OK",
    "RETRIED",
    "RPC_FAIL",
    "TRANSFER",
    "StoreError",
    "describe_code",
    "import_store",
]

OK = 0
FULL = -200
NOT_READY = -703
MISSING = -704
EXISTS = -705
LEASE_OVER = -707
TRANSFER = -800
RPC_FAIL = -900
RPC_TIMEOUT = -901
INVALID = -600
MASTER_LOST = frozenset({RPC_FAIL, RPC_TIMEOUT})
"""Answers that came from nobody: the master is down, or does not answer."""
NOT_THERE = frozenset({MISSING, NOT_READY})
"""Nothing to get: never put, taken, removed, or still being put."""
RETRIED = frozenset({FULL, EXISTS, NOT_READY, TRANSFER})
"""A put that was answered so may succeed a moment later: room came free, or a dead node was found out."""

_NAMES = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -101: "SEGMENT_NOT_FOUND",
    -102: "SEGMENT_ALREADY_EXISTS",
    -103: "CLIENT_NOT_FOUND",
    FULL: "NO_AVAILABLE_HANDLE",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    INVALID: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    NOT_READY: "REPLICA_IS_NOT_READY",
    MISSING: "OBJECT_NOT_FOUND",
    EXISTS: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    LEASE_OVER: "LEASE_EXPIRED",
    TRANSFER: "TRANSFER_FAIL",
    -801: "CHECKSUM_MISMATCH",
    RPC_FAIL: "RPC_FAIL",
    RPC_TIMEOUT: "RPC_TIMEOUT",
}
_ADVICE = {
    FULL: "the store has no room: takers are slow, or `segment` is too small for what is on its way",
    EXISTS: "the store says that this new key exists already",
    LEASE_OVER: "the transfer took longer than the master's lease: raise --default_kv_lease_ttl",
    TRANSFER: "the transfer failed: the node that has the memory is gone, or does not answer",
    INVALID: "the store refused the arguments: a value larger than what it can place, or a wrong setting",
    RPC_FAIL: "the master does not answer: is it running, and of the same Mooncake release?",
    RPC_TIMEOUT: "the master did not answer in time: it hangs, or the network does",
}


def describe_code(code: int) -> str:
    """A code as ``NAME (code)``, with what to do about it where there is something."""
    name = f"{_NAMES.get(code, 'an unknown code')} ({code})"
    return f"{name}: {_ADVICE[code]}" if code in _ADVICE else name


class StoreError(Exception):
    """The store answered with a code that is neither success nor "not there".

    Args:
        code: what it answered.
    """

    def __init__(self, code: int) -> None:
        super().__init__(describe_code(code))
        self.code = code


_CPU_WHEEL = "mooncake-transfer-engine-non-cuda"
_WHEELS = (_CPU_WHEEL, "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_INSTALL = "pip install 'omni-fastshm[mooncake]', in a checkout '.[mooncake]'"
_LIBRARY = re.compile(r"(lib[\w+.-]+\.so[.\d]*): cannot open shared object file")
_PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
_NEEDED = (
    "setup",
    "get_buffer",
    "get_into",
    "put_from",
    "batch_put_from_multi_buffers",
    "remove_by_regex",
    "batch_is_exist",
)


def import_store() -> Any:
    """The module ``mooncake.store``.

    Raises:
        ConfigError: it is not installed, cannot be loaded, or is too old; the message says what to install.
    """
    try:
        # Not `import mooncake`: that succeeds where the system's libraries are missing.
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(f"MooncakeConnector: {_what_is_missing(error)}") from error
    store: Any = getattr(module, "MooncakeDistributedStore", None)
    lacks = [name for name in _NEEDED if not hasattr(store, name)]
    if lacks or "force" not in (store.remove.__doc__ or ""):
        raise ConfigError(
            f"MooncakeConnector: {_installed()} is too old: it cannot remove what was just read "
            f"(before 0.3.9); install {_CPU_WHEEL} or mooncake-transfer-engine from 0.3.13.post1 on"
        )
    return module


def _what_is_missing(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mooncake":
        return f"the package 'mooncake' is not installed: {_INSTALL}"
    found = _LIBRARY.search(str(error))
    if found is None:
        return f"{_installed()} cannot be loaded: {error}"
    library = found[1]
    package = next((name for start, name in _PACKAGES.items() if library.startswith(start)), None)
    if package is not None:
        return (
            f"{_installed()} needs {library} of the system, which is not there: "
            "apt-get install libibverbs1 libnuma1 libcurl4"
        )
    if library.startswith("libcuda.so"):
        return (
            f"{_installed()} needs NVIDIA's driver ({library}), which this machine does not have: "
            f"pip uninstall mooncake-transfer-engine, then pip install '{_CPU_WHEEL}>=0.3.13.post1'"
        )
    if library.startswith("libcudart"):
        return (
            f"{_installed()} needs the CUDA runtime ({library}). The CPU wheels 0.3.12 to 0.3.13 do so by mistake: "
            f"pip install '{_CPU_WHEEL}>=0.3.13.post1'"
        )
    return f"{_installed()} needs {library} of the system, which is not there"


def _installed() -> str:
    found = []
    for wheel in _WHEELS:
        try:
            found.append(f"{wheel} {importlib.metadata.version(wheel)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " and ".join(found) or "the package 'mooncake'"
