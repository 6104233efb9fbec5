"""Looking for payloads by key without taking them, for hosts that poll: cheap when there is nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_fastshm._core import find_newest
from omni_fastshm.arrivals import SLICE_NS
from omni_fastshm.keys import edge_hash, request_hash, stage_hash

if TYPE_CHECKING:
    from omni_fastshm._core import Directory
    from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

__all__ = ["Watch"]


class Watch:
    """One edge of a connector that was built with ``key_lookup``. Calls may come from any thread.

    Args:
        connector: whose payloads; after its close nothing is there any more.
        from_stage: the sending stage, as text.
        to_stage: the receiving stage, as text.
        listener: whose `ring` counts as an arrival here; None: every put to `to_stage`. For a host that has all its
            payloads on one edge, and yet wants to wake those alone whom they concern.
    """

    def __init__(
        self, connector: SharedMemoryConnector, from_stage: str, to_stage: str, listener: str | None = None
    ) -> None:
        self._connector = connector
        self._edge = edge_hash(from_stage, to_stage)
        self._bell = stage_hash(to_stage if listener is None else listener)
        self._heard: Directory | None = None  # the directory that `_serial` counts
        self._serial = 0

    def has(self, request: str) -> bool:
        """Is there an untaken payload of this request? It may be gone again when it is asked for.

        Args:
            request: the id, valid Unicode text.

        Returns:
            False also for a moment while a payload is replaced by a newer one; the bell rings then.
        """
        directory, connector = self._directory(), self._connector
        if directory is None:
            return False
        high, low = request_hash(request)
        producers = connector._consumer.producers(directory, connector.namespace)
        return find_newest(producers, self._edge, high, low) is not None

    def generation(self) -> int | None:
        """What changes with every arrival; to be read before looking. None after close."""
        directory = self._directory()
        if directory is None:
            return None
        if directory is not self._heard:
            self._heard = directory
            self._serial += 1
        return self._serial << 32 | directory.listen(self._bell) & ~1

    def ring(self, listener: str) -> None:
        """Something was put for a listener of that name, in whatever process; to be called after the put."""
        directory = self._connector._directory
        if directory is not None:
            directory.ring(stage_hash(listener))

    def wait(self, generation: int, timeout: float) -> bool:
        """Sleep until something arrives that `generation` does not count yet.

        Args:
            generation: what `generation` gave before the last look.
            timeout: seconds, at most.

        Returns:
            True when something may have arrived; False when the time is over or the connector was closed.
        """
        deadline = min(time.monotonic_ns() + int(max(timeout, 0.0) * 1e9), 2**63)
        while True:
            now = self.generation()
            if now is None:
                return False
            if now != generation:
                return True
            directory = self._heard
            if directory is None or time.monotonic_ns() >= deadline:
                return False
            directory.wait(self._bell, generation & 0xFFFFFFFF, 0, SLICE_NS, deadline)

    def _directory(self) -> Directory | None:
        connector = self._connector
        directory = connector._directory
        if directory is not None and directory.lost():
            return connector._sound_directory()
        return directory
