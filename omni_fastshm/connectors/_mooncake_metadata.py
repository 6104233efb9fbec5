"""What a put tells its get: where the payload lies; and the checks of it on the way in."""

from __future__ import annotations

from omni_fastshm.base import Metadata
from omni_fastshm.errors import MetadataError
from omni_fastshm.metadata import check_call, integer
from omni_fastshm.settings import describe

from ._mooncake_keys import Item, Names

__all__ = ["item_of", "metadata_of"]


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
    check_call(place, edge, request)
    where = place.get("namespace")
    if not isinstance(where, str) or where != namespace:
        raise MetadataError(
            f"the payload is in the namespace {describe(where)}, this connector in {namespace!r}",
            op="get",
            key=request,
        )
    size, takers, nonce = integer(metadata, "size"), integer(place, "consumers"), place.get("nonce")
    if integer(place, "size") != size:
        raise MetadataError(f"metadata gives two sizes: {size} and {place['size']}", op="get", key=request)
    if not 1 <= takers <= 255 or not isinstance(nonce, str) or not Names.is_nonce(nonce):
        raise MetadataError(f"metadata is damaged: {describe(place)}", op="get", key=request)
    return Item(edge, request, str.__str__(nonce), size, takers)  # by its value: a subclass may write itself otherwise
