"""``python -m omni_fastshm`` is the command ``omni-fastshm``."""

from __future__ import annotations

import sys

from omni_fastshm.cli import main

if __name__ == "__main__":
    sys.exit(main())
