"""Messages of 4 KiB between marks that callgrind dumps its counts at; `support.instructions` runs it.

``python tests/support/counted_messages.py NAMESPACE`` sends, inline and then through the ring, `MESSAGES` and then
twice as many, each time all puts between two marks and all gets between two more. What repeats cancels out in the
difference.
"""

from __future__ import annotations

import gc
import sys

import numpy as np

from omni_fastshm import SharedMemoryConnector, _core

WAYS = {"inline": 65536, "ring": 0}  # -> shm_threshold_bytes
MESSAGES = 100
WARM = 300
MARK = "ofs_layout_fields"  # the C function behind `mark`, which no message calls

mark = _core.layout


def messages(connector: SharedMemoryConnector, tag: str, count: int) -> None:
    data = {"request_id": "request-0", "step": 7, "x": np.ones(1024, dtype=np.float32)}
    requests = [f"chatcmpl-{tag}-{number:012d}" for number in range(count)]
    sent = []
    mark()
    for request in requests:
        sent.append(connector.put("thinker", "talker", request, data)[2])
    mark()
    for request, metadata in zip(requests, sent, strict=True):
        connector.get("thinker", "talker", request, metadata)
    mark()


def main() -> None:
    gc.disable()
    for threshold in WAYS.values():
        with SharedMemoryConnector({"namespace": sys.argv[1], "shm_threshold_bytes": threshold}) as connector:
            messages(connector, "warm", WARM)
            messages(connector, "once", MESSAGES)
            messages(connector, "twice", 2 * MESSAGES)
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported: NumPy payloads must not need it")


if __name__ == "__main__":
    main()
