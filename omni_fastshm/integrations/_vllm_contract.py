"""The host's connector contract, in both of its generations, on top of a transport.

`Keyed` is what vllm-omni has had since 0.30 (with what 0.32 adds), `Told` that of December 2025. Both are mixed into a
class that derives from the host's own SharedMemoryConnector, or stand alone. Nothing here raises: a failure is
``(False, 0, None)`` or None and one line in the log, and after close it is not even that.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

from omni_fastshm.errors import CodecError, ConnectorClosed
from omni_fastshm.factory import OmniConnectorFactory
from omni_fastshm.settings import ONLY_IN_HOST, misspelt_settings, parse_settings

from ._vllm_keys import SentKeys
from ._vllm_transport import CLOSED, Found, Put, Transport, all_of, threshold_of
from ._vllm_wire import Serializer, Wire

__all__ = ["Keyed", "Plain", "Told"]

logger = logging.getLogger("omni_fastshm")

_REFUSED: Put = (False, 0, None)
_PLACES = frozenset({"shm", "inline_bytes", "mooncake"})  # where metadata says that the payload is
_SAY_AGAIN_S = 10.0
_LONG_KEY = 1024  # metadata stays small: a longer key is not repeated in it


class Plain:
    """In place of the host's class where vllm-omni is not installed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.stage_id = config.get("stage_id", -1)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()  # type: ignore[attr-defined]

    @staticmethod
    def _make_key(key: str, from_stage: str, to_stage: str, separator: str = "@") -> str:
        return f"{key}{separator}{from_stage}_{to_stage}"


def _text(key: Any) -> str:
    """The key as text that can be hashed: clients choose request ids, and JSON can hold half a surrogate pair."""
    if type(key) is str and key.isascii():
        return key
    text = str(key)
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + text.encode("utf-8", "backslashreplace").decode()
    return text


class _Contract:
    """What both generations share."""

    supports_raw_data: bool = False
    keyed: ClassVar[bool]
    make_transport: ClassVar[Callable[..., Transport]]
    serializer: ClassVar[Serializer | None] = None
    # Of the class, so that close() finds a half-built object harmless.
    _transport: Transport = CLOSED
    _last: Transport = CLOSED

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.config = config  # the very dict: the host reads settings of its own out of it
        self._wire = Wire(self.serializer)
        self._last = type(self).make_transport(config, keyed=self.keyed)
        self._transport = self._last
        name = type(self).__name__
        for given, meant in misspelt_settings(OmniConnectorFactory.settings_of(name) or {}, all_of(config)):
            logger.warning("%s: there is no setting %.60r; did you mean %r? It is passed over", name, given, meant)

    def _send(self, stages: tuple[Any, Any], key: str, data: Any) -> Put:
        transport = self._transport
        try:
            try:
                envelope = [data]
                answer = transport.put(stages, key, envelope)
            except CodecError as refusal:
                envelope = self._wire.foreign(data, refusal)
                answer = transport.put(stages, key, envelope)
            if not answer[0] and self._make_room():
                answer = transport.put(stages, key, envelope)
            return answer
        except ConnectorClosed:
            self._note_closed("put", key)
            return _REFUSED
        except Exception as error:
            self._say("put", key, error)
            return _REFUSED

    def _make_room(self) -> bool:
        """After a refusal: is it worth another try?"""
        return False

    def _fetch(self, key: str, take: Callable[..., Found], *arguments: Any) -> Found:
        """What one of the transport's ways of taking gives, as the host's reader would see it."""
        try:
            found = take(*arguments)
        except ConnectorClosed:
            self._note_closed("get", key)
            return None
        except Exception as error:
            self._say("get", key, error)
            return None
        return self._receive(key, found)

    def _receive(self, key: str, found: Found) -> Found:
        if found is None:
            return None
        envelope, size = found
        try:
            return self._wire.open(envelope), size
        except Exception as error:
            self._say("get", key, error)
        # The host's own reader would lose a payload that its classes cannot be made of, and be asked for it for ever.
        return (envelope[0], size) if type(envelope) is list and len(envelope) == 1 else None

    def _note_closed(self, op: str, key: str) -> None:
        if self._transport is not CLOSED:  # not by us: after a fork, or at the process's exit
            logger.warning("%s of %.200r on a connector that was closed, or made before a fork", op, key)
            self._transport = CLOSED

    def _say(self, op: str, key: Any, error: Exception) -> None:
        # As text: a record that is kept would keep the error's frames, and with them connectors and payloads.
        what = f"{type(error).__name__}: {error}"
        logger.error("%s: %s of %.200r failed: %s", type(self).__name__, op, key, what)

    def health(self) -> dict[str, Any]:
        """Counters and levels; `status` is "healthy" while all is well, as the host spells it."""
        try:
            found = self._last.health()
        except Exception as error:
            self._say("health", "", error)
            found = {**CLOSED.health(), "status": "failed"}
        status = "healthy" if found["status"] == "ok" else found["status"]
        return {**found, "status": status, "connector": type(self).__name__}

    def close(self) -> None:
        """Give everything back; what nobody has read is dropped. Idempotent, also of a half-built object."""
        transport, self._transport = self._transport, CLOSED
        transport.close()

    def __del__(self) -> None:
        try:
            self.close()
        except BaseException:  # the interpreter may be going down
            pass


class Keyed(_Contract):
    """Since vllm-omni 0.30: the key alone leads to the data, whoever put it on whatever edge."""

    keyed = True

    def __init__(self, config: dict[str, Any]) -> None:
        known = all_of(config)
        given = {name: known[name] for name in ONLY_IN_HOST if name in known}
        self._unread_ttl_s: float = parse_settings(type(self).__name__, ONLY_IN_HOST, given)["unread_ttl_s"]
        super().__init__(config)
        self._sent = SentKeys(self._last.has)  # not of self: a connector goes with its last reference
        self._said_at = 0.0
        # Both are what a host needs in order not to poll; its own switch turns them off here as well.
        self._wakes = os.environ.get("VLLM_OMNI_SHM_WAKEUP", "1") == "1"

    def _make_room(self) -> bool:
        """Drop what nobody waits for any more: the host ends requests of text alone with a mark that nobody reads."""
        if not self._last.knows_unread:  # to ask the store for each key would take for ever
            return False
        stale = self._sent.older_than(self._unread_ttl_s)
        dropped = sum(map(self.cleanup, stale))
        if dropped:
            logger.warning(
                "%s: no room: dropped %d payloads that were not read in %g s (unread_ttl_s)",
                type(self).__name__,
                dropped,
                self._unread_ttl_s,
            )
        return dropped > 0

    def put(self, from_stage: Any, to_stage: Any, put_key: str, data: Any) -> Put:
        """Send one payload.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            put_key: where a reader finds it; what is unread under this key is replaced.
            data: anything that the host's serializer carries; it may be overwritten afterwards.

        Returns:
            ``(True, serialized bytes, metadata)``, or ``(False, 0, None)`` when it found no room or cannot be carried.
        """
        key = _text(put_key)
        ok, size, _ = self._send((from_stage, to_stage), key, data)
        if not ok:
            return _REFUSED
        self._sent.add(key)
        place: dict[str, Any] = {"name": key, "size": size} if len(key) <= _LONG_KEY else {"size": size}
        return True, size, {"shm": place, "size": size}

    def get(self, from_stage: Any, to_stage: Any, get_key: str, metadata: Any = None) -> Found:
        """Take one payload, if it is there.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            get_key: what it was put under.
            metadata: what `put` returned, also as ``{key: metadata}``; anything else is of no account.

        Returns:
            ``(object, serialized bytes)``; None when it is not there, or not yet. Tensors and arrays are writable,
            and live as long as they are kept, also after close.
        """
        key = _text(get_key if metadata is None else _told_key(metadata, get_key))
        try:
            if not self._transport.has(key):
                return None
        except Exception as error:
            if time.monotonic() - self._said_at > _SAY_AGAIN_S:  # hosts poll thousands of times a second
                self._said_at = time.monotonic()
                self._say("get", key, error)
            return None
        return self._take((from_stage, to_stage), key, 0)

    def _take(self, stages: tuple[Any, Any], key: str, timeout: float) -> Found:
        return self._fetch(key, self._transport.take, stages, key, timeout)

    def get_with_deadline(
        self, from_stage: Any, to_stage: Any, get_key: str, metadata: Any = None, *, deadline: float
    ) -> Found:
        """As `get`, but sleeps until the payload arrives or `deadline` (of ``time.monotonic()``) has come."""
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        key = _text(get_key if metadata is None else _told_key(metadata, get_key))
        return self._take((from_stage, to_stage), key, left)

    def abandon_get(self, get_key: str) -> None:
        """Nothing is left over from a get that found nothing."""

    def cleanup(self, request_id: str) -> bool:
        """Drop what is unread under exactly this key, whoever put it; was there anything?"""
        key = _text(request_id)
        self._sent.discard(key)
        try:
            return self._transport.cancel(key) > 0
        except Exception as error:
            self._say("cleanup", key, error)
            return False

    def cleanup_prefix(self, key_prefix: str) -> int:
        """Drop what this connector has put under `key_prefix` followed by a number, and nothing else; how many?"""
        return sum(map(self.cleanup, self._sent.numbered(_text(key_prefix))))

    def reap_consumed(self, *, max_keys: int = 64) -> None:
        """Forget keys that were read. The host calls it now and then; without it they are forgotten a little later."""
        try:
            self._sent.reap(max_keys)
        except Exception as error:
            self._say("reap_consumed", "", error)

    def get_wakeup_generation(self) -> int | None:
        """To be read before looking for payloads; None where there are no wake-ups and the host has to poll."""
        try:
            return self._transport.generation() if self._wakes else None
        except Exception as error:
            self._say("get_wakeup_generation", "", error)
            return None

    def wait_for_change(self, generation: int, *, timeout: float) -> bool:
        """Sleep until a payload arrives that `generation` does not count, at most `timeout` seconds; did one?"""
        try:
            return self._transport.wait(generation, timeout)
        except Exception as error:
            self._say("wait_for_change", "", error)
            return False


def _told_key(metadata: Any, key: Any) -> Any:
    """The key that metadata of ours names; `key` where it names none."""
    if isinstance(metadata, dict):
        inner = metadata.get(key)
        place = (inner if isinstance(inner, dict) else metadata).get("shm")
        name = place.get("name") if isinstance(place, dict) else None
        if isinstance(name, str):
            return name
    return key


class Told(_Contract):
    """As of December 2025: put's metadata leads to the data, and carries it where it is small."""

    keyed = False

    def __init__(self, config: dict[str, Any]) -> None:
        self.threshold = threshold_of(config)
        super().__init__(config)

    def put(self, from_stage: Any, to_stage: Any, request_id: str, data: Any) -> Put:
        """Send one payload.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            request_id: the request's id.
            data: anything that the host's serializer carries; it may be overwritten afterwards.

        Returns:
            ``(True, serialized bytes, metadata for get)``, or ``(False, 0, None)``.
        """
        return self._send((from_stage, to_stage), _text(request_id), data)

    def get(self, from_stage: Any, to_stage: Any, request_id: str, metadata: Any = None) -> Found:
        """Take the payload that `metadata` leads to.

        Args:
            from_stage: the sending stage.
            to_stage: the receiving stage.
            request_id: the request's id.
            metadata: what `put` returned; also ``{"inline": object}``.

        Returns:
            ``(object, serialized bytes)``; None when it is gone, or `metadata` is not of ours.
        """
        key = _text(request_id)
        if not isinstance(metadata, dict) or _PLACES.isdisjoint(metadata):
            if isinstance(metadata, dict) and "inline" in metadata:
                return metadata["inline"], self._inline_size(metadata)
            logger.error("%s: get of %.200r without metadata of put", type(self).__name__, key)
            return None
        return self._fetch(key, self._transport.take_told, (from_stage, to_stage), key, metadata)

    def _inline_size(self, metadata: dict[str, Any]) -> int:
        if metadata.get("size") or self.serializer is None:
            return int(metadata.get("size", 0))
        try:
            return len(self.serializer.serialize(metadata["inline"]))
        except Exception:
            return 0

    def cleanup(self, request_id: str) -> None:
        """Drop what is unread of exactly this request."""
        try:
            self._transport.cancel(_text(request_id))
        except Exception as error:
            self._say("cleanup", request_id, error)

    def health(self) -> dict[str, Any]:
        """As of the host: with `threshold`."""
        return {**super().health(), "threshold": self.threshold}
