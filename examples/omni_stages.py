"""Three small but real stages of an omni-modal pipeline: text, picture and sound in, speech-like sound out.

The networks are tiny and their weights come from a fixed seed, so nothing has to be downloaded and every run
gives the same sound. What crosses the edges has the shapes of the real models:

==========  =================================================  =========================================
layout      Thinker -> Talker                                  Talker -> Code2Wav
==========  =================================================  =========================================
qwen2_5     prefill [P, 3584], output [N, 3584], two id lists  a list of codec ids, 50 a second
qwen3       the same as [T, 2048] each, three [1, 1, 2048]     int64, frames x 16 codebooks, 12.5 a second
==========  =================================================  =========================================

Run them with ``omni-fastshm run examples/qwen2_5_omni.yaml``.
"""

from __future__ import annotations

import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

OUT_RATE = 24_000
IN_RATE = 16_000
SECONDS = 2.0
TOKENS = 100
CODEBOOKS = 16
SCALE = (0, 2, 4, 7, 9)
_WIDTH = 192
_PATCH = 12
_LAYOUTS = ("qwen2_5", "qwen3")


def _check_layout(layout: str) -> str:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, not {layout!r}")
    return layout


class _Seeded:
    """One thread for torch (the stages share the machine) and weights that are the same on every run."""

    def __init__(self, seed: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._scope = torch.random.fork_rng(devices=[])
        self._scope.__enter__()
        torch.manual_seed(seed)

    def done(self) -> None:
        self._scope.__exit__(None, None, None)


class Thinker:
    """Reads text, picture and sound, and thinks of an answer: embeddings of the input, states of the output.

    Args:
        hidden_size: width of what is sent on.
        dtype: the torch dtype of what is sent on.
        layout: "qwen2_5" or "qwen3", see above.
        seed: of the weights.
    """

    def __init__(
        self, hidden_size: int = 3584, dtype: str = "bfloat16", layout: str = "qwen2_5", seed: int = 1
    ) -> None:
        import torch
        from torch import nn

        self._layout = _check_layout(layout)
        self._dtype = getattr(torch, dtype)
        self._hidden_size = hidden_size
        seeded = _Seeded(seed)
        self._text = nn.Embedding(256, _WIDTH)
        self._image = nn.Conv2d(3, _WIDTH, _PATCH, stride=_PATCH)
        # 25 frames a second, each looking at 50 ms: a learned filter bank in place of mel filters.
        self._audio = nn.Conv1d(1, _WIDTH, IN_RATE // 20, stride=IN_RATE // 25)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, batch_first=True)
        self._encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        self._step = nn.GRUCell(_WIDTH, _WIDTH)
        self._head = nn.Linear(_WIDTH, 256)
        self._project = nn.Linear(_WIDTH, hidden_size)
        seeded.done()

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request to ``embed``, ``hidden_states``, ``ids`` and ``meta``."""
        import torch

        with torch.inference_mode():
            prompt = list(request["text"].encode())
            memory = self._encode(prompt, request["image"], request["audio"])
            states, output = self._generate(memory)
            prefill, hidden = self._send_shapes(memory, states)
            sent = {
                "embed": {"prefill": prefill},
                "hidden_states": {"output": hidden},
                "ids": {"prompt": prompt, "output": output},
                "sampling_params": {"temperature": 0.9, "top_k": 40, "max_tokens": TOKENS},
                "meta": {"index": request["index"], "finished": torch.tensor(True)},
            }
            if self._layout == "qwen3":
                for name in ("tts_bos", "tts_eos", "tts_pad"):
                    sent["embed"][name] = torch.zeros(1, 1, self._hidden_size, dtype=self._dtype)
        return sent

    def _encode(self, prompt: list[int], image: Any, audio: Any) -> Any:
        import torch

        pixels = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        parts = [
            self._text(torch.tensor(prompt)),
            self._image(pixels[None]).flatten(2)[0].T,
            self._audio(torch.from_numpy(audio.copy())[None, None])[0].T,
        ]
        return self._encoder(torch.cat(parts)[None])[0]

    def _generate(self, memory: Any) -> tuple[Any, list[int]]:
        import torch

        state, states, token = memory.mean(0), [], 0
        output: list[int] = []
        for _ in range(TOKENS):
            state = self._step(self._text(torch.tensor(token)) + memory[len(output) % len(memory)], state)
            states.append(state)
            token = int(self._head(state).argmax())
            output.append(token)
        return torch.stack(states), output

    def _send_shapes(self, memory: Any, states: Any) -> tuple[Any, Any]:
        import torch

        if self._layout == "qwen2_5":
            return self._project(memory).to(self._dtype), self._project(states).to(self._dtype)
        both = self._project(torch.cat([memory, states])).to(self._dtype)
        # qwen3 sends the embeddings and the states of all positions, both of one length.
        return both, torch.roll(both, 1, dims=1)


class Talker:
    """Turns the thinker's states into codes of sound.

    Args:
        hidden_size: width of what it receives.
        layout: "qwen2_5" or "qwen3", see above.
        seed: of the weights.
    """

    def __init__(self, hidden_size: int = 3584, layout: str = "qwen2_5", seed: int = 2) -> None:
        from torch import nn

        self._layout = _check_layout(layout)
        seeded = _Seeded(seed)
        self._project = nn.Linear(hidden_size, _WIDTH)
        self._gru = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self._head = nn.Linear(_WIDTH, 1024 if self._layout == "qwen2_5" else CODEBOOKS * 256)
        seeded.done()

    def __call__(self, thought: dict[str, Any]) -> dict[str, Any]:
        """What the thinker sent to ``codes`` and ``meta``."""
        import torch

        with torch.inference_mode():
            prefill = thought["embed"]["prefill"].float()
            hidden = thought["hidden_states"]["output"][-TOKENS:].float()
            start = self._project(prefill).mean(0)[None, None]
            frames, _ = self._gru(self._project(hidden)[None], start.contiguous())
            # Sampled, not the largest: an untrained network would sing one note for ever.
            chance = torch.Generator().manual_seed(sum(thought["ids"]["output"]) + thought["meta"]["index"])
            codes = self._sample(frames[0], chance)
        return {"codes": codes, "meta": {"index": thought["meta"]["index"]}}

    def _sample(self, frames: Any, chance: Any) -> Any:
        import torch

        if self._layout == "qwen2_5":
            picked = torch.multinomial((3 * self._head(frames)).softmax(-1), 1, generator=chance)
            return picked[:, 0].tolist()
        logits = self._head(frames[::4]).reshape(-1, 256)
        return torch.multinomial((3 * logits).softmax(-1), 1, generator=chance)[:, 0]


class Code2Wav:
    """Plays the codes: a pitch on a scale for each, coloured by a small transposed convolution.

    Args:
        layout: "qwen2_5" or "qwen3", see above.
        seed: of the weights.
    """

    def __init__(self, layout: str = "qwen2_5", seed: int = 3) -> None:
        from torch import nn

        self._layout = _check_layout(layout)
        seeded = _Seeded(seed)
        self._embed = nn.Embedding(1024, 32)
        self._colour = nn.Sequential(
            nn.ConvTranspose1d(32, 24, 8, stride=4), nn.GELU(), nn.ConvTranspose1d(24, 8, 8, stride=4)
        )
        seeded.done()

    def __call__(self, spoken: dict[str, Any]) -> dict[str, Any]:
        """The talker's codes to ``waveform`` (float32, -1 to 1) at ``sample_rate``."""
        import torch

        with torch.inference_mode():
            codes = torch.as_tensor(spoken["codes"])
            if self._layout == "qwen3":
                codes = codes.reshape(-1, CODEBOOKS)[:, :4].reshape(-1)
            wave_out = self._play(codes)
        return {"waveform": wave_out.numpy(), "sample_rate": OUT_RATE, "meta": spoken["meta"]}

    def _play(self, codes: Any) -> Any:
        import torch
        from torch.nn.functional import interpolate

        count = int(OUT_RATE * SECONDS)
        steps = (codes // 4) % (2 * len(SCALE))
        octave, degree = steps // len(SCALE), steps % len(SCALE)
        pitch = 196.0 * 2.0 ** (octave + torch.tensor(SCALE)[degree] / 12)
        # A note lasts ten codes; the glide between two keeps it from clicking.
        notes = pitch[::10].repeat_interleave(40)[None, None]
        track = interpolate(notes, size=count // 100, mode="linear")
        track = torch.nn.functional.avg_pool1d(track, 5, 1, 2, count_include_pad=False)
        phase = torch.cumsum(interpolate(track, size=count, mode="linear")[0, 0] / OUT_RATE, 0) * 2 * torch.pi
        colour = self._colour(self._embed(codes % 1024).T[None])
        weights = torch.sigmoid(interpolate(colour, size=count, mode="linear")[0] * 4)
        harmonics = torch.arange(1, 9)[:, None]
        sound = (torch.sin(harmonics * phase) * weights / harmonics).sum(0)
        time = torch.arange(count) / OUT_RATE
        sound = sound * torch.clamp(torch.minimum(time, SECONDS - time) / 0.05, 0, 1)
        return 0.8 * sound / sound.abs().max().clamp(min=1e-6)


def _find(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"there is no {pattern} in {folder}; examples/inputs/make_inputs.py makes one")
    return found[0]


def _read_wav(path: Path) -> Any:
    import numpy as np

    with wave.open(str(path), "rb") as sound:
        if sound.getsampwidth() != 2:
            raise ValueError(f"{path} has {8 * sound.getsampwidth()}-bit samples; 16-bit PCM is needed")
        data = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768
        mono = data.reshape(-1, sound.getnchannels()).mean(1)
        rate = sound.getframerate()
    if rate != IN_RATE:
        places = np.arange(0, len(mono), rate / IN_RATE)
        mono = np.interp(places, np.arange(len(mono)), mono).astype(np.float32)
    # The filter bank looks at 50 ms at a time: something shorter has to be filled up with silence.
    return np.pad(mono, (0, max(0, IN_RATE // 20 - len(mono))))


def _read_image(path: Path) -> Any:
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading the picture needs Pillow: pip install 'omni-fastshm[demo]'") from error
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB").resize((16 * _PATCH, 16 * _PATCH)))


def load_requests(inputs: Path, count: int) -> Iterator[dict[str, Any]]:
    """The requests of the main job: the text, the picture and the sound of a folder, each time a bit
    different.

    Args:
        inputs: a folder with one ``*.txt``, one ``*.png`` and one ``*.wav`` (16-bit PCM).
        count: how many requests.

    Yields:
        ``text`` (str), ``image`` (uint8 [192, 192, 3]), ``audio`` (float32 at 16 kHz), ``index``.
    """
    import numpy as np

    text = _find(inputs, "*.txt").read_text(encoding="utf-8")
    image = _read_image(_find(inputs, "*.png"))
    audio = _read_wav(_find(inputs, "*.wav"))
    for index in range(count):
        yield {
            "index": index,
            "text": f"{text.strip()} ({index + 1} of {count})",
            "image": np.roll(image, 8 * index, axis=1),
            "audio": np.roll(audio, 160 * index),
        }


def write_wav(results: Iterable[dict[str, Any]], out: Path) -> str:
    """Write all waveforms, one after another, as 16-bit mono PCM.

    Args:
        results: what `Code2Wav` returned.
        out: the file.

    Returns:
        One line about what was written.
    """
    import numpy as np

    gap = np.zeros(OUT_RATE // 5, dtype=np.float32)
    parts = [part for result in results for part in (result["waveform"], gap)]
    sound = np.concatenate(parts) if parts else gap
    with wave.open(str(out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(OUT_RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return f"{out}: {len(sound) / OUT_RATE:.1f} s of sound at {OUT_RATE // 1000} kHz"
