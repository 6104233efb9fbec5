"""The sending half of a MooncakeConnector: room, one object per payload, and the pointer that leads to it."""

from __future__ import annotations

import contextlib
import threading
import time

from omni_fastshm import codec
from omni_fastshm.errors import ConnectorClosed

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

_Parts = tuple[list[int], list[int], bytes]


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

    def send(self, edge: tuple[str, str], request: str, takers: int, plan: codec.Plan) -> tuple[Item, int]:
        """Put one object into the store; the item as it lies there, and a code.

        Args:
            edge: from and to.
            request: its id.
            takers: how many times it can be taken.
            plan: how to serialize the payload.

        Raises:
            ConnectorClosed: the connector was closed meanwhile; nothing of this put is left.
        """
        # Small steps stand here, not in methods: with caches that other processes keep cold, a call costs 1 to 2 us.
        session, ledger = self._session, self._ledger
        # What Item() does, without a call of Python's.
        size = plan.size
        item: Item = tuple.__new__(Item, (edge, request, self._names.new_nonce(), size, takers))
        tried = [item]
        answer: int | None = None
        try:
            ledger.under_way[item.nonce] = threading.get_ident()
            if session.lost and not session.master_answers():
                answer = RPC_FAIL
                return item, answer
            deadline = 0.0  # set when something has to be waited for
            stored = -(-size // 64) * 64  # item.stored
            if not ledger.add(item, stored):
                deadline = time.monotonic() + self.timeout_s
                if not self._wait_for_room(item, stored, deadline):
                    answer = FULL
                    return item, answer
            # `plan` and `parts` hold the memory that the addresses are in.
            parts = plan.gather(_DIRECT_FROM)
            if len(parts[0]) > _MOST_PARTS:
                parts = plan.gather(plan.frame_size + 1)
            if takers == 1:
                code = session.put(self._names.payload(item), parts[0], parts[1], self._shelf.placement)
            else:
                code = self._place(item, parts)
            if code != OK:
                deadline = deadline or time.monotonic() + self.timeout_s
                item, code = self._place_again(tried, code, parts, deadline)
            if code == OK and self._shelf.key_lookup:
                code = self._publish(item, deadline or time.monotonic() + self.timeout_s)
            if self._gate.stopped:
                self._shelf.take_back(item)  # closed meanwhile: nobody would drop it
                self._gate.check("put")
            if code == OK and ledger.sweep_due:
                with contextlib.suppress(StoreError):  # the payload is there, whatever became of earlier ones
                    self._shelf.sweep()
            answer = code
            return item, answer
        except StoreError as error:
            answer = error.code
            return item, answer
        finally:
            if answer == OK and len(tried) == 1:
                ledger.under_way.pop(item.nonce, None)
            else:
                self._end(tried, answer)

    def _end(self, tried: list[Item], answer: int | None) -> None:
        """Of a put, however it ends: with a code, or with what a signal handler raised somewhere."""
        ledger = self._ledger
        for item in tried:
            ledger.under_way.pop(item.nonce, None)
        if answer is None:  # whoever called does not learn what lies there
            self._shelf.doubt(tried)
            with contextlib.suppress(StoreError, ConnectorClosed):
                self._shelf.settle_doubts()
        if answer != OK:
            ledger.drop([item.nonce for item in tried])
            ledger.recount()

    def let_end(self) -> None:
        """Wait for puts of other threads that are in the store, for a few seconds: what they put would stay there, for
        nobody would drop it."""
        me, deadline = threading.get_ident(), time.monotonic() + _PUTS_END_S
        under_way = self._ledger.under_way
        while any(ident != me for ident in tuple(under_way.values())) and time.monotonic() < deadline:
            with self._gate.changed:
                self._gate.changed.wait(PAUSE_S)

    def _wait_for_room(self, item: Item, stored: int, deadline: float) -> bool:
        """Take room from this connector's limit; the first that waits is the first that gets some."""
        ledger = self._ledger
        if ledger.most is not None and stored > ledger.most:
            return False
        started, pauses = time.monotonic(), Pauses(deadline)
        try:
            ledger.queue(item.nonce)
            while True:
                self._gate.check("put")
                if ledger.is_first(item.nonce):
                    if ledger.add(item, stored, in_line=True):
                        return True
                    ledger.look_around()
                    if ledger.add(item, stored, in_line=True):
                        return True
                if not self._gate.pause(pauses):
                    return False
        finally:
            ledger.leave(item.nonce)
            self.blocked_s += time.monotonic() - started

    def _place_again(self, tried: list[Item], code: int, parts: _Parts, deadline: float) -> tuple[Item, int]:
        """After a first try that ended with `code`; a key that may hold something is not used again."""
        started, pauses, twins, item = time.monotonic(), Pauses(deadline), 0, tried[0]
        self._not_placed(item, code)
        while code in RETRIED:
            twins += code == EXISTS
            if twins > 2 or not self._gate.pause(pauses):
                break
            self._gate.check("put")
            if code != FULL:
                old, item = item, item._replace(nonce=self._names.new_nonce())
                tried.append(item)
                self._ledger.rename(old, item)
            code = self._place(item, parts)
            if code != OK:
                self._not_placed(item, code)
        self.blocked_s += time.monotonic() - started
        return item, code

    def _place(self, item: Item, parts: _Parts) -> int:
        """Tokens first: who finds the payload must find them, too."""
        tokens, code = self._names.tokens(item), OK
        if tokens:
            code = self._session.put_all(tokens, _TOKEN, self._shelf.placement)
        if code == OK:
            code = self._session.put(self._names.payload(item), parts[0], parts[1], self._shelf.placement)
        return code

    def _not_placed(self, item: Item, code: int) -> None:
        """Some of it may be there."""
        if code in MASTER_LOST:
            self._shelf.doubt([item])
        else:
            self._session.remove_all([*self._names.tokens(item), self._names.payload(item)])

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
