"""What a put tells its get: where the payload lies, or the payload itself; and the checks of it on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_fastshm.base import Metadata
from omni_fastshm.errors import MetadataError
from omni_fastshm.settings import describe

from ._mooncake_keys import Item, Names

__all__ = ["inline_frame", "item_of", "metadata_of"]


def metadata_of(item: Item, namespace: str) -> Metadata:
    """Metadata that leads to `item`."""
    place = {
        "namespace": namespace,
        "from_stage": item.edge[0],
        "to_stage": item.edge[1],
        "request_id": item.request,
        "nonce": item.nonce,
        "size": item.size,
        "consumers": item.takers,
    }
    return {"mooncake": place, "size": item.size}


def inline_frame(metadata: Metadata, request: str) -> bytes | bytearray:
    """The payload that metadata carries.

    Raises:
        MetadataError: what stands there is no payload, or not as long as it says.
    """
    frame = metadata["inline_bytes"]
    if isinstance(frame, memoryview):
        try:
            frame = frame.tobytes()
        except ValueError as error:  # released
            raise MetadataError(f"metadata['inline_bytes'] cannot be read: {error}", op="get") from None
    if not isinstance(frame, (bytes, bytearray)):
        raise MetadataError(f"metadata['inline_bytes'] must be bytes, not {type(frame).__name__}", op="get")
    size = _whole(metadata, "size")
    if size != len(frame):
        raise MetadataError(f"metadata says {size} bytes, but carries {len(frame)}", op="get", key=request)
    return frame


def item_of(metadata: Metadata, edge: tuple[str, str], request: str, namespace: str) -> Item:
    """What metadata leads to, after a check against this call; nothing in it becomes a key but the nonce.

    Args:
        metadata: as `put` returned it, or anything else.
        edge: from and to, of the call.
        request: its id, of the call.
        namespace: of the connector.

    Raises:
        MetadataError: it is damaged, or belongs to another call or namespace.
    """
    place = metadata.get("mooncake")
    if not isinstance(place, dict):
        raise MetadataError(
            f"metadata has neither 'inline_bytes' nor 'mooncake': {describe(metadata)}", op="get", key=request
        )
    start, end, name = place.get("from_stage"), place.get("to_stage"), place.get("request_id")
    known = isinstance(start, str) and isinstance(end, str) and isinstance(name, str)
    if not known or (start, end) != edge or name != request:
        raise MetadataError(
            f"metadata belongs to request {describe(name)} on {describe(start)} -> {describe(end)}, "
            f"not to {describe(request)} on {describe(edge[0])} -> {describe(edge[1])}",
            op="get",
            key=request,
        )
    where = place.get("namespace")
    if not isinstance(where, str) or where != namespace:
        raise MetadataError(
            f"the payload is in the namespace {describe(where)}, this connector in {namespace!r}",
            op="get",
            key=request,
        )
    size, takers, nonce = _whole(metadata, "size"), _whole(place, "consumers"), place.get("nonce")
    if _whole(place, "size") != size:
        raise MetadataError(f"metadata gives two sizes: {size} and {place['size']}", op="get", key=request)
    if not 1 <= takers <= 255 or not isinstance(nonce, str) or not Names.is_nonce(nonce):
        raise MetadataError(f"metadata is damaged: {describe(place)}", op="get", key=request)
    return Item(edge, request, nonce, size, takers)


def _whole(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise MetadataError(f"metadata[{name!r}] must be a size or a number, not {describe(value)}", op="get")
    return value
