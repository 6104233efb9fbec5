"""Settings that connectors have in common."""

from __future__ import annotations

from omni_fastshm.settings import Setting

__all__ = ["CODEC", "LINGER", "PUT_TIMEOUT"]

PUT_TIMEOUT = Setting("seconds", 5.0, help="how long a put waits for room before it answers (False, 0, None)")
LINGER = Setting("seconds", 0.0, help="how long close waits for takers of what is untaken")

CODEC = {
    "copy_below": Setting("bytes", 4096, help="leaves up to this size are copied out on get instead of being views"),
    "allow_pickle": Setting("bool", False, help="carry unknown objects by pickle; only among processes you trust"),
    "wire": Setting(
        "choice", "exact", choices=("exact", "host"), help="types as sent, or as the host's serializer gives them"
    ),
    "types": Setting("names", (), help="'module:Class' names that may be imported to rebuild payloads"),
}
"""How payloads are taken apart and put together."""
