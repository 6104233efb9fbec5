"""The same two calls between machines: MooncakeConnector, here with two "nodes" and the master on one machine.

Without $MOONCAKE_MASTER it starts a master of its own. Needs ``pip install 'omni-fastshm[mooncake]'``.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import torch

from omni_fastshm import MooncakeConnector

SETTINGS = {"master": "$MOONCAKE_MASTER", "segment": "64MB", "localbuf": "64MB", "get_timeout_s": 5}


def embeddings() -> torch.Tensor:
    """What is sent; the other node makes it again to compare."""
    return (torch.arange(1000) % 200).to(torch.bfloat16)[:, None].expand(1000, 1024)


def other_node(metadata: dict[str, Any]) -> None:
    """On another machine this would be the whole program."""
    with MooncakeConnector(SETTINGS) as connector:
        got = connector.get("encoder", "llm", "request-1", metadata)
        if got is None:
            raise SystemExit("the payload went with its sender")
        payload, size = got
        assert torch.equal(payload["embeddings"], embeddings())
        print(f"other node: {size:,} bytes, over TCP from the sender's memory", flush=True)


def main() -> int:
    """Send one payload."""
    careless = "--break" in sys.argv
    with MooncakeConnector(SETTINGS | {"linger_s": 0 if careless else 50}) as connector:
        ok, _, metadata = connector.put("encoder", "llm", "request-1", {"embeddings": embeddings()})
        assert ok
        process = multiprocessing.get_context("spawn").Process(target=other_node, args=(metadata,))
        if careless:
            connector.close()  # too early: it lingers for nobody, and the payload goes with it
        process.start()
    process.join()  # leaving the block has waited until the payload was taken
    print("ok" if process.exitcode == 0 else "failed")
    return process.exitcode or 0


if __name__ == "__main__":
    if os.environ.get("MOONCAKE_MASTER"):
        sys.exit(main())
    again = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    sys.exit(
        subprocess.run([sys.executable, "-m", "omni_fastshm", "mooncake", "up", "--", *again], check=False).returncode
    )
