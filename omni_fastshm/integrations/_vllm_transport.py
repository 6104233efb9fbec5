"""How payloads of a host travel: our connectors behind the few calls that its contract needs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from omni_fastshm import segments
from omni_fastshm.base import OmniConnectorBase
from omni_fastshm.connectors import _watch
from omni_fastshm.settings import NAMESPACE_VARIABLE, Setting

__all__ = ["CLOSED", "Found", "MooncakeTransport", "SharedMemoryTransport", "Transport", "all_of", "threshold_of"]

NAMESPACE = "vllm-omni"
THRESHOLD = 65536

Put = tuple[bool, int, dict[str, Any] | None]
Found = tuple[Any, int] | None

# The key alone leads to the data, so all of it is on one edge.
_FROM, _TO = "put", "get"
# A stage that waits is woken by what is sent to it alone; one that does not know its number, by everything.
_LISTENER = "stage {}"
_OURS = frozenset({"key_lookup", "wire", "fallback", "allow_pickle", "types", "shm_threshold_bytes"})
_LOOK_AGAIN_S = 0.01
_ROOMY = 4  # views are handed out while more than this part of the mount is free


class Transport(Protocol):
    """What carries payloads; stages are as the host calls them.

    Attributes:
        knows_unread: do `has` and `cancel` tell whether there is something under a key?
    """

    knows_unread: bool

    def put(self, stages: tuple[Any, Any], key: str, envelope: Any) -> Put: ...
    def has(self, key: str) -> bool: ...
    def take(self, stages: tuple[Any, Any], key: str, timeout: float) -> Found: ...
    def take_told(self, stages: tuple[Any, Any], key: str, metadata: dict[str, Any]) -> Found: ...
    def cancel(self, key: str) -> int: ...
    def generation(self) -> int | None: ...
    def wait(self, generation: int, timeout: float) -> bool: ...
    def health(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class _Closed:
    """In place of the transport before a connector stands and after its close: nothing works, nothing raises."""

    knows_unread = False

    def put(self, stages: tuple[Any, Any], key: str, envelope: Any) -> Put:
        return False, 0, None

    def has(self, key: str) -> bool:
        return False

    def take(self, stages: tuple[Any, Any], key: str, timeout: float) -> Found:
        return None

    def take_told(self, stages: tuple[Any, Any], key: str, metadata: dict[str, Any]) -> Found:
        return None

    def cancel(self, key: str) -> int:
        return 0

    def generation(self) -> int | None:
        return None

    def wait(self, generation: int, timeout: float) -> bool:
        return False

    def health(self) -> dict[str, Any]:
        return {"status": "closed", "puts": 0, "gets": 0, "bytes_transferred": 0}

    def close(self) -> None:
        pass


CLOSED = _Closed()


def all_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The host's settings, with those that stand in an `extra` of their own."""
    inner = config.get("extra")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _chosen(config: Mapping[str, Any], table: Mapping[str, Setting]) -> dict[str, Any]:
    """Those of the host's settings that are meant for us; the host mixes its own among them."""
    given = all_of(config)
    return {name: given[name] for name in table if name in given and name not in _OURS and given[name] is not None}


def threshold_of(config: Mapping[str, Any]) -> int:
    """The largest payload that travels inside the metadata in the December 2025 generation, in bytes."""
    return int(all_of(config).get("shm_threshold_bytes", THRESHOLD))


def _wire_settings(config: Mapping[str, Any], table: Mapping[str, Setting], *, keyed: bool) -> dict[str, Any]:
    settings = {
        "copy_below": 65536,  # a flag or a few embeddings kept for a whole request must not pin a prefill
        **_chosen(config, table),
        "wire": "host",
        "key_lookup": keyed,
        # That generation's code, against its document, keeps a payload of exactly the threshold inline.
        "shm_threshold_bytes": 0 if keyed else threshold_of(config) + 1,
    }
    settings.setdefault("namespace", os.environ.get(NAMESPACE_VARIABLE) or NAMESPACE)
    return settings


class SharedMemoryTransport:
    """Rings in shared memory.

    Args:
        config: the host's settings; those of SharedMemoryConnector that stand among them are used.
        keyed: payloads are found by key.

    Raises:
        ConfigError: one of our settings is wrong.
        SegmentError: there is no room for the directory.
    """

    knows_unread = True

    def __init__(self, config: Mapping[str, Any], *, keyed: bool) -> None:
        from omni_fastshm.connectors.shared_memory import SETTINGS, SharedMemoryConnector

        size = segments.mount_size()
        settings = {
            "segment_bytes": max(min(64 << 20, size // 16), 1 << 20),
            "max_bytes": size,  # unread data is bounded by memory alone
            "put_timeout_s": 0.05,  # the host gives up on a request, or tries again: it must hear soon
            "idle_segment_s": 10.0,  # fresh pages cost far more than the copy: keep those of a prefill for the next
            **_wire_settings(config, SETTINGS, keyed=keyed),
        }
        self._connector = SharedMemoryConnector(settings)
        stage = config.get("stage_id", -1)
        listener = None if stage == -1 else _LISTENER.format(stage)
        self._watch: _watch.Watch = self._connector.watch(_FROM, _TO, listener)
        self.has = self._watch.has
        self.generation = self._watch.generation
        self.wait = self._watch.wait
        self.cancel = self._connector.cancel
        self.health = self._connector.health
        self.close = self._connector.close
        self._tight: bool | None = None
        self._look_again = 0.0

    def put(self, stages: tuple[Any, Any], key: str, envelope: Any) -> Put:
        answer: Put = self._connector.put(_FROM, _TO, key, envelope)
        if answer[0]:
            self._watch.ring(_LISTENER.format(stages[1]))
        return answer

    def take(self, stages: tuple[Any, Any], key: str, timeout: float) -> Found:
        return self._connector.get(_FROM, _TO, key, timeout=timeout, copy=self._copy())

    def take_told(self, stages: tuple[Any, Any], key: str, metadata: dict[str, Any]) -> Found:
        place = metadata.get("shm")
        said = place.get("request_id") if isinstance(place, dict) else None
        return self._connector.get(_FROM, _TO, said if isinstance(said, str) else key, metadata, copy=self._copy())

    def _copy(self) -> bool | None:
        """Views keep their room for as long as the host keeps them; where that is scarce, it gets copies."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + _LOOK_AGAIN_S
            self._tight = True if segments.mount_free() < segments.mount_size() // _ROOMY else None
        return self._tight


class MooncakeTransport:
    """Mooncake's store, for stages on several nodes.

    Args:
        config: the host's settings; those of MooncakeConnector that stand among them are used.
        keyed: payloads are found by key.

    Raises:
        ConfigError: one of our settings is wrong, or Mooncake is not installed.
    """

    knows_unread = False

    def __init__(self, config: Mapping[str, Any], *, keyed: bool) -> None:
        from omni_fastshm.connectors.mooncake import SETTINGS, MooncakeConnector

        self._connector: OmniConnectorBase = MooncakeConnector(_wire_settings(config, SETTINGS, keyed=keyed))
        self.health = self._connector.health
        self.close = self._connector.close

    def put(self, stages: tuple[Any, Any], key: str, envelope: Any) -> Put:
        return self._connector.put(*stages, key, envelope)  # type: ignore[no-any-return]

    def has(self, key: str) -> bool:
        return True  # to ask costs as much as to take

    def take(self, stages: tuple[Any, Any], key: str, timeout: float) -> Found:
        return self._connector.get(*stages, key, timeout=timeout)

    def take_told(self, stages: tuple[Any, Any], key: str, metadata: dict[str, Any]) -> Found:
        return self._connector.get(*stages, key, metadata)

    def cancel(self, key: str) -> int:
        self._connector.cleanup(key)
        return 0  # the store does not say whether there was something

    def generation(self) -> int | None:
        return None  # nothing rings across nodes: the host polls

    def wait(self, generation: int, timeout: float) -> bool:
        return False
