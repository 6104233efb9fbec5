"""What the peers share that put a payload inside the note."""

from __future__ import annotations

LOADS = ("S1", "S2", "S3")  # what fits the control plane's page


class Nothing:
    """An end without anything to keep."""

    def close(self) -> None:
        pass
