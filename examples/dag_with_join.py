"""A graph of five stages in which two branches meet again: each request's halves come together, whatever the timing."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from omni_fastshm import Pipeline

CONFIG = {
    "stages": [
        {"stage_id": "prompt"},
        {"stage_id": "audio"},
        {"stage_id": "picture"},
        {"stage_id": "thinker"},
        {"stage_id": "voice"},
    ],
    "edges": [
        {"from": "prompt", "to": "audio"},
        {"from": "prompt", "to": "picture"},
        {"from": "audio", "to": "thinker"},
        {"from": "picture", "to": "thinker"},
        {"from": "thinker", "to": "voice"},
    ],
}
ROWS = 500


def prompt(number: int) -> int:
    """One request: here a number that everything about it can be checked by."""
    return number


def audio(number: int) -> np.ndarray:
    """Features of the sound; some requests take longer than others, so that the branches get out of step."""
    steps = 1 + 20 * (number % 4)
    features = np.zeros((ROWS, 128))
    for _ in range(steps):
        features += number
    return features / steps


def picture(number: int) -> np.ndarray:
    """Patches of the picture."""
    return np.full((ROWS, 256), 2.0 * number)


def thinker(halves: dict[str, np.ndarray]) -> np.ndarray:
    """A stage with several predecessors gets a dict by stage, of one and the same request."""
    return np.concatenate([halves["audio"], halves["picture"]], axis=1)


def forgetful_thinker(halves: dict[str, np.ndarray]) -> np.ndarray:
    """One that uses one branch twice: the shapes would even fit."""
    return np.concatenate([halves["picture"][:, :128], halves["picture"]], axis=1)


def voice(joined: np.ndarray) -> dict[str, Any]:
    """What arrived, in numbers that the caller can check."""
    return {"shape": joined.shape, "audio": float(joined[:, :128].mean()), "picture": float(joined[:, 128:].mean())}


def main() -> None:
    """Run twenty requests through the graph."""
    join = forgetful_thinker if "--break" in sys.argv else thinker
    stages = {"prompt": prompt, "audio": audio, "picture": picture, "thinker": join, "voice": voice}
    with Pipeline.from_config(CONFIG, stages=stages) as pipeline:
        for number, answer in enumerate(pipeline.run(range(1, 21)), start=1):
            if answer != {"shape": (ROWS, 384), "audio": number, "picture": 2.0 * number}:
                raise SystemExit(f"request {number} was answered with {answer}")
    for edge in pipeline.stats().edges:
        print(f"{edge.from_stage} -> {edge.to_stage}: {edge.payloads} payloads, {edge.total_bytes:,} bytes")
    print("ok")


if __name__ == "__main__":
    main()
