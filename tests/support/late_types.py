"""A class that a receiver does not know before it imports this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Late:
    value: Any
