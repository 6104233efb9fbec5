"""What `omni-fastshm run` calls the file of results that nobody named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omni_fastshm.cli.job import out_name


@pytest.mark.parametrize(
    ("result", "name"),
    [
        ("text", "out.txt"),
        ("", "out.txt"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "out.wav"),
        (b"RIFF\x00\x00\x00\x00AVI fmt ", "out.bin"),
        (b"\x89PNG\r\n\x1a\n", "out.png"),
        (bytearray(b"OggS"), "out.ogg"),
        (b"", "out.bin"),
        (7, "out.json"),
        ([{"text": "t", "score": 0.5}, None], "out.json"),
        ({"waveform": np.zeros(3), "rate": 24_000}, "out.wav"),
        (torch.zeros(3), "out.wav"),
        ([b"pieces"], "out.wav"),
    ],
)
def test_by_content(result: Any, name: str) -> None:
    assert out_name(result) == name


def test_images() -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra `demo` is not installed")
    assert out_name(image.new("RGB", (2, 2))) == "out.png"
