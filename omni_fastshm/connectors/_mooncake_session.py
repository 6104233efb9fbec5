"""One client of the store per process and settings, and the gate in front of it.

The client kills the process when it is called before `setup` or after `close`. So every call goes through
`Session._inside`: a set that a call enters *before* it looks at the state, and that whoever closes looks at *after* it
changed the state. Adding to a set and reading an attribute are single steps under the GIL: no lock is needed, so that
closing from a signal handler or from the garbage collector cannot deadlock with the call that it interrupted. The last
one out closes, if closing was asked for meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
import weakref
from typing import Any, NamedTuple

from omni_fastshm.errors import ConfigError, ConnectorClosed

from ._mooncake_codes import INVALID, MASTER_LOST, NOT_THERE, RPC_FAIL, TRANSFER, describe_code, import_store
from ._mooncake_ledger import Room
from ._mooncake_net import prepare_environment, quiet_stderr, shortest_timeout_s, wait_for_master

__all__ = ["Endpoint", "Session", "open_session"]

_log = logging.getLogger("omni_fastshm")

_OPEN, _CLOSING, _CLOSED, _ABANDONED = "open", "closing", "closed", "abandoned"
_NOT_AGAIN_S = 1.0  # a master that hangs accepts connections: only a call finds that out, after MC_RPC_TIMEOUT_MS
_READ_AT_ONCE = 500  # the client refuses 2048 transfers from one node
_CLOSE_WAIT_S = 5.0  # for calls that are on their way; later ones close behind themselves


class Endpoint(NamedTuple):
    """What tells one client from another; connectors with the same endpoint share it."""

    host: str
    metadata_server: str
    master: str
    segment: int
    localbuf: int
    proto: str
    rdma: str


class Session:
    """A client that is set up. All methods may be called from any thread.

    They answer as the store does, with its codes, and raise `ConnectorClosed` once the session is closed.

    Args:
        endpoint: how it was set up.
        module: ``mooncake.store``.
        store: the client.
    """

    def __init__(self, endpoint: Endpoint, module: Any, store: Any) -> None:
        self.endpoint = endpoint
        self.lost = False  # the last answer came from nobody
        self.room = Room(endpoint.segment)
        """What its connectors have put into its own segment."""
        self.late_s = 0.9 * shortest_timeout_s()
        """A call that takes longer than this has waited for somebody who does not answer."""
        self._not_before = 0.0  # until then a master that hung is not asked again
        self._store = store
        self._state = _OPEN
        self._users = 1
        self._inside: set[tuple[int, object]] = set()
        self._left = threading.Event()
        self._module = module

    def placement(self, hard_pin: bool) -> Any:
        """Where an object goes, for `put`: into this node's own segment, and to stay there whatever comes later."""
        config = self._module.ReplicateConfig()
        if self.endpoint.segment:
            config.preferred_segment = self._call("get_hostname")
        if hard_pin:
            _pin(self._module, config)
        return config

    # -- calls

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        mark = (threading.get_ident(), object())
        try:
            self._inside.add(mark)
            if self._state != _OPEN:
                raise ConnectorClosed("the connector was closed meanwhile")
            return getattr(self._store, name)(*arguments, **options)
        finally:
            self._inside.discard(mark)
            if self._state == _CLOSING:
                self._left.set()
                self._close_behind()

    def _code(self, name: str, *arguments: Any, **options: Any) -> int:
        started = time.monotonic()
        code: int = self._call(name, *arguments, **options)
        self._hear(code in MASTER_LOST, started)
        return code

    def _codes(self, name: str, *arguments: Any) -> list[int]:
        started = time.monotonic()
        codes: list[int] = self._call(name, *arguments)
        self._hear(not MASTER_LOST.isdisjoint(codes), started)
        return codes

    def _hear(self, lost: bool, started: float) -> None:
        self.lost = lost
        if lost:
            now = time.monotonic()
            if now - started > _NOT_AGAIN_S:
                self._not_before = now + _NOT_AGAIN_S

    def put(self, key: str, addresses: list[int], sizes: list[int], placement: Any) -> int:
        """Make one object of parts; those in memory of `proto` tcp are read where they lie."""
        if self.endpoint.proto == "rdma":
            # RDMA reads registered memory only. The local buffer is: the parts are copied there.
            parts = [
                memoryview((ctypes.c_char * size).from_address(address)).cast("B")
                for address, size in zip(addresses, sizes, strict=True)
            ]
            return self._code("put_parts", key, *parts, config=placement)
        # As `_call` does it, without its own calls: they cost a small put a tenth of its time.
        mark = (threading.get_ident(), object())
        started = time.monotonic()
        code: int
        try:
            self._inside.add(mark)
            if self._state != _OPEN:
                raise ConnectorClosed("the connector was closed meanwhile")
            if len(sizes) == 1:  # one step of the master's less
                code = self._store.put_from(key, addresses[0], sizes[0], placement)
            else:
                codes = self._store.batch_put_from_multi_buffers([key], [addresses], [sizes], placement)
                code = codes[0] if codes else INVALID
        finally:
            self._inside.discard(mark)
            if self._state == _CLOSING:
                self._left.set()
                self._close_behind()
        if code:
            self._hear(code in MASTER_LOST, started)
        else:
            self.lost = False
        return code

    def put_all(self, keys: list[str], content: bytes, placement: Any) -> int:
        """Make one small object of the same content under each key; the first code that is not 0."""
        memory = ctypes.create_string_buffer(content, len(content))
        addresses, sizes = [ctypes.addressof(memory)], [len(content)]
        if self.endpoint.proto == "rdma":
            return next((code for key in keys if (code := self.put(key, addresses, sizes, placement))), 0)
        many = [addresses] * len(keys), [sizes] * len(keys)
        codes = self._codes("batch_put_from_multi_buffers", keys, *many, placement)
        return next(filter(None, codes), 0) if codes else INVALID

    def get_buffer(self, key: str) -> Any:
        """A handle on a copy in the local buffer; None for everything else."""
        return self._call("get_buffer", key)

    def get_into(self, key: str, address: int, size: int) -> int:
        """Read into own memory; the bytes read, or a code."""
        if self.endpoint.proto != "rdma":
            return self._code("get_into", key, address, size)
        code = self._code("register_buffer", address, size)
        if code:
            return code
        try:
            return self._code("get_into", key, address, size)
        finally:
            self._call("unregister_buffer", address)

    def read_all(self, keys: list[str], size: int) -> list[bytes | None]:
        """Small objects of one size: None for one that is not there, empty for one that cannot be read."""
        contents: list[bytes | None] = []
        for start in range(0, len(keys), _READ_AT_ONCE):
            some = keys[start : start + _READ_AT_ONCE]
            memory = ctypes.create_string_buffer(size * len(some))
            addresses = [ctypes.addressof(memory) + size * n for n in range(len(some))]
            if self.endpoint.proto == "rdma" or not hasattr(self._store, "batch_get_into"):
                codes = [self.get_into(key, address, size) for key, address in zip(some, addresses, strict=True)]
            else:
                codes = self._codes("batch_get_into", some, addresses, [size] * len(some))
            for n, code in enumerate(codes):
                found = memory.raw[size * n : size * (n + 1)] if code == size else b""
                contents.append(None if code in NOT_THERE else found)
        return contents

    def size_of(self, key: str) -> int:
        """An object's bytes, or a code."""
        return self._code("get_size", key)

    def exist(self, keys: list[str]) -> list[int]:
        """1, 0 or a code for each key."""
        return self._codes("batch_is_exist", keys)

    def remove(self, key: str) -> int:
        """Remove an object at once, leased or not. Of several that do, exactly one is answered with 0."""
        return self._code("remove", key, True)

    def remove_all(self, keys: list[str]) -> list[int]:
        """The same for several; a code for each."""
        if not hasattr(self._store, "batch_remove"):  # before 0.3.10.post2
            return [self.remove(key) for key in keys]
        return self._codes("batch_remove", keys, True)

    def remove_matching(self, pattern: str) -> int:
        """Remove what a regular expression finds; how many, or a code."""
        return self._code("remove_by_regex", pattern, True)

    def who_was_late(self) -> int:
        """The code for a call that took long and says only that it failed: the master's fault, or the other node's."""
        alive = self._call("health_check") != 2 and wait_for_master(self.endpoint.master, 0)
        self.lost = not alive
        return TRANSFER if alive else RPC_FAIL

    def master_answers(self) -> bool:
        """Whether it is worth asking the master. While it is known to be lost its port is tried first: that fails at
        once, where a call to the store would take 4 s. One that hung is left alone for a moment: what is done for one
        call of ours, or for `close`, then waits once."""
        if self.lost:
            self.lost = time.monotonic() < self._not_before or not wait_for_master(self.endpoint.master, 0)
        return not self.lost

    # -- the end

    def share(self) -> bool:
        """One more connector uses this session; False where it is no longer open."""
        if self._state != _OPEN:
            return False
        self._users += 1
        return True

    def release(self) -> None:
        """A connector lets go; with the last one the client is closed.

        Closing waits for calls of other threads, for a few seconds; what takes longer closes behind itself. The
        client's own closing takes 1 to 2 s, in which no other thread of Python runs. Without a master it would take
        10 s and more: then the client stays, for the next connector with this endpoint or until the process ends.
        """
        with _opening:
            self._users -= 1
            if self._is_used() or self._state != _OPEN:
                return
        if not self._master_is_there():
            _log.warning("no Mooncake master at %s: the store's client stays open", self.endpoint.master)
            return
        with _opening:
            if self._is_used():  # somebody came while the master was asked
                return
            self._state = _CLOSING
            if _sessions.get(self.endpoint) is self:
                del _sessions[self.endpoint]
        me = threading.get_ident()
        deadline = time.monotonic() + _CLOSE_WAIT_S
        while any(ident != me for ident, _ in tuple(self._inside)) and time.monotonic() < deadline:
            self._left.wait(0.05)
            self._left.clear()
        self._close_behind()
        if self._state == _CLOSING:
            _log.warning("a call to Mooncake's store is still running; the store is closed when it ends")

    def _is_used(self) -> bool:
        return self._users > 0

    def _master_is_there(self) -> bool:
        if not self.master_answers() or not wait_for_master(self.endpoint.master, 0):
            return False
        try:
            self.exist(["omnifs/probe"])
            return not self.lost
        except ConnectorClosed:
            return True

    def _close_behind(self) -> None:
        with _closing:
            if self._state != _CLOSING or self._inside:
                return
            self._state = _CLOSED
        _live.discard(self)
        store, self._store = self._store, None
        store.close()

    def abandon(self) -> None:
        """Never close nor destroy the client: either would call what is not there, or wait for it."""
        self._state = _ABANDONED
        if self._store is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
            _skip_native_destructors()


def _pin(module: Any, config: Any) -> None:
    """What is not pinned may be evicted unread, and put would have said that it is there."""
    if hasattr(config, "with_hard_pin"):  # from 0.3.10.post2 on
        config.with_hard_pin = True
    elif hasattr(config, "with_soft_pin"):  # until 0.3.11: evicted last
        config.with_soft_pin = True
    else:
        config.soft_pin_action = module.SoftPinAction.ENABLE


# -- opening

_opening = threading.RLock()
_closing = threading.RLock()
_sessions: dict[Endpoint, Session] = {}
_live: weakref.WeakSet[Session] = weakref.WeakSet()


def open_session(endpoint: Endpoint, *, setup_timeout_s: float, get_timeout_s: float) -> Session:
    """The session of this endpoint: the one that there is, or a new one.

    Args:
        endpoint: how to set it up.
        setup_timeout_s: how long to wait for the master's port. The set-up itself takes 10 to 200 ms, in which no
            other thread of Python runs.
        get_timeout_s: most seconds of one transfer, for the client that is set up first in the process.

    Raises:
        ConfigError: the package, the master or something else is missing; the message says what.
    """
    with _opening:
        known = _sessions.get(endpoint)
        if known is not None and known.share():
            return known
    prepare_environment(get_timeout_s)  # before the import: some of it is read then
    module = import_store()
    if not wait_for_master(endpoint.master, setup_timeout_s):
        raise ConfigError(
            f"MooncakeConnector: no Mooncake master answers at {endpoint.master} (waited {setup_timeout_s:g} s): start "
            "one with `omni-fastshm mooncake up`, or correct `master`",
            op="open",
        )
    with _opening:
        known = _sessions.get(endpoint)
        if known is not None and known.share():
            return known
        session = Session(endpoint, module, _set_up(endpoint, module))
        _sessions[endpoint] = session
        _live.add(session)
        return session


def _set_up(endpoint: Endpoint, module: Any) -> Any:
    store = module.MooncakeDistributedStore()
    with quiet_stderr() as heard:
        code = store.setup(
            endpoint.host,
            endpoint.metadata_server,
            endpoint.segment,
            endpoint.localbuf,
            endpoint.proto,
            endpoint.rdma,
            endpoint.master,
        )
    if code:
        said = f"; it said: {heard[-1]}" if heard else ""
        raise ConfigError(
            f"MooncakeConnector: Mooncake's store refused the set-up with {describe_code(code)}. host "
            f"{endpoint.host!r}, metadata_server {endpoint.metadata_server!r}, master {endpoint.master!r}, segment "
            f"{endpoint.segment}, localbuf {endpoint.localbuf}, proto {endpoint.proto!r}, rdma {endpoint.rdma!r}{said}"
            ". What listens at that address may be no Mooncake master, or one of another release",
            op="open",
        )
    return store


def _close_all() -> None:
    """At the interpreter's end, when threads that call can no longer be waited for afterwards."""
    for session in list(_live):
        session._users = 1
        session.release()
        if session._state != _CLOSED:
            session.abandon()


def _disown() -> None:
    """After a fork, in the child: the client's threads are not there, nor one that held a lock."""
    global _opening, _closing
    _opening, _closing = threading.RLock(), threading.RLock()
    for session in list(_live):
        session.abandon()
    _live.clear()
    _sessions.clear()


_skipping = False


def _skip_native_destructors() -> None:
    """End the process behind the interpreter's own end with its exit status, but without the destructors of native
    code: the client's would wait for ever, or crash. What is written through C's streams is still written."""
    global _skipping
    if not _skipping:
        _skipping = True
        libc = ctypes.CDLL(None)
        # The last one registered runs first.
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown)
