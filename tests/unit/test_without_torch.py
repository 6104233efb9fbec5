"""What works where torch is not installed. Also the quick test of a wheel: it needs NumPy and nothing of gigabytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.child import Child, Children, environment

NO_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def pair(children: Children) -> tuple[Child, Child]:
    """A sender and a receiver without torch, each with a connector `c`."""
    made = []
    for _ in range(2):
        child = children.start()
        child.run(
            f"{NO_TORCH}\nimport numpy as np\nfrom omni_fastshm import SharedMemoryConnector\n"
            "c = SharedMemoryConnector({})"
        )
        made.append(child)
    return made[0], made[1]


def test_arrays_of_every_kind_cross_between_processes(pair: tuple[Child, Child]) -> None:
    sender, receiver = pair
    kinds = ["?", "i1", "u2", "<i8", ">i4", "f2", "f4", "f8", "c8", "c16", "M8[ns]", "m8[us]", "U5", "S7"]
    metadata = sender.run(
        "rng = np.random.default_rng(1)\n"
        "sent = {k: (rng.random(40_000) * 100).astype('i8').astype(k) for k in kinds}\n"
        "sent['record'] = np.zeros(5000, dtype=[('a', '<i4'), ('b', 'f8', (2,))])\n"
        "sent['turned'] = np.arange(60_000.0).reshape(200, 300).T\n"
        "sent['empty'], sent['point'] = np.zeros((0, 3)), np.array(5)\n"
        "result = c.put('a', 'b', 1, sent)[2]",
        kinds=kinds,
    )
    assert set(metadata) == {"shm", "size"}
    got = receiver.run(
        "got, size = c.get('a', 'b', 1, md); result = {k: v.copy() for k, v in got.items()}", md=metadata
    )
    sent = sender.run("result = sent")
    assert got.keys() == sent.keys()
    for key, value in sent.items():
        assert got[key].dtype == value.dtype, key
        assert got[key].shape == value.shape, key
        assert got[key].tobytes() == value.tobytes(), key


def test_views_are_writable_and_keep_their_bytes(pair: tuple[Child, Child]) -> None:
    sender, receiver = pair
    metadata = sender.run("result = c.put('a', 'b', 1, np.arange(100_000))[2]")
    assert receiver.run(
        "view = c.get('a', 'b', 1, md)[0]; part = view[10:20]; del view; result = part.tolist()", md=metadata
    )
    sender.run("for n in range(20): c.put('a', 'b', ('x' + str(n)), np.zeros(100_000)); c.cleanup('x' + str(n))")
    assert receiver.run("part += 1; result = part.tolist()") == list(range(11, 21))
    assert sender.run("result = c.health()['live_blocks']") == 1
    receiver.run("del part")
    assert sender.run("result = c.health()['live_blocks']") == 0


def test_small_payloads_and_other_types(pair: tuple[Child, Child]) -> None:
    sender, receiver = pair
    tree = {"t": (1, [2.5, None]), 3: {4, 5}, "b": b"x", "n": np.float32(1.5), "s": slice(1, None), "i": 1 << 90}
    metadata = sender.run("result = c.put('a', 'b', 'r', tree)[2]", tree=tree)
    assert set(metadata) == {"inline_bytes", "size"}
    got = receiver.run("result = c.get('a', 'b', 'r', md)[0]", md=metadata)
    assert got == tree
    assert type(got["n"]) is np.float32


def test_loans_are_arrays(pair: tuple[Child, Child]) -> None:
    sender, receiver = pair
    metadata = sender.run(
        "loan = c.allocate((300, 200), 'f4'); loan[:] = 7\n"
        "md = c.put('a', 'b', 1, {'x': loan})[2]; del loan; result = md"
    )
    assert receiver.run("x = c.get('a', 'b', 1, md)[0]['x']; result = (x.shape, float(x.sum()))", md=metadata) == (
        (300, 200),
        420_000.0,
    )
    receiver.run("del x")


def test_a_tensor_says_that_torch_is_missing(pair: tuple[Child, Child]) -> None:
    torch = pytest.importorskip("torch", reason="somebody has to send a tensor")
    from omni_fastshm import SharedMemoryConnector

    _, receiver = pair
    with SharedMemoryConnector({}) as here:
        metadata = here.put("a", "b", 1, torch.ones(4))[2]
        said = receiver.run(
            "from omni_fastshm import CodecError\n"
            "try: c.get('a', 'b', 1, md)\n"
            "except CodecError as error: result = str(error)",
            md=metadata,
        )
    assert "torch cannot be imported here" in said


@pytest.mark.parametrize("command", [["validate", "FILE"], ["ls", "--json"], ["reap", "--dry-run"]], ids=lambda c: c[0])
def test_the_command_line(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("stages: [{stage_id: 0}, {stage_id: 1}]\nedges: [{from: 0, to: 1}]\n")
    words = [str(file) if word == "FILE" else word for word in command]
    code = f"{NO_TORCH}\nfrom omni_fastshm.cli import main; sys.exit(main(sys.argv[1:]))"
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
