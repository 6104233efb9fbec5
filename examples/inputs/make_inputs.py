"""Makes the three input files of the main job: a text, a picture and a sound. The same bytes on every run.

Run it as ``python examples/inputs/make_inputs.py [FOLDER]``; without a folder the files go beside this
script. Only the standard library is used, so that the files do not change with a release of an image library.
"""

from __future__ import annotations

import math
import struct
import sys
import wave
import zlib
from pathlib import Path

TEXT = """\
Describe the picture and the sound in two sentences, then say them aloud.
The picture shows a warm sky over a dark hill; the sound is one sung vowel that rises and falls.
"""
SIDE = 192
RATE = 16_000
SECONDS = 2.0


def pixel(x: int, y: int) -> tuple[int, int, int]:
    """One pixel of the picture: a sun in a graded sky above a hill; x and y from 0 to 1 over `SIDE`."""
    u, v = x / (SIDE - 1), y / (SIDE - 1)
    if v > 0.72 - 0.12 * math.sin(math.pi * u):
        return 24, int(40 + 40 * (1 - v)), 32
    if (u - 0.68) ** 2 + (v - 0.3) ** 2 < 0.015:
        return 255, 224, 128
    return int(120 + 120 * v), int(110 + 60 * v), int(200 - 110 * v)


def png_bytes() -> bytes:
    """The picture as an 8-bit RGB PNG."""
    rows = b"".join(b"\x00" + bytes(c for x in range(SIDE) for c in pixel(x, y)) for y in range(SIDE))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    body = zlib.compress(rows, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def samples() -> bytes:
    """A sung vowel: twelve harmonics of a pitch that rises and falls, 16-bit mono."""
    count, phase, out = int(RATE * SECONDS), 0.0, []
    for i in range(count):
        t = i / RATE
        phase += 2 * math.pi * (180 + 60 * math.sin(math.pi * t / SECONDS)) / RATE
        # Two broad formants shape the harmonics, so that it sounds like a voice and not like a buzzer.
        tone = sum(
            math.sin(k * phase) / k * (1 + 2 * math.exp(-((k - 4) ** 2) / 3) + math.exp(-((k - 7) ** 2) / 3))
            for k in range(1, 13)
        )
        envelope = min(1.0, t / 0.1, (SECONDS - t) / 0.2)
        out.append(int(5200 * envelope * tone))
    return struct.pack(f"<{count}h", *out)


def main(folder: Path) -> None:
    """Write `prompt.txt`, `picture.png` and `sound.wav` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompt.txt").write_text(TEXT, encoding="utf-8")
    (folder / "picture.png").write_bytes(png_bytes())
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(samples())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
