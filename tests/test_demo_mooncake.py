"""The main job across nodes: `omni-fastshm mooncake up`, and pipelines that run with it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
import wave
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.child import environment
from support.mooncake_master import free_port, require_mooncake

require_mooncake()

EXAMPLES = Path(__file__).parents[1] / "examples"
CLI = [sys.executable, "-m", "omni_fastshm.cli"]
UP = [*CLI, "mooncake", "up"]


def run(*command: Any, folder: Path, timeout: float = 150, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.time_limit(360)
@pytest.mark.parametrize(
    ("name", "backends"),
    [
        # CI runs both in full with `make demo-mooncake`; most of the time goes into starting processes.
        pytest.param("qwen2_5_omni_mooncake", ("Mooncake", "Mooncake"), marks=pytest.mark.slow),
        ("qwen2_5_omni_mixed", ("SharedMemory", "Mooncake")),
    ],
)
def test_a_pipeline_over_the_store_plays_its_sound(name: str, backends: tuple[str, str], tmp_path: Path) -> None:
    job = [*CLI, "run", EXAMPLES / f"{name}.yaml", "--requests", 3]
    done = run(*UP, "--", *job, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "3 of 3 requests" in done.stderr
    rows = {
        line[0]: line
        for text in done.stdout.splitlines()
        if " -> " in text and len(line := re.split(r"\s{2,}", text.strip())) > 4
    }
    for edge, backend in zip(("0 -> 1", "1 -> 2"), backends, strict=True):
        assert rows[edge][1:3] == [backend, "3"]
        assert rows[edge][4] == ("ring" if backend == "SharedMemory" else "store")
    with wave.open(str(tmp_path / "out.wav")) as sound:
        assert sound.getnframes() / sound.getframerate() > 6


class Up:
    """``mooncake up`` as a user starts it, read line by line."""

    def __init__(self, *options: Any, folder: Path) -> None:
        self.process = subprocess.Popen(
            list(map(str, [*UP, *options])),
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        deadline = time.monotonic() + 100
        text = b""
        while b"Ctrl-C" not in text and time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                piece = os.read(self.process.stdout.fileno(), 4096)
                if not piece:
                    break
                text += piece
        self.text = text.decode()

    def healthy(self) -> bool:
        found = re.search(r"# metrics: (http://\S+?)/metrics", self.text)
        assert found, self.text
        try:
            with urllib.request.urlopen(f"{found[1]}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=150)
        return self.process.returncode, errors.decode()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_it_runs_until_it_is_stopped_and_takes_the_master_along(how: int, tmp_path: Path) -> None:
    up = Up(folder=tmp_path)
    assert up.healthy()

    up.process.send_signal(how)

    code, errors = up.end()
    assert (code, errors) == ((-how if how == signal.SIGKILL else 0), "")
    deadline = time.monotonic() + 60
    while up.healthy():
        assert time.monotonic() < deadline, "the master outlives the command"


def test_its_yaml_is_a_pipeline_file_that_works(tmp_path: Path, children: Any) -> None:
    port = free_port()
    up = Up("--port", port, folder=tmp_path)
    try:
        extra = yaml.safe_load(up.text)["connectors"]["between_nodes"]["extra"]
        assert extra["master"] == f"127.0.0.1:{port}"
        child = children.start()
        right = child.run(
            "import numpy as np\n"
            "from omni_fastshm.factory import *\n"
            "c = OmniConnectorFactory.create_connector(ConnectorSpec('MooncakeStoreConnector', extra))\n"
            "metadata = c.put('0', '1', 'r', np.arange(50_000))[2]\n"
            "result = bool((c.get('0', '1', 'r', metadata)[0] == np.arange(50_000)).all())",
            extra=extra,
        )
        assert right
        child.kill()
    finally:
        up.process.send_signal(signal.SIGINT)
        assert up.end() == (0, "")


def test_what_does_not_fit_into_memory_goes_to_the_ssd(tmp_path: Path, children: Any) -> None:
    up = Up("--ssd", tmp_path / "ssd", folder=tmp_path)
    try:
        extra = yaml.safe_load(up.text)["connectors"]["between_nodes"]["extra"]
        child = children.start()
        right, errors = child.run(
            "import numpy as np\n"
            "from omni_fastshm.connectors.mooncake import MooncakeConnector\n"
            "c = MooncakeConnector({**extra, 'segment': '32MB'})\n"
            "sent = [c.put('0', '1', n, np.full(4 << 20, n, np.uint8))[2] for n in range(20)]\n"
            "result = [bool((c.get('0', '1', n, m)[0] == n).all()) for n, m in enumerate(sent)], c.health()['errors']",
            extra=extra,
        )
        assert right == [True] * 20
        assert errors == 0
        child.kill()
        assert any((tmp_path / "ssd").rglob("*"))
    finally:
        up.process.send_signal(signal.SIGINT)
        assert up.end() == (0, "")


def test_with_a_command_its_status_counts(tmp_path: Path) -> None:
    code = "import os, sys; print('master at', os.environ['MOONCAKE_MASTER']); sys.exit(7)"
    done = run(*UP, "--", sys.executable, "-c", code, folder=tmp_path)
    assert done.returncode == 7
    assert re.search(r"master at 127\.0\.0\.1:\d+", done.stdout)
    done = run(*UP, "--", "no-such-command", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "omni-fastshm: mooncake up: cannot run 'no-such-command': No such file or directory\n"


def test_what_cannot_be_listened_on(tmp_path: Path) -> None:
    done = run(*UP, "--host", "192.0.2.1", folder=tmp_path)
    assert done.returncode == 1
    assert "cannot listen on '192.0.2.1'" in done.stderr
    done = run(*UP, "--port", "65536", folder=tmp_path)
    assert done.returncode == 2
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, other in (("--http-port", "--port"), ("--port", "--http-port")):
            done = run(*UP, option, port, other, free_port(), "--", "true", folder=tmp_path)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"port {port} of 127.0.0.1 is in use" in done.stderr
