"""The sending half of a MooncakeConnector: room, one object per payload, and the pointer that leads to it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from omni_fastshm import codec

from ._mooncake_codes import EXISTS, FULL, MASTER_LOST, OK, RETRIED, RPC_FAIL, StoreError
from ._mooncake_gate import PAUSE_S, Gate, Pauses
from ._mooncake_keys import Item, write_pointer
from ._mooncake_shelf import Shelf

__all__ = ["Sender"]

_DIRECT_FROM = 4097  # smaller leaves are copied together with the header: a part of its own costs 50 us on the network
_MOST_PARTS = 1000  # the client refuses 2048 of them
_TOKEN = bytes(64)
_PUTS_END_S = 6.0
_MOST_TURNS = 8  # of producers that put one key at the same time


class Sender:
    """Puts payloads on the shelf, and waits for room there.

    Args:
        shelf: where payloads go.
        gate: whether the connector is open.
        timeout_s: how long a put waits for room.
    """

    def __init__(self, shelf: Shelf, gate: Gate, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.blocked_s = 0.0
        """How long puts waited for room, all together."""
        self._shelf = shelf
        self._session = shelf.session
        self._names = shelf.names
        self._ledger = shelf.ledger
        self._gate = gate
        self._inside: set[tuple[int, str]] = set()  # by thread; whoever closes waits for them

    def send(self, item: Item, plan: codec.Plan) -> tuple[Item, int]:
        """Put one object into the store; the item as it lies there, and a code.

        Args:
            item: with a fresh nonce; the one that lies there may have another.
            plan: how to serialize the payload.

        Raises:
            ConnectorClosed: the connector was closed meanwhile; nothing of this put is left.
        """
        mark = (threading.get_ident(), item.nonce)
        try:
            self._inside.add(mark)
            return self._send(item, plan)
        except StoreError as error:
            return item, error.code
        finally:
            self._inside.discard(mark)

    def let_end(self) -> None:
        """Wait for puts of other threads that are in the store, for a few seconds: what they put would stay there, for
        nobody would drop it."""
        me, deadline = threading.get_ident(), time.monotonic() + _PUTS_END_S
        while any(ident != me for ident, _ in tuple(self._inside)) and time.monotonic() < deadline:
            with self._gate.changed:
                self._gate.changed.wait(PAUSE_S)

    def _send(self, item: Item, plan: codec.Plan) -> tuple[Item, int]:
        if not self._session.master_answers():
            return item, RPC_FAIL
        deadline = time.monotonic() + self.timeout_s
        if not (self._ledger.reserve_at_once(item.stored) or self._wait_for_room(item, deadline)):
            return item, FULL
        code = FULL
        try:
            item, code = self._place(item, plan, deadline)
        finally:
            if code == OK:
                self._ledger.add(item)
            else:
                self._ledger.give_back(item.stored)
        if code == OK and self._shelf.key_lookup:
            code = self._publish(item, deadline)
        if self._gate.stopped:
            self._shelf.take_back(item)  # closed meanwhile: nobody would drop it
            self._gate.check("put")
        if code == OK and self._ledger.should_sweep():
            with contextlib.suppress(StoreError):  # the payload is there, whatever became of earlier ones
                self._shelf.sweep()
        return item, code

    def _wait_for_room(self, item: Item, deadline: float) -> bool:
        """Take room from this connector's limit; the first that waits is the first that gets some."""
        ledger = self._ledger
        if ledger.limit is not None and item.stored > ledger.limit:
            return False
        started = time.monotonic()
        ticket, pauses = ledger.queue(), Pauses(deadline)
        try:
            while True:
                self._gate.check("put")
                if ledger.is_first(ticket):
                    if ledger.reserve(item.stored):
                        return True
                    self._shelf.sweep()
                    if ledger.reserve(item.stored):
                        return True
                if not self._gate.pause(pauses):
                    return False
        finally:
            ledger.leave(ticket)
            self.blocked_s += time.monotonic() - started

    def _place(self, item: Item, plan: codec.Plan, deadline: float) -> tuple[Item, int]:
        # `plan` and `parts` hold the memory that the addresses are in.
        parts = plan.gather(_DIRECT_FROM)
        if len(parts[0]) > _MOST_PARTS:
            parts = plan.gather(plan.frame_size + 1)
        code = self._place_once(item, parts)
        if code not in RETRIED:
            return item, code
        started, pauses, twins = time.monotonic(), Pauses(deadline), 0
        while code in RETRIED:
            twins += code == EXISTS
            if twins > 2 or not self._gate.pause(pauses):
                break
            self._gate.check("put")
            if code != FULL:
                item = item._replace(nonce=self._names.new_nonce())
            code = self._place_once(item, parts)
        self.blocked_s += time.monotonic() - started
        return item, code

    def _place_once(self, item: Item, parts: tuple[list[int], list[int], Any]) -> int:
        """Tokens first: who finds the payload must find them, too."""
        addresses, sizes, _ = parts
        tokens, key, placement = self._names.tokens(item), self._names.payload(item), self._shelf.placement
        code, answered = OK, False
        try:
            if tokens:
                code = self._session.put_all(tokens, _TOKEN, placement)
            if code == OK:
                code = self._session.put(key, addresses, sizes, placement)
            answered = code not in MASTER_LOST
        finally:
            if not answered:
                self._shelf.doubtful += [*tokens, key]
            elif code != OK:
                self._session.remove_all([*tokens, key])
        return code

    def _publish(self, item: Item, deadline: float) -> int:
        """Let the pointer lead to `item`; a code. What nobody would find is cancelled."""
        try:
            code = self._point_to(item, deadline)
        except StoreError as error:
            code = error.code
        if code != OK:
            self._shelf.cancel(item)
        return code

    def _point_to(self, item: Item, deadline: float) -> int:
        """Make `item` the newest of its edge and request; what that replaces is cancelled."""
        shelf, key = self._shelf, self._names.pointer(item.edge, item.request)
        record, pauses = write_pointer(item), Pauses(deadline)
        with shelf.pointing:
            there, old = shelf.look(item.edge, item.request)
            for _ in range(_MOST_TURNS):
                if there:  # readable or not: the pointer of a producer that died is known for a while
                    self._session.remove(key)
                code = self._session.put_all([key], record, shelf.placement)
                if code == FULL and self._gate.pause(pauses):
                    continue
                if code != OK:
                    return code
                # A put on a key that exists is answered with success and changes nothing: so look.
                there, now = shelf.look(item.edge, item.request)
                if now is not None and now.nonce == item.nonce:
                    break
            else:
                shelf.cancel(item)  # another producer was faster, again and again: its payload is the newest
        if old is not None and old.nonce != item.nonce:
            shelf.cancel(old)
        return OK
