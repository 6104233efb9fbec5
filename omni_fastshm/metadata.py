"""Checks of the metadata that comes back to `get`: nothing in it is believed before it was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_fastshm import segments
from omni_fastshm._core import BLOCK_LIMIT
from omni_fastshm.base import Metadata
from omni_fastshm.errors import MetadataError


def integer(metadata: Mapping[str, Any], name: str) -> int:
    """A size or number out of metadata."""
    value = metadata.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise MetadataError(f"metadata[{name!r}] must be a size or a number, not {value!r:.60}", op="get")
    return value


def check_place(metadata: Metadata, edge: tuple[str, str], request: str) -> tuple[str, int, int]:
    """``(control segment, block, sequence)`` from metadata that has been checked against this call and this host."""
    place = metadata.get("shm")
    if not isinstance(place, dict):
        raise MetadataError(
            f"metadata has neither 'inline_bytes' nor 'shm': keys {sorted(map(str, metadata))[:8]}",
            op="get",
            key=request,
        )
    name = place.get("name")
    if not isinstance(name, str) or segments.parse_control_name(name) is None:
        raise MetadataError(f"metadata names no segment of ours: {name!r:.80}", op="get", key=request)
    said = place.get("from_stage"), place.get("to_stage"), place.get("request_id")
    if said != (*edge, request):
        raise MetadataError(
            f"metadata belongs to request {said[2]!r:.80} on {said[0]!r:.40}->{said[1]!r:.40}, "
            f"not to {request!r:.80} on {edge[0]}->{edge[1]}",
            op="get",
            key=request,
        )
    host = place.get("host")
    if not isinstance(host, str) or not segments.same_host(host):
        raise MetadataError(
            f"the payload is in the memory of host {host!r:.120}, this is {segments.host_identity()!r}: "
            "use a connector that crosses hosts on this edge",
            op="get",
            key=request,
        )
    size = integer(metadata, "size")
    if integer(place, "size") != size:
        raise MetadataError(f"metadata gives two sizes: {size} and {place['size']}", op="get", key=request)
    block = integer(place, "block")
    if block >= BLOCK_LIMIT:
        raise MetadataError(f"no segment has a block {block}", op="get", key=request)
    return name, block, integer(place, "sequence")
