"""``omni-fastshm validate`` and the command line around it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_fastshm.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
Write = Callable[[str], str]

GOOD = """
connectors:
  ref:
    name: InProcessConnector
    extra: {max_bytes: 1000, put_timeout_s: null}
stages:
  - stage_id: 0
    engine_args: {model_stage: thinker}
  - {stage_id: 1, name: talker, input_connectors: {from_stage_0: ref}}
  - {stage_id: 2, engine_input_source: [1]}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def build(text: str) -> str:
        path = tmp_path / "p.yaml"
        path.write_text(text)
        return str(path)

    return build


def validate(path: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = main(["validate", path])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out.splitlines()


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omni_fastshm", *arguments], capture_output=True, text=True, timeout=150, **more
    )


def test_the_edges_as_a_table(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD)
    status, lines = validate(path, capsys)
    assert status == 0
    assert lines == [
        f"{path}: 3 stages, 2 edges",
        "",
        "FROM         TO          CONNECTOR              DEFINED AT                                        SETTINGS",
        "0 (thinker)  1 (talker)  InProcessConnector     p.yaml:9 stages[1].input_connectors.from_stage_0  "
        "max_bytes=1000",
        "1 (talker)   2           SharedMemoryConnector  p.yaml:10 stages[2].engine_input_source[0]        "
        "shm_threshold_bytes=65536",
        "",
        "edges ok; functions not checked",
    ]


def test_every_problem_is_named(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD + "  - {stage_id: 2}\n  - {stage_id: 3, input_connectors: {from_stage_0: reff}}\n")
    status, lines = validate(path, capsys)
    assert status == 1
    problems = [line for line in lines if line.startswith("problem: ")]
    assert len(problems) == 2
    assert f"problem: {path}:11: stages[3].stage_id: the stage '2' exists already" in problems[0]
    assert "did you mean 'ref'?" in problems[1]
    assert lines[-1] == "2 problems"
    # An edge whose connector was refused is shown as such, not with a default that it will never get.
    assert any(line.startswith("0 (thinker)  3           ?") for line in lines)


@pytest.mark.usefixtures("without_mooncake")
def test_warnings_do_not_fail(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD.replace("stages:", "  spare: {name: MooncakeConnector}\nstages:"))
    status, lines = validate(path, capsys)
    assert status == 0
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "the package 'mooncake', which is not installed" in warnings[0]
    assert "no edge uses the connector 'spare'" in warnings[1]
    assert lines[-1] == "edges ok, with 2 warnings; functions not checked"


def test_strict_makes_warnings_problems(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD.replace("stages:", "  spare: {name: InProcessConnector}\nstages:"))
    assert main(["validate", "--strict", path]) == 1
    out = capsys.readouterr().out
    assert f"problem: {path}:6: connectors.spare: no edge uses the connector 'spare'" in out
    assert "warning: " not in out
    assert main(["validate", "--strict", write(GOOD)]) == 0


SHARED = "stages: [{stage_id: 0}, {stage_id: 1, input_connectors: {from_stage_0: {name: %s, extra: {%s}}}}]\n"


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("SharedMemoryConnector", "max_bytes: 8192", "every one of 65536 bytes and more is refused"),
        ("SharedMemoryConnector", "max_bytes: 8192, fallback: inline", "bytes and more travels inside the metadata"),
        ("MooncakeConnector", "max_bytes: 8192", "every one of 65536 bytes and more is refused"),
        (
            "SharedMemoryConnector",
            "max_bytes: 100000, segment_bytes: 100001",
            "segment_bytes 100001 is more than max_bytes: segments are 100000 bytes at most",
        ),
    ],
)
def test_sizes_that_work_but_not_as_meant(
    write: Write, capsys: pytest.CaptureFixture[str], name: str, extra: str, said: str
) -> None:
    status, lines = validate(write(SHARED % (name, extra)), capsys)
    assert status == 0
    (warning,) = [line for line in lines if line.startswith("warning: ") and "not installed" not in line]
    assert said in warning


@pytest.mark.parametrize(
    "extra",
    [
        "max_bytes: 65536",
        "max_bytes: 100000",  # the default of segment_bytes is larger, and nobody asked for it
        "max_bytes: 8192, shm_threshold_bytes: 8192",
        "max_bytes: 8192, key_lookup: true, namespace: n",  # nothing is inline there
        "segment_bytes: 100000",
    ],
)
def test_sizes_that_fit(write: Write, capsys: pytest.CaptureFixture[str], extra: str) -> None:
    assert (
        validate(write(SHARED % ("SharedMemoryConnector", extra)), capsys)[1][-1] == "edges ok; functions not checked"
    )


def test_stages_without_an_edge(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = validate(write("stages: [{stage_id: 0}, {stage_id: 1}]"), capsys)
    assert status == 0
    assert any("no edge leads to or from stage '0', stage '1'" in line for line in lines)
    assert lines[-1] == "stages ok, with 1 warning; functions not checked"


@pytest.mark.parametrize("example", sorted((EXAMPLES / "vllm_omni").glob("*/*.yaml")), ids=lambda path: str(path)[-30:])
def test_files_for_vllm_omni(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = validate(str(example), capsys)
    assert status == 0
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == (example.parent.name == "after")
    assert all("omni-fastshm doctor --vllm-omni" in note for note in notes)


def test_settings_that_vllm_omni_passes_over(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(SHARED % ("FastSharedMemoryConnector", "segmnt_bytes: 5, stage_id: 3, unread_ttl_s: 60"))
    status, lines = validate(path, capsys)
    assert status == 0
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert "did you mean 'segment_bytes'?" in warning
    assert " unread_ttl_s," in warning, "the list of what there is has all of it"
    status, lines = validate(write(SHARED % ("FastSharedMemoryConnector", "unread_ttl: 5")), capsys)
    assert [line for line in lines if "did you mean 'unread_ttl_s'?" in line]
    status, lines = validate(write(SHARED % ("FastSharedMemoryConnector", "unread_ttl_s: soon")), capsys)
    assert status == 1
    status, lines = validate(write(SHARED % ("SharedMemoryConnector", "unread_ttl_s: 5")), capsys)
    assert status == 1, "that there is only there"
    status, lines = validate(write(SHARED % ("FastMooncakeConnector", "segment: x")), capsys)
    assert status == 1
    assert any("extra.segment: 'x' (str) is not a number" in line for line in lines)


# What `run` would refuse

STAGES = """
import os
def load(inputs, count): return []
def stage(value): return value
"""
RUNNABLE = """
stages:
  - {stage_id: 0, fn: "stages.py:stage"}
  - {stage_id: 1, fn: "stages.py:stage", fn_args: {}}
edges: [{from: 0, to: 1}]
run: {load: "stages.py:load", write: "os.path:join"}
"""


def problems(path: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    status, lines = validate(path, capsys)
    found = [line.removeprefix(f"problem: {path}:") for line in lines if line.startswith("problem: ")]
    assert status == bool(found)
    assert lines[-1] == {0: "ok", 1: "1 problem"}.get(len(found), f"{len(found)} problems")
    return found


def test_a_file_that_run_takes_is_ok(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The check must not run the file: it would end the tests.
    (tmp_path / "stages.py").write_text(STAGES + "os._exit(1)\n")
    assert problems(write(RUNNABLE), capsys) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "run: {load:",
            "run: {laod:",
            ["6: run.laod: there is no such setting; did you mean 'load'?", "6: run.load is"],
        ),
        ("stages.py:load", "nowhere.py:load", ["6: run.load: there is no file"]),
        ("stages.py:load", "stages.py:lod", ["6: run.load: ", "does not define 'lod'; did you mean 'load'?"]),
        ("os.path:join", "no_such_module.here:x", ["6: run.write: there is no module 'no_such_module.here'"]),
        ("os.path:join", "json.nothing:x", ["6: run.write: there is no module 'json.nothing'"]),
        ('write: "os.path:join"', "requests: 0", ["6: run.requests: 0 (int) is too small"]),
        ("run: {", "run: 5 # {", ["6: run: must be a mapping, not 5 (int); write it as in run: {load: "]),
        ("fn_args: {}", "fn_args: [1]", ["4: stages[1].fn_args: stage 1: fn_args must be a mapping"]),
        (', fn: "stages.py:stage", fn_args', ", fn_args", ["4: stages[1]: stage 1: it has no function"]),
        ('0, fn: "stages.py:stage"', '0, fn: "stages.py:stag"', ["3: stages[0].fn: stage 0: ", "define 'stag'"]),
        ('0, fn: "stages.py:stage"', '0, fn: "none.py:x"', ["3: stages[0].fn: there is no file"]),
        ("to: 1}]", "to: 1}, {from: 1, to: 0}]", ["the edges form a circle: "]),
        ("edges:", "egdes: []\nedge:", ["edge: is not a key of ours; did you mean 'edges'?"]),
    ],
)
def test_a_file_that_run_refuses(
    old: str, new: str, found: list[str], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    assert old in RUNNABLE
    shown = problems(write(RUNNABLE.replace(old, new, 1)), capsys)
    for words in found:
        assert any(words in line for line in shown), shown
    assert len(shown) <= len(found)


def test_a_file_of_a_job_alone_has_no_stages(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    status, lines = validate(write('run: {load: "stages.py:load"}\n'), capsys)
    assert (status, lines[-1]) == (1, "1 problem")
    assert "has no stages" in lines[-2]


def test_a_circle_of_edges_alone_is_a_warning(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = validate(write("edges: [{from: 0, to: 1}, {from: 1, to: 0}]"), capsys)
    assert status == 0
    assert any("the edges form a circle, which `run` refuses: " in line for line in lines)


def test_a_section_under_nearly_the_right_name(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = validate(write("stage: [{stage_id: 0}]"), capsys)
    assert status == 1
    assert "did you mean 'stages'?" in lines[-2]


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none.yaml")
    status, lines = validate(path, capsys)
    assert status == 1
    assert lines == [
        f"{path}: 0 stages, 0 edges",
        f"problem: {path}: cannot be read: No such file or directory",
        "1 problem",
    ]


def test_an_empty_file(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("# nothing\n")
    assert validate(path, capsys) == (
        0,
        [f"{path}: 0 stages, 0 edges", "nothing is configured: no edge, no connector", "ok"],
    )


def test_nothing_in_a_file_can_move_the_cursor(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write('stages: [{stage_id: "a\\e[2J\\n"}, {stage_id: b, engine_input_source: ["a\\e[2J\\n", "\\r"]}]')
    assert main(["validate", path]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\r" not in out
    assert "a\\x1b[2J\\n" in out


def test_long_settings_are_cut(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD.replace("max_bytes: 1000", "extra_ignored: [" + "x" * 500 + "]"))
    _, lines = validate(path, capsys)
    assert max(len(line) for line in lines) < 200


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni", "three_kinds_of_edges"])
def test_the_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = validate(str(EXAMPLES / f"{name}.yaml"), capsys)
    assert status == 0
    assert lines[-1] == ("edges ok; functions not checked" if name == "three_kinds_of_edges" else "ok")
    assert "0 (encoder)" in lines[3] if name == "three_kinds_of_edges" else "0 (thinker)" in lines[3]


def test_the_documentation_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    main(["validate", "examples/qwen2_5_omni.yaml"])
    shown = "```\n$ omni-fastshm validate examples/qwen2_5_omni.yaml\n" + capsys.readouterr().out + "```\n"
    assert shown in (EXAMPLES.parent / "docs/configuration.md").read_text()


# The command line


def test_as_a_module(write: Write) -> None:
    done = command("validate", write(GOOD))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith("\nedges ok; functions not checked\n")
    assert command("validate", write("5")).returncode == 1


def test_the_other_module_name(write: Write) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omni_fastshm.cli", "validate", write(GOOD)], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["validate"], ["validate", "a", "b"], ["--nonsense"]])
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: omni-fastshm" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "validate" in out
    assert "run" in out or "CONFIG" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("omni-fastshm ")


def test_validate_loads_nothing_heavy() -> None:
    code = (
        "import sys; from omni_fastshm.cli import main; main(['validate', sys.argv[1]]); "
        "print([m for m in ('torch', 'numpy', 'PIL', 'rich', 'omni_fastshm.cli.run') if m in sys.modules])"
    )
    example = str(EXAMPLES / "three_kinds_of_edges.yaml")
    done = subprocess.run([sys.executable, "-c", code, example], capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_reader_that_goes_away(write: Write) -> None:
    stages = "".join(f"  - {{stage_id: {n}, engine_input_source: [{n - 1}]}}\n" for n in range(3, 3000))
    path = write(GOOD + stages)
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_fastshm", "validate", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(150) == 1


def test_names_that_the_output_cannot_show(write: Write) -> None:
    path = write(GOOD.replace("name: talker", "name: \u2713"))
    done = command("validate", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 (\\u2713)" in done.stdout


@pytest.mark.parametrize(("no_colour", "coloured"), [("", True), ("1", False)])
def test_colours_only_on_a_terminal(write: Write, no_colour: str, coloured: bool) -> None:
    outer, inner = pty.openpty()
    environment = {**os.environ, "NO_COLOR": no_colour}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "omni_fastshm", "validate", write("5")],
            stdout=inner,
            stderr=subprocess.PIPE,
            timeout=150,
            env=environment,
        )
    finally:
        os.close(inner)
    with open(outer, "rb", buffering=0) as terminal:
        shown = terminal.read(10_000)
    assert (done.returncode, done.stderr) == (1, b"")
    assert (b"\x1b[31mproblem\x1b[0m: " in shown) is coloured
    assert (b"\x1b" in shown) is coloured
