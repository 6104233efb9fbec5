"""Prints the requirements of one extra, for pip to install them without the package: ``python tools/extra.py docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

if __name__ == "__main__":
    with (Path(__file__).resolve().parent.parent / "pyproject.toml").open("rb") as file:
        print("\n".join(tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]]))
