"""Hashes of edges and request ids: what shared memory knows a payload by.

BLAKE2b (RFC 7693), 128 bits for a request id, so that two ids which clients choose never meet, not even on purpose.
"""

from __future__ import annotations

import functools
from hashlib import blake2b


@functools.lru_cache(maxsize=8192)
def request_hash(request_id: str) -> tuple[int, int]:
    """Both halves of a request id's hash. Cached: readers poll the same ids over and over."""
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


@functools.lru_cache(maxsize=1024)
def edge_hash(from_stage: str, to_stage: str) -> int:
    """Hash of an edge; the length in front keeps ("a", "bc") and ("ab", "c") apart."""
    text = f"{len(from_stage)}:{from_stage}{to_stage}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=1024)
def stage_hash(stage: str) -> int:
    """Which arrival bell a receiving stage listens to, before the modulus."""
    return int.from_bytes(blake2b(stage.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "little")
