"""Hashes of edges and request ids: what shared memory knows a payload by.

BLAKE2b (RFC 7693), 128 bits for a request id, so that two ids which clients choose never meet, not even on purpose.
"""

from __future__ import annotations

import functools

from omni_fastshm._core import request_hash, text_hash

__all__ = ["edge_hash", "request_hash", "stage_hash"]


@functools.lru_cache(maxsize=1024)
def edge_hash(from_stage: str, to_stage: str) -> int:
    """Hash of an edge; the length in front keeps ("a", "bc") and ("ab", "c") apart."""
    return int.from_bytes(text_hash(f"{len(from_stage)}:{from_stage}{to_stage}", 8), "little")


@functools.lru_cache(maxsize=1024)
def stage_hash(stage: str) -> int:
    """Which arrival bell a receiving stage listens to, before the modulus."""
    return int.from_bytes(text_hash(stage, 4), "little")
