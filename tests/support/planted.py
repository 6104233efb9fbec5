"""Things that are not shared memory segments, to stand under one of our names."""

from __future__ import annotations

import os
from pathlib import Path


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def dangling(path: Path) -> None:
    path.symlink_to("/nothing/there")


def folder(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def other_user(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 12345, 12345)
