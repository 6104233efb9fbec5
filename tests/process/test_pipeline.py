"""Pipelines with real processes: order, joins, errors, deaths, limits, and nothing left afterwards."""

from __future__ import annotations

import gc
import math
import operator
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import leftovers
from support.child import Children, environment
from support.waiting import until

from omni_fastshm import CodecError, ConfigError, StageFailed, UsageError, janitor
from omni_fastshm.pipeline import Pipeline

STAGES = Path(__file__).with_name("pipeline_stages.py")
SOON_S = 40.0  # for what needs no time of its own, on a machine that is busy with other things


def fn(name: str) -> str:
    return f"{STAGES}:{name}"


def config(*edges: tuple[int, int], **connector: Any) -> dict[str, Any]:
    """A configuration with these edges; `connector` are settings of all of them."""
    names = sorted({stage for edge in edges for stage in edge})
    stages: list[dict[str, Any]] = [{"stage_id": name} for name in names]
    found: dict[str, Any] = {"stages": stages, "edges": [{"from": a, "to": b} for a, b in edges]}
    if connector:
        found["connectors"] = {"shared": {"name": "SharedMemoryConnector", "extra": connector}}
        for stage in stages:
            targets = [b for a, b in edges if a == stage["stage_id"]]
            stage["output_connectors"] = {f"to_stage_{target}": "shared" for target in targets}
    return found


CHAIN = ((0, 1), (1, 2))


def run_names() -> list[str]:
    """What lies in shared memory under the namespaces that pipelines of this process make."""
    return sorted(n for n in os.listdir("/dev/shm") if n.startswith(f"omnifs.{os.getuid()}.run-{os.getpid()}-"))


def is_gone(pid: int) -> bool:
    """Waits (bounded) for the end of a process, which need not be a child of this one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], SOON_S)[0])
    finally:
        os.close(fd)


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:
    """multiprocessing keeps one helper process and its pipe from the first spawn on; have it before counting."""
    resource_tracker.ensure_running()


@pytest.fixture
def start(_nothing_left_behind: None) -> Iterator[Callable[..., Pipeline]]:
    """Builds pipelines from short names of functions; at the end all are closed and nothing is left."""
    made: list[Pipeline] = []
    pids: list[int] = []

    def build(source: Any, stages: dict[Any, Any] | None = None, **options: Any) -> Pipeline:
        named = {k: fn(v) if isinstance(v, str) else v for k, v in (stages or {}).items()}
        pipeline = Pipeline.from_config(source, named or None, **options)
        made.append(pipeline)
        pipeline.start()
        pids.extend(pipeline.processes.values())
        return pipeline

    yield build
    for pipeline in made:
        pipeline.close(drain=False)
    made.clear()
    gc.collect()
    assert all(map(is_gone, pids))
    assert run_names() == []


# What comes out


def test_200_requests_through_three_stages_come_back_in_order(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config(*CHAIN), {0: "grow", 1: "grow", 2: "grow"})
    # Every third payload is large enough for the ring, so that both ways are mixed.
    sizes = [40_000 if index % 3 == 0 else 10 for index in range(200)]
    items = [{"array": np.full(size, index), "trail": []} for index, size in enumerate(sizes)]

    results = list(pipeline.run(items))

    pids = list(pipeline.processes.values())
    assert len(set(pids)) == 3
    assert os.getpid() not in pids
    for index, (result, size) in enumerate(zip(results, sizes, strict=True)):
        assert result["trail"] == pids
        assert result["array"].shape == (size,)
        assert (result["array"] == index + 3).all()
        assert (items[index]["array"] == index).all(), "the caller's data must not change"


def test_results_are_memory_of_the_callers_own(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "same"})
    results = list(pipeline.run([np.full(100_000, index) for index in range(4)]))
    pipeline.close()

    assert run_names() == []
    for index, result in enumerate(results):
        result += 1
        assert (result == index + 1).all()


def test_views_as_results_outlive_the_pipeline(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "same"}, copy_results=False)
    result = pipeline.submit(np.arange(100_000)).result(SOON_S)
    pipeline.close()

    assert (result == np.arange(100_000)).all()


def test_fan_out_and_join_give_a_dict_by_stage(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1), (0, 2), (1, 3), (2, 3)), {0: "same", 1: "add_one", 2: "double", 3: "same"})

    assert list(pipeline.run(range(30))) == [{"1": n + 1, "2": 2 * n} for n in range(30)]


def test_a_join_of_a_short_and_a_long_path_keeps_requests_together(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1), (1, 2), (2, 3), (0, 3)), {0: "same", 1: "add_one", 2: "add_one", 3: "same"})

    assert list(pipeline.run(range(50))) == [{"2": n + 2, "0": n} for n in range(50)]


def test_several_first_and_last_stages(start: Callable[..., Pipeline]) -> None:
    pipeline = start(
        config((0, 2), (1, 2), (2, 3), (2, 4)), {0: "add_one", 1: "double", 2: "same", 3: "same", 4: "same"}
    )
    assert (pipeline.sources, pipeline.sinks) == (("0", "1"), ("3", "4"))

    both = pipeline.submit(5).result(SOON_S)
    each = pipeline.submit(inputs={0: 10, 1: 20}).result(SOON_S)

    assert both == {"3": {"0": 6, "1": 10}, "4": {"0": 6, "1": 10}}
    assert each["3"] == {"0": 11, "1": 40}
    with pytest.raises(ConfigError, match="first stages"):
        pipeline.submit(inputs={0: 1})
    with pytest.raises(ConfigError, match="not both"):
        pipeline.submit(1, inputs={0: 1, 1: 2})


def test_a_single_stage_is_a_pipeline(start: Callable[..., Pipeline]) -> None:
    pipeline = start({"stages": [{"stage_id": "only"}]}, {"only": operator.neg})

    assert list(pipeline.run([1, 2, 3])) == [-1, -2, -3]


def test_none_and_other_empty_payloads_pass(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "same"})

    assert list(pipeline.run([None, 0, "", [], {}])) == [None, 0, "", [], {}]


def test_a_class_is_made_once_with_the_files_arguments_and_closed(
    start: Callable[..., Pipeline], tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    source = {"stages": [{"stage_id": 0, "fn": fn("Counter"), "fn_args": {"start": 10, "diary": str(diary)}}]}
    pipeline = start(source)

    assert list(pipeline.run("abc")) == [11, 12, 13]
    pipeline.close()
    assert diary.read_text() == "closed after 13"


def test_a_stage_that_yields_sends_each_piece_on(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config(*CHAIN), {0: "same", 1: "count_up", 2: "double"})

    assert list(pipeline.run([3, 0, 2])) == [[0, 2, 4], [], [0, 2]]


def test_a_join_gets_a_stream_as_a_list(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1), (1, 2), (0, 2)), {0: "same", 1: "count_up", 2: "same"})

    assert list(pipeline.run([3, 0])) == [{"1": [0, 1, 2], "0": 3}, {"1": [], "0": 0}]


def test_two_long_streams_into_one_join_do_not_block_each_other(start: Callable[..., Pipeline]) -> None:
    # 4000 notifications do not fit into a pipe: read one predecessor after the other, and this never ends.
    pipeline = start(config((0, 1), (0, 2), (1, 3), (2, 3)), {0: "count_up", 1: "same", 2: "same", 3: "same"})

    result = pipeline.submit(4000).result(100)

    assert result == {"1": list(range(4000)), "2": list(range(4000))}


def test_stages_joined_in_process_share_a_process_and_objects(start: Callable[..., Pipeline]) -> None:
    source = config((0, 1), (1, 2))
    source["connectors"] = {"here": {"name": "InProcessConnector"}}
    source["stages"][0]["output_connectors"] = {"to_stage_1": "here"}
    pipeline = start(source, {0: "with_identity", 1: "identity_of", 2: "process_of"})

    (received, sent), last_pid = pipeline.submit("x").result(SOON_S)

    pids = pipeline.processes
    assert pids["0"] == pids["1"] != pids["2"] == last_pid
    assert received == sent, "the object itself must be handed over"


def test_a_namespace_of_the_files_own_and_key_lookup_work(
    start: Callable[..., Pipeline], namespace: str, shm_names: Callable[[], list[str]]
) -> None:
    source = config(*CHAIN, namespace=namespace, key_lookup=True)
    pipeline = start(source, {0: "add_one", 1: "double", 2: "same"})

    assert list(pipeline.run(range(40))) == [2 * (n + 1) for n in range(40)]
    assert shm_names()
    # The same id again, one request after the other: no key may meet an old one.
    assert [pipeline.submit(n, request_id="same").result(SOON_S) for n in range(3)] == [2, 4, 6]
    os.kill(pipeline.processes["0"], signal.SIGKILL)
    pipeline.close()
    assert shm_names() == []


# What goes wrong in a request


def test_an_error_in_a_stage_names_stage_request_and_place_and_spares_the_others(
    start: Callable[..., Pipeline],
) -> None:
    pipeline = start(config(*CHAIN), {0: "same", 1: "fail_on_five", 2: "same"})

    results = list(pipeline.run(range(10), on_error="return"))

    error = results.pop(5)
    assert results == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert isinstance(error, StageFailed)
    assert (error.stage, error.key) == ("1", "5")
    assert str(error).startswith("stage 1 failed on request '5': ValueError: five is right out")
    assert 'in fail_on_five\n    raise ValueError("five is right out")' in str(error)
    stats = pipeline.stats()
    assert stats.requests == {"submitted": 10, "completed": 9, "failed": 1, "in_flight": 0}
    assert stats.stages["1"]["failed"] == 1
    assert stats.stages["2"]["calls"] == 9


def test_run_raises_at_the_place_of_the_failed_request(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "fail_on_five", 1: "same"})
    results = pipeline.run(range(10))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(StageFailed, match="five"):
        next(results)
    assert pipeline.submit(1).result(SOON_S) == 1


def test_an_error_in_one_branch_does_not_disturb_the_join(start: Callable[..., Pipeline]) -> None:
    pipeline = start(
        config((0, 1), (0, 2), (1, 3), (2, 3)), {0: "same", 1: "fail_on_five", 2: "fail_on_five", 3: "same"}
    )

    results = list(pipeline.run(range(10), on_error="return"))

    assert isinstance(results.pop(5), StageFailed)
    assert results == [{"1": n, "2": n} for n in range(10) if n != 5]


def test_sys_exit_in_a_stage_fails_the_request_only(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "leave_on_five", 1: "same"})

    with pytest.raises(StageFailed, match="SystemExit: 3"):
        pipeline.submit(5).result(SOON_S)
    assert pipeline.submit(6).result(SOON_S) == 6


def test_an_error_in_the_middle_of_a_stream_fails_the_request(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config(*CHAIN), {0: "same", 1: "count_and_fail", 2: "same"})

    with pytest.raises(StageFailed, match="middle of a stream"):
        pipeline.submit(3).result(SOON_S)
    with pytest.raises(StageFailed, match="middle of a stream"):
        pipeline.submit(0, request_id="again").result(SOON_S)


def test_an_output_that_cannot_be_carried_names_the_culprit(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "make_uncarriable", 1: "same"})

    with pytest.raises(StageFailed, match=r"CodecError: payload\.deep\[0\]: object") as caught:
        pipeline.submit(1).result(SOON_S)
    assert caught.value.stage == "0"
    assert pipeline.submit(2).result(SOON_S) == 2


def test_an_input_that_cannot_be_carried_is_a_codec_error(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 2), (1, 2)), {0: "same", 1: "same", 2: "same"})

    with pytest.raises(CodecError, match=r"^request 'mine': payload\.x\[1\]: object") as caught:
        pipeline.submit({"x": [1, object()]}, request_id="mine").result(SOON_S)
    assert caught.value.key == "mine"
    assert pipeline.submit(3).result(SOON_S) == {"0": 3, "1": 3}


def test_a_refused_put_fails_its_request_and_no_other(start: Callable[..., Pipeline]) -> None:
    pipeline = start(
        config((0, 1), max_bytes=4 << 20, segment_bytes=1 << 20, put_timeout_s=0.2),
        {0: "make_megabytes", 1: "process_of"},
    )

    with pytest.raises(StageFailed, match="refused") as caught:
        pipeline.submit(8, request_id="too much").result(SOON_S)
    assert caught.value.stage == "0"
    assert caught.value.key == "too much"
    assert f"{(8 << 20) + 64} bytes are more than max_bytes ({4 << 20})" in str(caught.value)
    data, _ = pipeline.submit(1).result(SOON_S)
    assert data == bytes(1 << 20)


def test_a_refused_input_fails_its_request_and_no_other(start: Callable[..., Pipeline]) -> None:
    pipeline = start(
        config((0, 1)),
        {0: "same", 1: "same"},
        caller_settings={"max_bytes": 4 << 20, "segment_bytes": 1 << 20, "put_timeout_s": 0.2},
    )

    with pytest.raises(StageFailed, match="refused"):
        pipeline.submit(bytes(8 << 20)).result(SOON_S)
    assert pipeline.submit(b"small").result(SOON_S) == b"small"


def test_an_id_that_is_under_way_is_refused(start: Callable[..., Pipeline], tmp_path: Path) -> None:
    gate = make_gate(tmp_path)
    pipeline = start(config((0, 1)), {0: "wait_for_line", 1: "same"})
    waiting = pipeline.submit(str(gate), request_id="twin")

    with pytest.raises(ConfigError, match="twin"):
        pipeline.submit("x", request_id="twin")
    open_gate(gate)
    assert waiting.result(SOON_S) == "go\n"
    second = make_gate(tmp_path, "second")
    again = pipeline.submit(str(second), request_id="twin")
    open_gate(second)
    assert again.result(SOON_S) == "go\n"


# Limits, closing and dying


def make_gate(folder: Path, name: str = "gate") -> Path:
    gate = folder / name
    os.mkfifo(gate)
    os.mkfifo(f"{gate}.go")
    return gate


def pid_at_gate(gate: Path) -> int:
    with open(gate) as told:
        return int(told.readline())


def open_gate(gate: Path) -> None:
    pid_at_gate(gate)
    Path(f"{gate}.go").write_text("go\n")


def test_submit_blocks_at_max_in_flight(
    start: Callable[..., Pipeline], run_thread: Callable[..., Any], tmp_path: Path
) -> None:
    gates = [make_gate(tmp_path, f"gate{index}") for index in range(3)]
    pipeline = start(config((0, 1)), {0: "wait_for_line", 1: "same"}, max_in_flight=2)
    first, second = (pipeline.submit(str(gate)) for gate in gates[:2])
    third = run_thread(pipeline.submit, str(gates[2]))

    pid_at_gate(gates[0])
    assert not third.done()
    assert pipeline.stats().requests["in_flight"] == 2
    Path(f"{gates[0]}.go").write_text("go\n")
    assert first.result(SOON_S) == "go\n"
    last = third.result(SOON_S)
    for gate, future in ((gates[1], second), (gates[2], last)):
        open_gate(gate)
        assert future.result(SOON_S) == "go\n"


def test_leaving_the_block_waits_for_what_is_under_way(tmp_path: Path) -> None:
    gate = make_gate(tmp_path)
    with Pipeline.from_config(config((0, 1)), {0: fn("wait_for_line"), 1: fn("same")}) as pipeline:
        future = pipeline.submit(str(gate))
        open_gate(gate)

    assert future.done()
    assert future.result() == "go\n"
    assert run_names() == []


def test_leaving_the_block_by_an_error_abandons_what_is_under_way(tmp_path: Path) -> None:
    gate = make_gate(tmp_path)
    with (
        pytest.raises(ZeroDivisionError),
        Pipeline.from_config(config((0, 1)), {0: fn("wait_for_line"), 1: fn("same")}) as pipeline,
    ):
        future = pipeline.submit(str(gate))
        pids = list(pipeline.processes.values())
        pid_at_gate(gate)
        raise ZeroDivisionError
    with pytest.raises(StageFailed, match="abandoned"):
        future.result(0)
    assert all(map(is_gone, pids))
    assert run_names() == []


def test_a_killed_stage_fails_what_is_under_way_within_a_second_and_stops_the_pipeline(
    start: Callable[..., Pipeline], tmp_path: Path
) -> None:
    gate = make_gate(tmp_path)
    pipeline = start(config(*CHAIN), {0: "same", 1: "wait_for_line", 2: "same"})
    futures = [pipeline.submit(str(gate), request_id=f"r{index}") for index in range(3)]
    pid = pid_at_gate(gate)
    assert pid == pipeline.processes["1"]

    before = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    errors = [future.exception(SOON_S) for future in futures]

    assert time.monotonic() - before < 5, "somebody waited for something else than the death"
    for index, error in enumerate(errors):
        assert isinstance(error, StageFailed)
        assert (error.stage, error.key) == ("1", f"r{index}")
        assert "SIGKILL" in str(error)
    with pytest.raises(StageFailed, match="SIGKILL"):
        pipeline.submit("more")
    pipeline.close()
    assert all(map(is_gone, pipeline.processes.values()))
    assert run_names() == []


def test_a_killed_stage_leaves_no_memory_though_payloads_were_waiting_in_it(
    start: Callable[..., Pipeline], tmp_path: Path
) -> None:
    gate = make_gate(tmp_path)
    # The second stage stands still with the first payload, so the others wait untaken in the first one's ring.
    source = config((0, 1))
    source["stages"][1]["fn_args"] = {"path": str(gate)}
    pipeline = start(source, {0: "make_megabytes", 1: "Gate"})
    futures = [pipeline.submit(1) for _ in range(4)]
    pid_at_gate(gate)
    assert run_names()
    os.kill(pipeline.processes["0"], signal.SIGKILL)

    assert all(isinstance(future.exception(SOON_S), StageFailed) for future in futures)
    pipeline.close()
    assert run_names() == []


@pytest.mark.usefixtures("_nothing_left_behind")
def test_a_pipeline_that_is_dropped_without_close_ends() -> None:
    pipeline = Pipeline.from_config(config((0, 1)), {0: fn("same"), 1: fn("same")}).start()
    assert pipeline.submit(1).result(SOON_S) == 1
    pids = list(pipeline.processes.values())

    del pipeline
    gc.collect()

    assert all(map(is_gone, pids))


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_fork_cannot_use_or_stop_the_pipeline(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "same"})
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            pipeline.close()
            pipeline.submit(1)
        except UsageError:
            status = 0
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pipeline.submit(2).result(SOON_S) == 2


def test_a_start_tidies_up_after_runs_that_were_killed_whole(
    start: Callable[..., Pipeline], children: Children
) -> None:
    dead, other = "run-999999-0123abcd", f"runs-{os.getpid()}"
    for namespace in (dead, other):
        child = children.with_connector(namespace=namespace, orphan_ttl_s=0)
        child.run("c.put('a', 'b', 'left', np.arange(20_000))")
        child.kill()
    left = leftovers.names(other)
    assert leftovers.names(dead)
    assert left
    start(config(*CHAIN), dict.fromkeys((0, 1, 2), "same"))
    assert leftovers.names(dead) == []
    assert leftovers.names(other) == left, "a namespace that somebody chose is his"
    janitor.sweep(other)


def test_a_killed_stage_is_noticed_though_a_fork_of_it_lives(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "fork_a_sleeper"})
    sleeper = pipeline.submit(None).result(SOON_S)
    try:
        os.kill(pipeline.processes["1"], signal.SIGKILL)
        pipeline.close()
        with pytest.raises(UsageError):
            pipeline.submit(1)
        assert is_gone(pipeline.processes["1"])
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_after_close_nothing_is_accepted(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "same"})
    pipeline.close()
    pipeline.close(drain=False)

    with pytest.raises(UsageError, match="closed"):
        pipeline.submit(1)
    with pytest.raises(UsageError, match="closed"):
        pipeline.start()


def test_submitting_from_a_done_callback_is_refused_instead_of_hanging(
    start: Callable[..., Pipeline],
) -> None:
    pipeline = start(config((0, 1)), {0: "same", 1: "same"}, max_in_flight=1)
    caught: list[BaseException] = []

    def again(_: Any) -> None:
        try:
            pipeline.submit(2)
        except UsageError as error:
            caught.append(error)

    future = pipeline.submit(1)
    future.add_done_callback(again)
    future.result(SOON_S)
    pipeline.close()
    # The callback may have come too late for the other thread; then it ran here, and was accepted or closed.
    assert all("callback" in str(error) or "closed" in str(error) for error in caught)


SCRIPT = """
import sys
from omni_fastshm.pipeline import Pipeline

if __name__ == "__main__":
    file, gate = sys.argv[1:]
    edges = [{"from": 0, "to": 1}, {"from": 1, "to": 2}]
    stages = {0: f"{file}:same", 1: f"{file}:wait_for_line", 2: f"{file}:same"}
    with Pipeline.from_config({"stages": [{"stage_id": n} for n in range(3)], "edges": edges}, stages) as p:
        print(*p.processes.values(), flush=True)
        big = bytes(1 << 20)
        p.submit(gate).result()
"""


@pytest.mark.parametrize("how", ["kill", "ctrl-c"])
def test_stages_end_with_the_pipelines_process(how: str, tmp_path: Path) -> None:
    gate = make_gate(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(STAGES), str(gate)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert pid_at_gate(gate) == pids[1]

    if how == "kill":
        parent.kill()
    else:
        # As a terminal does it: to every process of the group.
        os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=SOON_S)

    assert all(map(is_gone, pids))
    assert not [n for n in os.listdir("/dev/shm") if f".run-{parent.pid}-" in n]
    if how == "ctrl-c":
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert "SpawnProcess" not in errors, "the stages must not print tracebacks of their own"


UNCLOSED = """
import sys
from omni_fastshm.pipeline import Pipeline

GUARD
    config = {"stages": [{"stage_id": 0}, {"stage_id": 1}], "edges": [{"from": 0, "to": 1}]}
    pipeline = Pipeline.from_config(config, {0: f"{sys.argv[1]}:same", 1: f"{sys.argv[1]}:same"})
    print(pipeline.submit(7).result())
"""


def run_unclosed(guard: str, tmp_path: Path) -> tuple[int, str, str]:
    script = tmp_path / "unclosed.py"
    script.write_text(UNCLOSED.replace("GUARD", guard))
    process = subprocess.Popen(
        [sys.executable, str(script), str(STAGES)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, errors = process.communicate(timeout=100)
    assert not [n for n in os.listdir("/dev/shm") if f".run-{process.pid}-" in n]
    return process.returncode, out, errors


def test_a_script_that_never_closes_its_pipeline_ends_all_the_same(tmp_path: Path) -> None:
    assert run_unclosed('if __name__ == "__main__":', tmp_path) == (0, "7\n", "")


def test_a_script_without_main_guard_is_told_so(tmp_path: Path) -> None:
    status, _, errors = run_unclosed("if True:", tmp_path)

    assert status == 1
    assert "StageFailed" in errors.splitlines()[-1]
    assert 'has to stand under `if __name__ == "__main__":`' in errors.splitlines()[-1]
    # Of several stages, none prints anything of its own.
    assert errors.count("Traceback") == 1


def test_a_script_without_a_file_is_told_so() -> None:
    script = UNCLOSED.replace("GUARD", 'if __name__ == "__main__":')
    done = subprocess.run(
        [sys.executable, "-", str(STAGES)], input=script, env=environment(), capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 1
    assert "UsageError" in done.stderr.splitlines()[-1]
    assert "<stdin> is not a file" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1


def test_functions_given_with_c_are_refused() -> None:
    code = (
        "from omni_fastshm import Pipeline\n"
        "def stage(value): return value\n"
        "Pipeline.from_config({'stages': [{'stage_id': 0}]}, {0: stage})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100)

    assert done.stderr.splitlines()[-1].startswith("omni_fastshm.errors.ConfigError: stage 0: stage was typed in")


# What is refused before anything starts


def refused(source: Any, stages: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(source, stages)
    return str(caught.value)


def test_what_cannot_be_a_stage_is_refused() -> None:
    def local(value: Any) -> Any:
        return value

    bad: list[tuple[Any, str]] = [
        (lambda value: value, "lambda"),
        (local, "top level"),
        (fn("no_such_name"), "no_such_name"),
        (f"{STAGES.with_name('nowhere.py')}:same", "no file"),
        ("no_such_module_anywhere:same", "no module"),
        ("just words", "file.py:Name"),
        (17, "neither a function nor a class"),
    ]
    text = refused(
        {"stages": [{"stage_id": index} for index in range(len(bad))]},
        {index: function for index, (function, _) in enumerate(bad)},
    )
    for index, (_, words) in enumerate(bad):
        line = next(line for line in text.splitlines() if f"stage {index}:" in line)
        assert words in line


def test_every_stage_needs_a_function_and_every_function_a_stage() -> None:
    text = refused(config((0, 1)), {0: math.sqrt, 2: math.sqrt})

    assert "stage 1: it has no function" in text
    assert "'2'" in text
    assert "Its stages: 0, 1" in text


def test_a_class_must_be_callable_and_a_function_not_async() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("pipeline_stages", STAGES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert "no __call__" in refused(config((0, 1)), {0: module.NotCallable, 1: math.sqrt})
    assert "async" in refused(config((0, 1)), {0: module.asynchronous, 1: math.sqrt})


def test_a_circle_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    text = refused(config((0, 1), (1, 2), (2, 1)), dict.fromkeys(range(3), math.sqrt))

    assert "the edges form a circle: 1 -> 2 -> 1" in text or "the edges form a circle: 2 -> 1 -> 2" in text
    assert not caplog.records


def test_what_is_wrong_in_a_file_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "stages:\n"
        "  - stage_id: 0\n"
        f"    fn: {fn('no_such_name')}\n"
        "    fn_args: 5\n"
        "  - stage_id: 1\n"
        "edges: [{from: 0, to: 1}]\n"
    )
    text = refused(path)

    assert f"{path}:3: stages[0].fn: stage 0: {STAGES} does not define 'no_such_name'" in text
    assert f"{path}:4: stages[0].fn_args: stage 0: fn_args must be a mapping" in text
    assert f"{path}:5: stages[1]: stage 1: it has no function" in text
    # What the caller gives stands in no file.
    assert "\n  - stage 1: 17 is neither" in refused(path, {1: 17})


@pytest.mark.parametrize("stages", [[math.sqrt, math.sqrt], "file.py:Name", math.sqrt])
def test_functions_must_be_given_by_stage(stages: Any) -> None:
    assert "stages must be a mapping such as {0: function, 1: Class}, by stage_id, not " in refused(
        config((0, 1)), stages
    )


def test_a_function_given_by_the_stages_name_gets_a_hint() -> None:
    source = {"stages": [{"stage_id": 0, "name": "thinker"}]}

    assert "'thinker', which the configuration does not have; that is what stage 0 is called: write its stage_id" in (
        refused(source, {"thinker": math.sqrt})
    )


def test_the_class_itself_is_not_called() -> None:
    with pytest.raises(ConfigError, match="from_config"):
        Pipeline({"stages": [{"stage_id": 0}]})  # type: ignore[arg-type]


def test_a_configuration_without_stages_is_refused() -> None:
    assert "no stages" in refused({})


@pytest.mark.parametrize(
    "options", [{"max_in_flight": 0}, {"max_in_flight": "many"}, {"start_timeout_s": -1}, {"copy_results": 3}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Pipeline.from_config(config((0, 1)), {0: math.sqrt, 1: math.sqrt}, **options)


def test_a_wrong_setting_of_a_connector_is_refused() -> None:
    assert "shm_threshold_bytes" in refused(config((0, 1), shm_threshold_bytes=-1), {0: math.sqrt, 1: math.sqrt})


def test_wrong_settings_of_the_callers_edges_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_byte"):
        Pipeline.from_config(config((0, 1)), {0: math.sqrt, 1: math.sqrt}, caller_settings={"max_byte": 1})


# Starting


def test_a_stage_that_cannot_load_is_named_with_its_traceback() -> None:
    pipeline = Pipeline.from_config(config((0, 1)), {0: fn("same"), 1: fn("NeedsWhatIsMissing")})

    with pytest.raises(StageFailed, match="no_such_module_anywhere") as caught:
        pipeline.start()
    assert caught.value.stage == "1"
    assert "did not start" in str(caught.value)
    assert "import no_such_module_anywhere" in str(caught.value)
    assert run_names() == []


@pytest.mark.parametrize("name", ["asynchronous", "NotCallable"])
def test_a_stage_of_the_file_that_cannot_be_called_is_a_start_error(name: str) -> None:
    source = {"stages": [{"stage_id": 0, "fn": fn(name)}]}

    with pytest.raises(StageFailed, match="stage 0 did not start: TypeError: it cannot be a stage: ") as caught:
        Pipeline.from_config(source).start()
    assert name in str(caught.value).splitlines()[0]
    assert run_names() == []


def test_a_stage_that_is_never_ready_is_given_up() -> None:
    late = ""
    for seconds in (1.5, 6, 24, 60):  # on a busy machine the other one may need longer
        pipeline = Pipeline.from_config(config((0, 1)), {0: fn("same"), 1: fn("NeverReady")}, start_timeout_s=seconds)
        with pytest.raises(StageFailed, match=rf"not ready after {seconds:g} s: .*stage 1;") as caught:
            pipeline.start()
        late = str(caught.value)
        assert run_names() == []
        if "stage 0" not in late:
            break
    assert "s: stage 1;" in late


def test_wrong_arguments_of_a_class_are_a_start_error() -> None:
    source = {"stages": [{"stage_id": 0, "fn": fn("Counter"), "fn_args": {"strat": 1}}]}

    with pytest.raises(StageFailed, match="strat"):
        Pipeline.from_config(source).start()


# Figures


def test_figures_tell_sizes_ways_and_times_of_each_edge(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1), shm_threshold_bytes=10_000), {0: "make_megabytes", 1: "process_of"})
    for megabytes in (0, 1, 1):
        pipeline.submit(megabytes).result(SOON_S)

    for stats in (pipeline.stats(), (pipeline.close(), pipeline.stats())[1]):
        edge = next(edge for edge in stats.edges if (edge.from_stage, edge.to_stage) == ("0", "1"))
        assert edge.payloads == 3
        assert edge.ways == {"inline": 1, "ring": 2}
        assert edge.payload_bytes is not None
        assert 1 << 20 <= edge.payload_bytes < (1 << 20) + 1000
        for spread in (edge.put_us, edge.get_us):
            assert spread.median is not None
            assert spread.max is not None
            assert 0 < spread.median <= spread.max
        assert edge.first_put_us
        assert edge.gb_per_s
        assert stats.stages["0"]["calls"] == 3
        assert stats.as_dict()["edges"][1]["payloads"] == 3


def settled_memory() -> int:
    """What the pipeline's segments take, once no thread takes the rest of a new segment any more."""
    seen = [-1]

    def same_again() -> bool:
        seen.append(sum(os.stat(f"/dev/shm/{name}").st_blocks for name in run_names()))
        return seen[-1] == seen[-2]

    until(same_again, 0.3)
    return seen[-1]


def test_memory_stays_the_same_over_many_requests(start: Callable[..., Pipeline]) -> None:
    pipeline = start(config((0, 1), max_bytes=32 << 20, segment_bytes=8 << 20), {0: "make_megabytes", 1: "same"})
    taken = []
    for _ in range(4):
        for result in pipeline.run([1] * 60):
            assert len(result) == 1 << 20
        taken.append(settled_memory())

    # 240 MiB went through; whatever was not given back would be seen, or refused.
    assert taken[3] <= taken[1] * 1.5
