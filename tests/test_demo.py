"""The main job, as a user runs it: a configuration in, a sound and a table out, and clear words when it cannot."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.child import environment

from omni_fastshm.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"
STAGES = Path(__file__).parent / "process" / "pipeline_stages.py"
COMMAND = [sys.executable, "-m", "omni_fastshm.cli", "run"]


def run(*arguments: Any, folder: Path, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def rows(text: str) -> dict[str, list[str]]:
    """The table's rows by edge."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if " -> " in line]
    return {line[0]: line[1:] for line in lines}


def columns(text: str) -> list[str]:
    head = next(line for line in text.splitlines() if line.startswith("edge "))
    return re.split(r"\s{2,}", head.strip())


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.time_limit(360)
@pytest.mark.parametrize(("name", "count", "large"), [("qwen2_5_omni", 8, 4_100_000), ("qwen3_omni", 3, 4_700_000)])
def test_the_main_job_plays_a_sound_and_times_every_edge(name: str, count: int, large: int, tmp_path: Path) -> None:
    options = [] if count == 8 else ["--requests", count]
    done = run(EXAMPLES / f"{name}.yaml", *options, "--json", "figures.json", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert f"{count} of {count} requests" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    with wave.open(str(tmp_path / "out.wav")) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(float)
    assert len(samples) / 24_000 > 2 * count
    assert np.abs(samples).max() > 20_000
    # Every request sounds, and no two of them the same.
    parts = [samples[start : start + 48_000] for start in range(0, len(samples), 48_000 + 4_800)]
    assert len(parts) == count
    assert all(part.std() > 1000 for part in parts)
    assert len({part.tobytes() for part in parts}) == count

    edges = rows(done.stdout)
    assert list(edges) == ["caller -> 0", "0 -> 1", "1 -> 2", "2 -> caller"]
    for backend, payloads, size, way, *times, rate in edges.values():
        assert backend == "SharedMemory"
        assert int(payloads) == count
        assert way == ("inline" if number(size) < 65536 else "ring")
        assert len(times) == 6
        assert all(number(text) > 0 for text in times)
        assert number(rate) >= 0
    assert number(edges["0 -> 1"][2]) > large
    assert number(edges["1 -> 2"][2]) < 65536

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["requests"] == {"submitted": count, "completed": count, "failed": 0, "in_flight": 0}
    assert [edge["payloads"] for edge in figures["edges"]] == [count] * 4


@pytest.mark.time_limit(360)
def test_the_same_input_gives_the_same_sound(tmp_path: Path) -> None:
    for out in ("one.wav", "two.wav"):
        done = run(EXAMPLES / "qwen2_5_omni.yaml", "--requests", 2, "--out", out, folder=tmp_path)
        assert done.returncode == 0, done.stderr

    assert (tmp_path / "one.wav").read_bytes() == (tmp_path / "two.wav").read_bytes()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A pipeline of a user's own: numbers from a file, two stages, numbers into a file."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "start.txt").write_text("10")
    write_config(tmp_path, "add_one")
    return tmp_path


def write_config(folder: Path, first: str, run_section: str | None = None) -> None:
    section = (
        f"run: {{load: '{STAGES}:load_numbers', write: '{STAGES}:write_numbers', inputs: in, requests: 4}}"
        if run_section is None
        else run_section
    )
    (folder / "job.yaml").write_text(
        "stages:\n"
        f"  - {{stage_id: 0, name: first, fn: '{STAGES}:{first}'}}\n"
        f"  - {{stage_id: 1, fn: '{STAGES}:double'}}\n"
        "edges: [{from: 0, to: 1}]\n"
        f"{section}\n"
    )


def test_a_pipeline_of_ones_own_follows_the_same_convention(job: Path) -> None:
    done = run("job.yaml", "--out", "numbers.txt", folder=job)

    assert done.returncode == 0, done.stderr
    assert (job / "numbers.txt").read_text() == "22 24 26 28"
    assert "4 numbers in numbers.txt" in done.stdout
    assert list(rows(done.stdout)) == ["caller -> 0", "0 -> 1", "1 -> caller"]
    names = columns(done.stdout)
    assert len(names) == len(set(names)) == 12
    assert "bytes: median size. put, get: median time in µs" in done.stdout


def test_medians_tails_and_first_times_are_shown(job: Path) -> None:
    done = run("job.yaml", "--requests", 20, "--out", "n.txt", folder=job)

    assert done.returncode == 0, done.stderr
    for _, _, _, _, *times, _ in rows(done.stdout).values():
        assert all(number(text) > 0 for text in times)


def test_the_command_line_overrides_the_file(job: Path) -> None:
    other = job / "other"
    other.mkdir()
    (other / "start.txt").write_text("0")

    done = run("job.yaml", "--requests", 2, "--inputs", other, "--out", "n.txt", folder=job)

    assert done.returncode == 0, done.stderr
    assert (job / "n.txt").read_text() == "2 4"


def test_without_a_writer_only_the_table_is_shown(job: Path) -> None:
    write_config(job, "add_one", f"run: {{load: '{STAGES}:load_numbers', inputs: in}}")

    done = run("job.yaml", "--requests", 5, folder=job)

    assert done.returncode == 0, done.stderr
    assert "5 requests in" in done.stdout
    assert not (job / "out.wav").exists()


@pytest.mark.parametrize(
    ("section", "options", "words"),
    [
        ("", [], "no `run` section"),
        ("run: {inputs: in}", [], "run.load is missing"),
        ("run: {load: 'nowhere.py:x'}", [], "no file"),
        (f"run: {{load: '{STAGES}:load_nothing'}}", [], "load_nothing"),
        (f"run: {{load: '{STAGES}:load_numbers', inputs: elsewhere}}", [], "no folder"),
        (f"run: {{load: '{STAGES}:load_numbers', input: in}}", [], "did you mean 'inputs'"),
        (f"run: {{load: '{STAGES}:load_numbers', inputs: in, requests: 0}}", [], "requests"),
        (f"run: {{load: '{STAGES}:load_numbers', inputs: in}}", ["--out", "x"], "--out"),
        (None, ["--out", "no/such/folder/x"], "no folder"),
        (None, ["--json", "no/such/folder/x"], "no folder"),
        (None, ["--out", "in"], "--out: in is a folder; name a file in it"),
        (None, ["--json", "in"], "--json: in is a folder; name a file in it"),
        (None, ["--inputs", "elsewhere"], "no folder"),
        (f"run: {{load: '{STAGES}:asynchronous'}}", [], "asynchronous is async"),
        ("run: {load: 'broken.py:x'}", [], "run.load (broken.py:x) cannot be loaded: ZeroDivisionError: in broken"),
        (f"run: {{load: '{STAGES}:load_none'}}", [], f"run.load ({STAGES}:load_none) made no request"),
        (f"run: {{load: '{STAGES}:load_badly'}}", [], f"run.load ({STAGES}:load_badly): KeyError: 'loader broken'"),
        (f"run: {{load: '{STAGES}:load_numbers', requests: many}}", [], "job.yaml:5: run.requests: 'many'"),
    ],
)
def test_a_wrong_job_is_one_clear_message(section: str | None, options: list[str], words: str, job: Path) -> None:
    write_config(job, "add_one", section)
    (job / "broken.py").write_text("x = None\nraise ZeroDivisionError('in broken')\n")

    done = run("job.yaml", *options, folder=job)

    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.startswith("omni-fastshm run: ")
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("content", [None, "stages: [", "stages: [{stage_id: 0, fn: nowhere}]\nrun: {load: x}"])
def test_a_file_that_cannot_be_used_is_one_clear_message(content: str | None, job: Path) -> None:
    if content is None:
        (job / "job.yaml").unlink()
    else:
        (job / "job.yaml").write_text(content)

    done = run("job.yaml", folder=job)

    assert done.returncode == 1
    assert "job.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_input_is_found_before_anything_starts(job: Path) -> None:
    (job / "in" / "start.txt").unlink()

    done = run("job.yaml", folder=job)

    assert done.returncode == 1
    assert "start.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failing_stage_is_one_message_and_verbose_shows_the_traceback(job: Path) -> None:
    write_config(job, "fail_on_five")
    (job / "in" / "start.txt").write_text("4")

    short = run("job.yaml", folder=job)
    long = run("job.yaml", "--verbose", folder=job)

    assert short.returncode == long.returncode == 1
    assert "stage 0 (first) failed on request '1': ValueError: five is right out" in short.stderr
    assert "Traceback" not in short.stderr
    assert "in fail_on_five" in long.stderr


def run_with(job: Path, load: str, write: str, *options: str) -> subprocess.CompletedProcess[str]:
    write_config(job, "fail_on_five", f"run: {{load: '{STAGES}:{load}', write: '{STAGES}:{write}', inputs: in}}")
    return run("job.yaml", "--requests", 3, "--out", "n.txt", *options, folder=job)


def test_an_error_in_write_names_it(job: Path) -> None:
    done = run_with(job, "load_numbers", "write_badly")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"omni-fastshm run: run.write ({STAGES}:write_badly): KeyError: 'writer broken' (--verbose for the traceback)"
    )
    assert "Traceback" not in done.stderr


def test_verbose_shows_each_traceback_once(job: Path) -> None:
    write = run_with(job, "load_numbers", "write_badly", "--verbose")
    assert write.stderr.count("in write_badly") == 1
    assert write.stderr.splitlines()[-1] == (
        f"omni-fastshm run: run.write ({STAGES}:write_badly): KeyError: 'writer broken'"
    )
    (job / "in" / "start.txt").write_text("4")
    stage = run_with(job, "load_numbers", "write_numbers", "--verbose")
    assert stage.stderr.count("in fail_on_five") == 1
    assert "omni-fastshm run: stage 0 (first) failed on request '1'" in stage.stderr
    assert stage.stderr.splitlines()[-1] == "omni-fastshm run: 1 of 3 requests failed"


def test_a_failed_request_is_not_blamed_on_write(job: Path) -> None:
    (job / "in" / "start.txt").write_text("4")
    for write in ("write_numbers", "write_renaming_errors", "write_swallowing_errors"):
        done = run_with(job, "load_numbers", write)
        assert done.returncode == 1
        assert "run: stage 0 (first) failed on request '1': ValueError: five is right out" in done.stderr


def test_a_failed_request_leaves_the_others(job: Path) -> None:
    (job / "in" / "start.txt").write_text("4")
    done = run_with(job, "load_numbers", "write_numbers")
    assert done.returncode == 1
    assert (job / "n.txt").read_text() == "8 12"
    assert "3 requests, 1 of them failed in " in done.stdout
    assert "2 numbers in n.txt" in done.stdout
    assert done.stderr.splitlines()[-1] == ("omni-fastshm run: 1 of 3 requests failed (--verbose for the tracebacks)")


def test_where_all_fail_nothing_is_written(job: Path) -> None:
    (job / "in" / "start.txt").write_text("4")
    section = f"run: {{load: '{STAGES}:load_numbers', write: '{STAGES}:write_badly', inputs: in}}"
    write_config(job, "fail_always", section)
    done = run("job.yaml", "--requests", 30, folder=job)
    assert done.returncode == 1
    assert done.stderr.count("failed on request") == 20
    assert "30 of 30 requests failed, of which the first 20 are told" in done.stderr
    assert "writer broken" not in done.stderr


def test_the_default_file_is_called_after_what_is_in_it(job: Path) -> None:
    done = run("job.yaml", folder=job)
    assert done.returncode == 0, done.stderr
    assert (job / "out.json").read_text() == "22 24 26 28"


def test_an_error_in_the_middle_of_load_names_it(job: Path) -> None:
    done = run_with(job, "load_one_and_fail", "write_numbers")
    assert done.returncode == 1
    assert f"run: run.load ({STAGES}:load_one_and_fail): KeyError: 'loader broken'" in done.stderr


def test_a_request_that_cannot_be_carried_is_named(job: Path) -> None:
    done = run_with(job, "load_uncarriable", "write_numbers")
    assert done.returncode == 1
    assert "run: request '1': payload.deep[0]: object cannot be carried" in done.stderr


def test_inputs_that_nobody_names_need_not_be_there(job: Path) -> None:
    write_config(job, "add_one", f"run: {{load: '{STAGES}:load_from_nothing'}}")
    assert not (job / "inputs").exists()

    done = run("job.yaml", "--requests", 2, folder=job)

    assert done.returncode == 0, done.stderr
    assert "2 requests in" in done.stdout


@pytest.mark.parametrize("command", ["run", "validate"])
def test_help_has_an_example_and_says_where_to_read_on(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"example:\n  omni-fastshm {command} examples/qwen2_5_omni.yaml" in shown
    assert "docs/pipeline.md" in shown
    assert re.search(r"^  CONFIG  +the pipeline's YAML or JSON file$", shown, re.MULTILINE)
    assert ("--verbose" in shown) == (command == "run")


def test_a_wrong_number_of_requests_is_a_wrong_command_line(job: Path) -> None:
    for text in ("0", "-1", "many"):
        done = run("job.yaml", "--requests", text, folder=job)
        assert done.returncode == 2
        assert "--requests" in done.stderr


def test_ctrl_c_stops_everything_without_a_traceback(job: Path) -> None:
    gate = job / "gate"
    os.mkfifo(gate)
    os.mkfifo(f"{gate}.go")
    (job / "job.yaml").write_text(
        f"stages: [{{stage_id: 0, fn: '{STAGES}:Gate', fn_args: {{path: '{gate}'}}}}]\n"
        f"run: {{load: '{STAGES}:load_numbers', inputs: in}}\n"
    )
    process = subprocess.Popen(
        [*COMMAND, "job.yaml"],
        cwd=job,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with open(gate) as told:
        told.readline()

    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=150)

    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not [name for name in os.listdir("/dev/shm") if f".run-{process.pid}-" in name]


def test_on_a_terminal_there_is_a_progress_bar(job: Path) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "job.yaml", "--out", "n.txt"],
        cwd=job,
        env={**environment(), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = _read_until_closed(ours)
        assert process.wait(150) == 0
        assert process.stdout is not None
        table = process.stdout.read().decode()

    assert "4/4" in shown
    assert "of 4 requests" not in shown
    assert "0 -> 1" in table
    assert "\x1b" not in table, "the table must stay plain text when it goes to a file"


def _read_until_closed(terminal: int) -> str:
    shown = bytearray()
    deadline = time.monotonic() + 100
    try:
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(terminal, 65536)
            if not piece:
                break
            shown += piece
    except OSError:
        # The terminal's way of saying that its last writer is gone.
        pass
    finally:
        os.close(terminal)
    return shown.decode(errors="replace")
