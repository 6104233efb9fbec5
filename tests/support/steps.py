"""Steps for children with a connector ``c``, and what they put."""

from __future__ import annotations

from typing import Any

import numpy as np

PUT_BIG = "ok, size, md = c.put('0', '1', rid, {'a': np.arange(131072) + seed}); result = (ok, size, md)"
SAME = "result = None if got is None else bool(np.array_equal(got[0]['a'], np.arange(131072) + seed))"


def big(seed: int = 0) -> dict[str, Any]:
    """What `PUT_BIG` puts: 1 MiB."""
    return {"a": np.arange(131072) + seed}
