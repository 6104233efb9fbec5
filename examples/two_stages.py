"""Two stages, each in a process of its own: tensors go through shared memory, results come back in order."""

from __future__ import annotations

import sys
from typing import Any

import torch

from omni_fastshm import Pipeline, StageFailed

CONFIG = {
    "stages": [{"stage_id": 0, "name": "thinker"}, {"stage_id": 1, "name": "talker"}],
    "edges": [{"from": 0, "to": 1}],
}


def thinker(tokens: int) -> dict[str, Any]:
    """Hidden states for a prompt of so many tokens: 14 KiB a token."""
    if tokens == 0:
        raise ValueError("an empty prompt")
    return {"ids": list(range(tokens)), "hidden": torch.full((tokens, 3584), float(tokens))}


def talker(thought: dict[str, Any]) -> dict[str, Any]:
    """What arrived, in numbers that the caller can check."""
    hidden = thought["hidden"]
    return {"tokens": len(thought["ids"]), "shape": tuple(hidden.shape), "mean": float(hidden.mean())}


def careless_talker(thought: dict[str, Any]) -> dict[str, Any]:
    """One that writes into its input before it looks: allowed, for the memory is its own, but wrong here."""
    thought["hidden"][0] += 1
    return talker(thought)


def main() -> None:
    """Run ten prompts and one bad one."""
    stages = {0: thinker, 1: careless_talker if "--break" in sys.argv else talker}
    with Pipeline.from_config(CONFIG, stages=stages) as pipeline:
        prompts = [100 * (1 + index) for index in range(10)]
        for tokens, answer in zip(prompts, pipeline.run(prompts), strict=True):
            if answer != {"tokens": tokens, "shape": (tokens, 3584), "mean": float(tokens)}:
                raise SystemExit(f"the answer to {tokens} tokens is wrong: {answer}")
        try:
            pipeline.submit(0, request_id="empty").result()
        except StageFailed as error:
            print(f"as expected: {str(error).splitlines()[0]}")
    for edge in pipeline.stats().edges:
        print(f"{edge.from_stage} -> {edge.to_stage}: {edge.payloads} payloads, {edge.total_bytes:,} bytes")
    print("ok")


if __name__ == "__main__":
    main()
