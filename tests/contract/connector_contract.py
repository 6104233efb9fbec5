"""The promises that every connector keeps, as tests.

A connector is held to them by a module of five lines: a `Profile` that names it, and
``globals().update(suite(Profile, TOPICS))``.
"""

from __future__ import annotations

from contract import (
    arguments,
    batches,
    carrying,
    closing,
    concurrency,
    delivery,
    loans,
    metadata,
    space,
    views,
    waiting,
)
from contract.profile import Profile, Topic, suite

__all__ = ["TOPICS", "Profile", "suite"]

TOPICS: list[type[Topic]] = [
    *carrying.TOPICS,
    *metadata.TOPICS,
    *delivery.TOPICS,
    *views.TOPICS,
    *loans.TOPICS,
    *space.TOPICS,
    *waiting.TOPICS,
    *batches.TOPICS,
    *arguments.TOPICS,
    *closing.TOPICS,
    *concurrency.TOPICS,
]
