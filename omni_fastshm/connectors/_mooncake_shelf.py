"""What one connector has in the store, and what is done to it: claimed, cancelled, found to be gone, dropped."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ._mooncake_codes import MASTER_LOST, NOT_THERE, OK, RPC_FAIL, TRANSFER, StoreError
from ._mooncake_keys import POINTER_BYTES, Item, Names, read_pointer, write_pointer
from ._mooncake_ledger import Ledger
from ._mooncake_session import Session

__all__ = ["Shelf"]


class Shelf:
    """Methods raise `StoreError` for answers that are neither success nor "not there", and `ConnectorClosed`.

    Args:
        session: the client.
        names: the keys.
        ledger: what was put and not taken.
        placement: where objects go.
        key_lookup: payloads have pointers, which lead to them from edge and request.
    """

    def __init__(self, session: Session, names: Names, ledger: Ledger, placement: Any, *, key_lookup: bool) -> None:
        self.session = session
        self.names = names
        self.ledger = ledger
        self.placement = placement
        self.key_lookup = key_lookup
        ledger.look = self.sweep
        self.pointing = threading.RLock()
        """Held while a pointer is read and then changed."""
        self.doubtful: list[str] = []
        """Keys of calls that ended without an answer: objects may be there that nobody knows of."""
        self._astray: list[Item] = []  # of the same: pointers may lead there

    def check_master(self) -> None:
        """Raise `StoreError` while the master is known to be lost."""
        if not self.session.master_answers():
            raise StoreError(RPC_FAIL)

    def size_of(self, item: Item) -> int | None:
        """Bytes of the payload in the store; None where it is not there."""
        size = self.session.size_of(self.names.payload(item))
        if size in NOT_THERE:
            return None
        if size < 0:
            raise StoreError(size)
        return size

    # -- pointers

    def find(self, edge: tuple[str, str], request: str) -> tuple[int, Item | None]:
        """Which payload the pointer says is the newest, None where it cannot be read; and the code for its reading:
        `TRANSFER` where the node that has the pointer is gone."""
        memory = ctypes.create_string_buffer(POINTER_BYTES)
        code = self.session.get_into(self.names.pointer(edge, request), ctypes.addressof(memory), POINTER_BYTES)
        if code == POINTER_BYTES:
            return OK, read_pointer(memory.raw, edge, request)
        if code not in NOT_THERE and code != TRANSFER:
            raise StoreError(code)
        return code, None

    def look(self, edge: tuple[str, str], request: str) -> tuple[bool, Item | None]:
        """Whether there is a pointer, and which payload it says is the newest; None where it cannot be read."""
        code, item = self.find(edge, request)
        return code not in NOT_THERE, item

    def _drop_pointers(self, items: Sequence[Item]) -> None:
        """Of payloads that are gone, where nothing newer has taken the place."""
        for item in items if self.key_lookup else ():
            with self.pointing:
                _, now = self.look(item.edge, item.request)
                if now is not None and now.nonce == item.nonce:
                    self.session.remove(self.names.pointer(item.edge, item.request))

    # -- takes

    def claim(self, item: Item) -> bool:
        """Use up one take. Removing an object succeeds for one caller only: that is what makes "once" hold.

        What was read while somebody removed the payload may be a mixture; then there is nothing left to claim.
        """
        if item.takers != 1:
            for token in self._tokens_left(item):
                if self._remove(token):
                    return True
        if not self._remove(self.names.payload(item)):
            return False
        # Put by this very connector? Then no sweep would find it any more.
        if item in self.ledger and self.ledger.drop([item.nonce]):
            with contextlib.suppress(StoreError):
                self._drop_pointers([item])
        return True

    def _tokens_left(self, item: Item) -> list[str]:
        tokens = self.names.tokens(item)
        codes = self.session.exist(tokens)
        for code in codes:
            if code < 0:
                raise StoreError(code)
        return [token for token, code in zip(tokens, codes, strict=False) if code == 1]

    def _remove(self, key: str) -> bool:
        code = self.session.remove(key)
        if code != OK and code not in NOT_THERE:
            raise StoreError(code)
        return code == OK

    # -- the end of payloads

    def cancel(self, item: Item) -> None:
        """Tokens first: whoever reads the payload while it goes finds none, and throws away what it read."""
        tokens, payload = self.names.tokens(item), [self.names.payload(item)]
        for keys in filter(None, (tokens, payload)):
            codes = self.session.remove_all(keys)
            self.doubtful += [key for key, code in zip(keys, codes, strict=False) if code in MASTER_LOST]
        self.ledger.drop([item.nonce])

    def take_back(self, item: Item) -> None:
        """The same, and nothing leads to it any more."""
        self.cancel(item)
        with contextlib.suppress(StoreError):
            self._drop_pointers([item])

    def doubt(self, items: Iterable[Item]) -> None:
        """Nobody knows whether these are there, and nobody is told of them: `settle_doubts` removes them."""
        for item in items:
            self.doubtful += [*self.names.tokens(item), self.names.payload(item)]
            self._astray += [item] if self.key_lookup else []

    def sweep(self) -> None:
        """Find out which payloads were taken, and tidy up after them."""
        ledger, session, names = self.ledger, self.session, self.names
        items = ledger.items()
        if items and session.master_answers():
            codes = session.exist([names.payload(item) for item in items])
            gone = [item for item, code in zip(items, codes, strict=False) if code == 0]
            tokens = [token for item in gone for token in names.tokens(item)]
            if tokens:  # of one that was evicted
                session.remove_all(tokens)
            self._drop_pointers(gone)
            ledger.drop(item.nonce for item in gone)
            if self.key_lookup:
                self._mend_pointers([item for item, code in zip(items, codes, strict=False) if code == 1])
        ledger.swept()
        self.settle_doubts()

    def _mend_pointers(self, items: Sequence[Item]) -> None:
        """Two producers that put one key at the same time may each believe to be the newer one, and one that tidies up
        may remove the other's pointer. So cancel what is no longer pointed to, and point again to what nothing is."""
        with self.pointing:
            records = self.session.read_all(
                [self.names.pointer(item.edge, item.request) for item in items], POINTER_BYTES
            )
            for item, record in zip(items, records, strict=True):
                if record is None:
                    self.session.put_all([self.names.pointer(*item[:2])], write_pointer(item), self.placement)
                    if item not in self.ledger:  # taken by this very process meanwhile
                        self._drop_pointers([item])
                elif (now := read_pointer(record, *item[:2])) is not None and now.nonce != item.nonce:
                    self.cancel(item)

    def settle_doubts(self) -> None:
        """Remove what calls left that ended without an answer."""
        if not (self.doubtful or self._astray) or not self.session.master_answers():
            return
        doubtful, self.doubtful = self.doubtful, []
        codes = self.session.remove_all(doubtful) if doubtful else []
        self.doubtful += [key for key, code in zip(doubtful, codes, strict=False) if code in MASTER_LOST]
        while self._astray:
            self._drop_pointers(self._astray[-1:])
            self._astray.pop()

    def remove_request(self, request: str) -> None:
        """Everything of a request, by pattern: the payloads may be of any producer and on any edge."""
        for pattern in self.names.request_patterns(request):  # in the order of `cancel`
            if self.session.remove_matching(pattern) in MASTER_LOST:
                return
        mine = self.ledger.items(request)
        if mine:
            codes = self.session.exist([self.names.payload(item) for item in mine])
            self.ledger.drop(item.nonce for item, code in zip(mine, codes, strict=False) if code == 0)

    def drop_all(self) -> list[Item]:
        """Everything of this connector; the payloads that were not taken."""
        if not (len(self.ledger) or self.doubtful or self._astray):
            return []
        self.check_master()
        self.sweep()
        items = self.ledger.items()
        if self.session.lost:
            raise StoreError(RPC_FAIL)
        if not items:
            return []
        tokens = [token for item in items for token in self.names.tokens(item)]
        if tokens:
            self.session.remove_all(tokens)
        codes = self.session.remove_all([self.names.payload(item) for item in items])
        self._drop_pointers(items)
        return [item for item, code in zip(items, codes, strict=False) if code == OK]
