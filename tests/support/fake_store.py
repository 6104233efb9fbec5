"""A double of Mooncake's store, for answers that the real one cannot be made to give on demand.

It keeps objects in a dict. `answers` holds codes that a call gives instead of doing its work, in turn; a callable there
is called. A call before `setup` or after `close` is noted in `crimes`: the real one would end the process.
"""

from __future__ import annotations

import ctypes
import re
import socket
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OK, FULL, MISSING, EXISTS, TRANSFER, RPC = 0, -200, -704, -705, -800, -900


class ReplicateConfig:
    def __init__(self) -> None:
        self.replica_num = 1
        self.preferred_segment = ""
        self.with_hard_pin = False


class Handle(bytearray):
    def size(self) -> int:
        return len(self)


class FakeStore:
    objects: dict[str, bytes]
    answers: dict[str, deque[Any]]
    crimes: list[str]
    calls: list[str]
    placements: list[Any]
    addresses: list[list[int]]
    tried: list[str]
    made: list[FakeStore]

    def __init__(self) -> None:
        self.open = False
        self.lock = threading.Lock()
        self.made.append(self)

    def _called(self, name: str) -> Any:
        self.calls.append(name)
        if not self.open:
            self.crimes.append(name)
        queue = self.answers[name]
        answer = queue.popleft() if queue else None
        return answer() if callable(answer) else answer

    def setup(self, *arguments: Any) -> int:
        code = self.answers["setup"].popleft() if self.answers["setup"] else 0
        self.open = code == 0
        return int(code)

    def close(self) -> int:
        self.calls.append("close")
        self.open = False
        return 0

    def get_hostname(self) -> str:
        self._called("get_hostname")
        return "fake:1"

    def health_check(self) -> int:
        return 0

    def batch_put_from_multi_buffers(self, keys: Any, addresses: Any, sizes: Any, config: Any = None) -> list[int]:
        code = self._called("put")
        self.placements.append(config)
        self.addresses.extend(addresses)
        self.tried.extend(keys)
        for key, starts, lengths in zip(keys, addresses, sizes, strict=True):
            content = b"".join(ctypes.string_at(a, n) for a, n in zip(starts, lengths, strict=True))
            if code in (None, OK, "late"):
                self.objects.setdefault(key, content)  # as the real one: what exists stays, and 0 is the answer
        return [OK if code is None else RPC if code == "late" else code] * len(keys)

    def put_from(self, key: str, address: int, size: int, config: Any = None) -> int:
        return self.batch_put_from_multi_buffers([key], [[address]], [[size]], config)[0]

    def batch_get_into(self, keys: Any, addresses: Any, sizes: Any) -> list[int]:
        return [self.get_into(*one) for one in zip(keys, addresses, sizes, strict=True)]

    def get_buffer(self, key: str) -> Any:
        code = self._called("get_buffer")
        found = self.objects.get(key)
        return Handle(found) if found is not None and code is None else None

    def get_into(self, key: str, address: int, size: int) -> int:
        code = self._called("get_into")
        if code is not None:
            return int(code)
        found = self.objects.get(key)
        if found is None:
            return MISSING
        ctypes.memmove(address, found, len(found))
        return len(found)

    def get_size(self, key: str) -> int:
        code = self._called("get_size")
        return int(code) if code is not None else len(self.objects[key]) if key in self.objects else MISSING

    def batch_is_exist(self, keys: Any) -> list[int]:
        code = self._called("exist")
        return [code if code is not None else int(key in self.objects) for key in keys]

    def remove(self, key: str, force: bool = False) -> int:
        """remove(key, force=False)"""
        code = self._called("remove")
        if code is not None:
            return int(code)
        return OK if self.objects.pop(key, None) is not None else MISSING

    def batch_remove(self, keys: Any, force: bool = False) -> list[int]:
        return [self.remove(key, force) for key in keys]

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        self._called("remove_by_regex")
        found = [key for key in list(self.objects) if re.search(pattern, key)]
        for key in found:
            del self.objects[key]
        return len(found)


@contextmanager
def installed() -> Iterator[tuple[type[FakeStore], dict[str, Any]]]:
    """Put a fresh double in the place of the real module; gives its class, and settings for a connector."""
    fresh: Any = type(
        "MooncakeDistributedStore",
        (FakeStore,),
        {
            "objects": {},
            "answers": defaultdict(deque),
            "crimes": [],
            "calls": [],
            "placements": [],
            "addresses": [],
            "tried": [],
            "made": [],
        },
    )
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = fresh  # type: ignore[attr-defined]
    module.ReplicateConfig = ReplicateConfig  # type: ignore[attr-defined]
    with socket.socket() as master, pytest.MonkeyPatch.context() as patch:
        master.bind(("127.0.0.1", 0))
        master.listen(64)
        patch.setitem(sys.modules, "mooncake.store", module)
        yield (
            fresh,
            {
                "master": f"127.0.0.1:{master.getsockname()[1]}",
                "host": "127.0.0.1",
                "shm_threshold_bytes": 0,
                "put_timeout_s": 0.3,
            },
        )
