"""SharedMemoryConnector keeps the contract, without an exemption."""

from __future__ import annotations

from typing import Any, ClassVar

from contract.connector_contract import TOPICS, Profile, suite


class SharedMemory(Profile):
    target = "omni_fastshm.connectors.shared_memory:SharedMemoryConnector"
    base_settings: ClassVar[dict[str, Any]] = {"segment_bytes": 1 << 20, "max_bytes": 16 << 20}

    def puts_that_wait(self, connector: Any) -> int:
        return len(connector._producer.queue)


globals().update(suite(SharedMemory, TOPICS))
