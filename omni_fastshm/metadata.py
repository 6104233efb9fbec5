"""Checks of the metadata that comes back to `get`: nothing in it is believed before it was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_fastshm import segments
from omni_fastshm._core import BLOCK_LIMIT
from omni_fastshm.base import Metadata
from omni_fastshm.errors import MetadataError
from omni_fastshm.settings import describe

_NAME_LIMIT = 255  # of a file; a longer name is not worth being taken apart and remembered


def integer(metadata: Mapping[str, Any], name: str) -> int:
    """A size or number out of metadata."""
    value = metadata.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise MetadataError(f"metadata[{name!r}] must be a size or a number, not {describe(value)}", op="get")
    return value


def inline_frame(metadata: Metadata, request: str) -> bytes | bytearray:
    """The payload that metadata carries.

    Raises:
        MetadataError: what stands there is no payload, or not as long as it says.
    """
    frame = metadata["inline_bytes"]
    if type(frame) is bytes and type(size := metadata.get("size")) is int and size == len(frame):
        return frame
    if isinstance(frame, memoryview):
        try:
            frame = frame.tobytes()
        except ValueError as error:  # released
            raise MetadataError(f"metadata['inline_bytes'] cannot be read: {error}", op="get") from None
    if not isinstance(frame, (bytes, bytearray)):
        raise MetadataError(f"metadata['inline_bytes'] must be bytes, not {type(frame).__name__}", op="get")
    size = integer(metadata, "size")
    if size != len(frame):
        raise MetadataError(f"metadata says {size} bytes, but carries {len(frame)}", op="get", key=request)
    return frame


def check_call(place: Mapping[str, Any], edge: tuple[str, str], request: str) -> None:
    """Was this metadata made for this very call?

    Raises:
        MetadataError: it belongs to another edge or request.
    """
    said = place.get("from_stage"), place.get("to_stage"), place.get("request_id")
    if not all(isinstance(each, str) for each in said) or said != (*edge, request):
        raise MetadataError(
            f"metadata belongs to request {describe(said[2])} on {describe(said[0])} -> {describe(said[1])}, "
            f"not to {describe(request)} on {describe(edge[0])} -> {describe(edge[1])}",
            op="get",
            key=request,
        )


def check_place(metadata: Metadata, edge: tuple[str, str], request: str) -> tuple[str, int, int, int]:
    """``(control segment, block, sequence, size)`` from metadata, checked against this call and this host."""
    place = metadata.get("shm")
    if not isinstance(place, dict):
        raise MetadataError(
            f"metadata has neither 'inline_bytes' nor 'shm': {describe(metadata)}",
            op="get",
            key=request,
        )
    name = place.get("name")
    if not isinstance(name, str) or len(name) > _NAME_LIMIT or segments.parse_control_name(name) is None:
        raise MetadataError(f"metadata names no segment of ours: {describe(name)}", op="get", key=request)
    check_call(place, edge, request)
    host = place.get("host")
    if not isinstance(host, str) or not segments.same_host(host):
        raise MetadataError(
            f"the payload is in the memory of host {describe(host)}, this is {describe(segments.host_identity())}: "
            "use a connector that crosses hosts on this edge",
            op="get",
            key=request,
        )
    size = integer(metadata, "size")
    if integer(place, "size") != size:
        raise MetadataError(f"metadata gives two sizes: {size} and {describe(place['size'])}", op="get", key=request)
    block = integer(place, "block")
    if block >= BLOCK_LIMIT:
        raise MetadataError(f"no segment has a block {describe(block)}", op="get", key=request)
    # By its value: what an enum or a parser of the user's made of it is no str to the core.
    return str.__str__(name), block, integer(place, "sequence"), size
