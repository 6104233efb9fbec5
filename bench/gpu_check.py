"""Copies between a GPU and shared memory, measured where it is run: one script, in less than five minutes.

``python bench/gpu_check.py`` builds the compiled modules if they are missing, runs the tests marked `gpu`, and prints
GB/s through the ring beside those of a page-locked buffer (what the machine can do) and of pageable memory (`.cpu()`,
`.to()`), how long `put(wait=False)` keeps its caller and its stream, and a hand-over from GPU to GPU between two
processes. Under five minutes. The exit status is 0 when it ran and every byte was right, 1 when not, 3 where there
is no GPU.

For a machine without a network, ``--pack`` copies the packages that it needs beside torch and numpy into
`build/gpu-check`, where the script finds them: take the folder along. ``--stand-in`` takes host memory for a GPU: it
checks this script, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu-check"
NEEDED = (
    "posix_ipc",
    "msgspec",
    "PyYAML",
    "cython",
    "setuptools",
    "pytest",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
)
NO_GPU = 3
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "28.7 MB": 28_672_000, "256 MiB": 256 << 20}
STALL_US = 50.0
SETTINGS = {"max_bytes": 2 << 30, "put_timeout_s": 30, "idle_segment_s": 600, "shm_threshold_bytes": 0}


class Gpu:
    """The device under test."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.title = torch.cuda.get_device_name(0)

    def tensor(self, nbytes: int) -> Any:
        return self.torch.randint(0, 256, (nbytes,), dtype=self.torch.uint8, device=self.name)

    def pinned(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=True)

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def stream_gap_us(self, call: Callable[[], Any]) -> float:
        """How long the current stream stands still for what `call` enqueues on it, behind other work."""
        before, after = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(20_000_000)  # some 10 ms: both events are enqueued long before they are due
        before.record()
        call()
        after.record()
        self.wait()
        return float(before.elapsed_time(after)) * 1000


class StandIn(Gpu):
    """Host memory in its place."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.title = "no GPU: host memory stands in, the figures mean nothing"

    def pinned(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8)

    def wait(self) -> None:
        pass

    def stream_gap_us(self, call: Callable[[], Any]) -> float:
        call()
        return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="host memory instead of a GPU, to check this script")
    parser.add_argument("--seconds", type=float, default=0.7, help="per figure (default 0.7)")
    parser.add_argument("--up-to", choices=list(SIZES), default="256 MiB", help="the largest size (default 256 MiB)")
    parser.add_argument("--no-tests", action="store_true", help="only measure")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--pack", action="store_true", help=f"copy what it needs to {PACKED.relative_to(ROOT)}, and stop"
    )
    arguments = parser.parse_args()
    if arguments.pack:
        print(f"{pack(PACKED)} files in {PACKED}")
        return 0
    problem = None if arguments.stand_in else why_no_gpu()
    if problem:
        print(f"gpu_check: {problem}. Nothing was measured.", file=sys.stderr)
        return NO_GPU
    sys.path[:0] = [str(ROOT)]
    sys.path.append(str(PACKED))  # last: what the machine has of its own comes first
    build()
    tested = None if arguments.no_tests else run_tests()
    device = StandIn() if arguments.stand_in else Gpu()
    report: dict[str, Any] = {"device": device.title, **machine(), "tests": tested, "sizes": {}}
    print(f"\n{device.title}; torch {report['torch']}, {report['cpu']}, {report['cores']} cores, {report['kernel']}")
    right = True
    sizes = {name: nbytes for name, nbytes in SIZES.items() if nbytes <= SIZES[arguments.up_to]}
    for name, nbytes in sizes.items():
        figures = measure(device, nbytes, arguments.seconds)
        right = right and figures.pop("right")
        report["sizes"][name] = figures
        print(line(name, figures), flush=True)
    report["pipe"] = hand_over(device, sizes, arguments.seconds)
    right = right and report["pipe"].pop("right")
    for name, figures in report["pipe"].items():
        print(f"{name:>8}  two processes, device to device: {figures['us']:9.1f} µs, {figures['GB/s']:6.2f} GB/s")
    if not arguments.stand_in:
        report["reached"] = dict(judge(report["sizes"]))
        for text, reached in report["reached"].items():
            print(f"{'reached    ' if reached else 'NOT reached'}  {text}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    if not right:
        print("gpu_check: bytes arrived that were not sent", file=sys.stderr)
    return 0 if right and tested in (None, 0) else 1


def why_no_gpu() -> str | None:
    """What is missing for a run on a GPU, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}): install one that is built for CUDA"
    if not torch.version.cuda and not torch.version.hip:
        return f"torch {torch.__version__} is built without CUDA: install one that is built for it"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    return None


def build() -> None:
    """The compiled modules, where they are not there yet."""
    try:
        import omni_fastshm._core  # noqa: F401
    except ImportError:
        print("building the compiled modules", flush=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=240)


def run_tests() -> int:
    """The tests that need a GPU; pytest's exit status, or 0 with a word where there is no pytest."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        print("no pytest here: the tests are left out", flush=True)
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), timeout=150, check=False)
    return 0 if done.returncode == 5 else done.returncode  # 5: no test was collected


def environment() -> dict[str, str]:
    """Of other interpreters: they find what this one finds."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(PACKED)]).replace(
        os.pathsep * 2, os.pathsep
    )
    return {**os.environ, "PYTHONPATH": path}


def pack(target: Path) -> int:
    """Copy the installed packages of `NEEDED` into a folder; gives the number of files."""
    copied = 0
    for name in NEEDED:
        for file in importlib.metadata.files(name) or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                place = target / file
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place)
                copied += 1
    return copied


def machine() -> dict[str, Any]:
    import torch

    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((each.partition(":")[2].strip() for each in lines if each.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit.stdout.strip(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def times(call: Callable[[], Any], seconds: float, least: int = 5) -> list[float]:
    """Seconds per call, after two to warm up."""
    for _ in range(2):
        call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def measure(device: Gpu, nbytes: int, seconds: float) -> dict[str, Any]:
    """All figures of one size; bandwidths in GB/s, of medians."""
    from omni_fastshm import SharedMemoryConnector

    source, target = device.tensor(nbytes), device.tensor(nbytes)
    pinned, host = device.pinned(nbytes), source.cpu()

    def gbps(call: Callable[[], Any]) -> float:
        return nbytes / median(times(call, seconds)) / 1e9

    def out_of_pinned() -> None:
        target.copy_(pinned, non_blocking=True)
        device.wait()

    def into_pinned() -> None:
        pinned.copy_(source, non_blocking=True)
        device.wait()

    figures: dict[str, Any] = {
        "out limit": gbps(into_pinned),
        "out pageable": gbps(source.cpu),
        "in limit": gbps(out_of_pinned),
        "in pageable": gbps(lambda: (host.to(device.name, copy=True), device.wait())),
    }
    with SharedMemoryConnector({**SETTINGS, "namespace": f"gpu-check-{os.getpid()}"}) as ring:
        figures.update(through(ring, device, source, nbytes, seconds))
    return figures


def through(ring: Any, device: Gpu, source: Any, nbytes: int, seconds: float) -> dict[str, Any]:
    """The figures of the ring."""
    put_times: list[float] = []
    get_times: list[float] = []
    right = True

    def once() -> None:
        nonlocal right
        start = time.perf_counter()
        ok, _, metadata = ring.put("a", "b", "r", {"t": source})
        put_times.append(time.perf_counter() - start)
        assert ok, "no room"
        start = time.perf_counter()
        got = ring.get("a", "b", "r", metadata, device=device.name)[0]["t"]
        device.wait()
        get_times.append(time.perf_counter() - start)
        right = right and bool(device.torch.equal(got, source))

    times(once, 2 * seconds)
    calls: list[float] = []
    gaps: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < 5 or time.perf_counter() < end:
        futures: list[Any] = []

        def put(futures: list[Any] = futures) -> None:
            start = time.perf_counter()
            futures.append(ring.put("a", "b", "r", {"t": source}, wait=False))
            calls.append(time.perf_counter() - start)

        gaps.append(device.stream_gap_us(put))
        ring.get("a", "b", "r", futures[0].result(60)[2])
    return {
        "out ring": nbytes / median(put_times[2:]) / 1e9,
        "in ring": nbytes / median(get_times[2:]) / 1e9,
        "put call us": median(calls) * 1e6,
        "put stalls stream us": median(gaps),
        "pinned bytes": ring.health()["pinned_bytes"],
        "right": right,
    }


def line(name: str, figures: dict[str, Any]) -> str:
    parts = [f"{name:>8}"]
    for way, title in (("out", "device to host"), ("in", "host to device")):
        ring, limit, pageable = (figures[f"{way} {kind}"] for kind in ("ring", "limit", "pageable"))
        parts.append(
            f"{title}: ring {ring:6.2f} GB/s, page-locked buffer {limit:6.2f} ({ring / limit:4.2f}x), "
            f"pageable {pageable:6.2f} ({ring / pageable:4.2f}x)"
        )
    parts.append(
        f"put(wait=False) returns after {figures['put call us']:.1f} µs and stalls its stream for "
        f"{figures['put stalls stream us']:.1f} µs; {figures['pinned bytes'] >> 20} MiB page-locked"
    )
    return "\n          ".join([f"{parts[0]}  {parts[1]}", *parts[2:]])


def judge(sizes: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """What the figures are for: the aims, and whether they were reached."""
    large = [each for name, each in sizes.items() if SIZES[name] >= 1 << 20]
    found = []
    for way, title in (("out", "device to host"), ("in", "host to device")):
        for kind, than, wanted in (("limit", "a page-locked buffer", 0.9), ("pageable", "the pageable path", 2.0)):
            low = min((each[f"{way} ring"] / each[f"{way} {kind}"] for each in large), default=0.0)
            found.append((f"{title}: {low:.2f} x {than} from 1 MiB on, wanted {wanted:g}", low >= wanted))
    stall = max(each["put stalls stream us"] for each in sizes.values())
    found.append((f"put(wait=False) stalls its stream for {stall:.1f} µs, wanted < {STALL_US:g}", stall < STALL_US))
    return found


def hand_over(device: Gpu, sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """From a tensor on the device here to one in another process, and an answer back over a pipe."""
    from omni_fastshm import SharedMemoryConnector

    namespace = f"gpu-check-{os.getpid()}-two"
    with _partner(device.name, namespace) as pipe, SharedMemoryConnector({**SETTINGS, "namespace": namespace}) as ring:
        found: dict[str, Any] = {"right": True}
        for name, nbytes in sizes.items():
            source = device.tensor(nbytes)
            want = int(source.to(device.torch.int64).sum())

            def once(source: Any = source) -> int:
                pipe.send(ring.put("a", "b", "r", {"t": source})[2])
                return int(pipe.recv())

            found["right"] = found["right"] and once() == want
            pipe.send("no sums")
            taken = median(times(once, seconds))
            pipe.send("sums")
            found[name] = {"us": taken * 1e6, "GB/s": nbytes / taken / 1e9}
        pipe.send(None)
    return found


@contextlib.contextmanager
def _partner(device: str, namespace: str) -> Iterator[Any]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_take, args=(there, device, namespace))
    child.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        child.join(20)
        if child.is_alive():
            child.kill()
            child.join(20)


def _take(pipe: Any, device: str, namespace: str) -> None:
    """The other process: takes what comes until None comes."""
    import torch

    from omni_fastshm import SharedMemoryConnector

    sums = True
    with SharedMemoryConnector({**SETTINGS, "namespace": namespace}) as ring:
        while (said := pipe.recv()) is not None:
            if isinstance(said, str):
                sums = said == "sums"
                continue
            got = ring.get("a", "b", "r", said, device=device)[0]["t"]
            if device == "cuda":
                torch.cuda.synchronize()
            pipe.send(int(got.to(torch.int64).sum()) if sums else 0)


if __name__ == "__main__":
    sys.exit(main())
