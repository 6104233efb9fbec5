"""torch.multiprocessing, strategy file_system."""

from __future__ import annotations

from bench.peers._torch_sharing import Sharing, get, put

__all__ = ["differs", "get", "label", "one_process", "open", "put"]

label = "torch.multiprocessing, file_system"
differs = "Each tensor is a new file of fresh pages, kept alive by torch's own manager process."
one_process = False


def open(place: str, side: str, load: str, depth: int) -> Sharing:
    return Sharing("file_system", depth)
