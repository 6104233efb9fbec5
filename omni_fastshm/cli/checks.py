"""What `omni-fastshm doctor` looks at. A check takes nothing and gives findings; it changes nothing that stays."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omni_fastshm import inventory, segments
from omni_fastshm.cli.text import count, human_bytes
from omni_fastshm.errors import FastShmError

__all__ = ["CHECKS", "Check", "Finding", "run_check"]

Status = Literal["ok", "warn", "fail"]

_USUAL_SEGMENT = 64 << 20  # the default of segment_bytes
_MODEST_LOCK = 1 << 30
_NODES = Path("/sys/devices/system/node")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of what was looked at.
        status: "ok"; "warn" (works, but less well than it could); "fail" (shared memory cannot be used).
        found: what is there.
        advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


Check = Callable[[], Finding]


def run_check(check: Check) -> Finding:
    """The finding of `check`; a check that breaks is a finding as well."""
    try:
        return check()
    except Exception as error:  # one broken check must not hide the others
        name = check.__name__.strip("_").replace("_", " ")
        return Finding(name, "warn", f"cannot be told: {type(error).__name__}: {error}")


def _shm_mount() -> Finding:
    try:
        found = os.statvfs(segments.MOUNT)
    except OSError as error:
        advice = f"mount a tmpfs there: mount -t tmpfs -o size=50% tmpfs {segments.MOUNT}"
        return Finding("shm mount", "fail", f"{segments.MOUNT}: {error.strerror}", advice)
    if not os.access(segments.MOUNT, os.W_OK | os.X_OK):
        return Finding("shm mount", "fail", f"{segments.MOUNT} is not writable", f"chmod 1777 {segments.MOUNT}")
    free, size = segments.mount_free(), found.f_blocks * found.f_frsize
    text = f"{segments.MOUNT}: {human_bytes(free)} of {human_bytes(size)} free" if size else "no size limit"
    larger = "in a container: docker run --shm-size=8g; else: mount -o remount,size=8g " + segments.MOUNT
    if segments.names_left() == 0:
        advice = f"remove files in {segments.MOUNT}, or mount it with more inodes: mount -o remount,nr_inodes=1m"
        return Finding("shm mount", "fail", f"{text}, but no inodes", advice)
    if size and free < _USUAL_SEGMENT:
        return Finding("shm mount", "fail", f"{text}: less than one segment ({human_bytes(_USUAL_SEGMENT)})", larger)
    if size and free < 8 * _USUAL_SEGMENT:
        return Finding("shm mount", "warn", f"{text}: max_bytes will be half of that", larger)
    return Finding("shm mount", "ok", text)


def _memlock_limit() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock limit", "ok", "unlimited")
    top = "unlimited" if hard == resource.RLIM_INFINITY else human_bytes(hard)
    text = human_bytes(soft) + ("" if hard == soft else f" (can be raised to {top})")
    # CUDA's driver does not ask for it; RDMA does.
    advice = "for RDMA: ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
    return Finding("memlock limit", "ok" if soft >= _MODEST_LOCK else "warn", text, advice)


def _huge_pages() -> Finding:
    try:
        words = _HUGE.read_text().split()
    except OSError:
        return Finding("huge pages for shm", "ok", "this kernel has none")
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    advice = ""
    if chosen in ("never", "deny"):
        advice = f"optional, fewer page table entries for large rings: echo within_size > {_HUGE}"
    return Finding("huge pages for shm", "ok", chosen, advice)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    nodes = len(list(_NODES.glob("node[0-9]*"))) or 1
    text = f"{count(usable, 'core')}, {count(nodes, 'NUMA node')}, {platform.machine()}"
    if nodes > 1:
        advice = "keep the stages of an edge on one node, by that of their GPU: numactl --cpunodebind=N --membind=N"
        return Finding("cores", "ok", text, advice)
    if usable < 2:
        return Finding("cores", "warn", text, "producer and consumer take turns on one core: give it two or more")
    return Finding("cores", "ok", text)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "warn", "not installed: no tensors can be carried", "pip install torch")
    try:
        import torch
    except Exception as error:  # ImportError, or OSError from one of its libraries
        return Finding("torch", "warn", f"cannot be imported: {type(error).__name__}: {error}", "reinstall torch")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Finding("torch", "ok", f"{torch.__version__}, built {built}")


def _cuda() -> Finding:
    try:
        import torch
    except Exception:  # the check before this one says what is wrong
        return Finding("CUDA", "ok", "not asked: no torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("CUDA", "ok", f"{count(len(names), 'device')}: {', '.join(sorted(set(names)))}")
    if not _DRIVER.exists():
        return Finding("CUDA", "ok", "no NVIDIA driver here: tensors on the host only")
    if not torch.version.cuda:
        advice = "install a torch that is built for CUDA: https://pytorch.org/get-started/locally"
        return Finding("CUDA", "warn", "there is a driver, but this torch is built without CUDA", advice)
    advice = "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this torch"
    return Finding("CUDA", "warn", "there is a driver, but torch finds no device", advice)


def _page_locking() -> Finding:
    from omni_fastshm.staging import devices

    runtime = devices.pinning()
    if runtime is None:
        return Finding("page-locking", "ok", "not asked: no CUDA device")
    name = f"{segments.owner_prefix()}doctor.{os.getpid()}.{os.urandom(4).hex()}"
    segment = segments.make(name, 1 << 20)
    segments.unlink(name)
    code = runtime.register(segment.address, segment.size)
    if code:
        why = runtime.describe_error(code)
        runtime.clear_error()
        advice = "copies go through unlocked memory, slower; in a container it may need --ipc=host or other privileges"
        return Finding("page-locking", "warn", f"shared memory cannot be page-locked: {why}", advice)
    runtime.unregister(segment.address)
    return Finding("page-locking", "ok", "shared memory can be page-locked")


def _mooncake() -> Finding:
    from omni_fastshm.connectors._mooncake_codes import import_store
    from omni_fastshm.factory import OmniConnectorFactory

    missing = OmniConnectorFactory.missing_backend("MooncakeConnector")
    if missing is not None:
        return Finding("Mooncake", "ok", "not installed: no edges between nodes", missing)
    try:
        import_store()
    except FastShmError as error:
        text, _, advice = str(error).removeprefix("MooncakeConnector: ").partition(": ")
        return Finding("Mooncake", "warn", text, advice)
    return Finding("Mooncake", "ok", f"can be imported ({_mooncake_version()})")


def _mooncake_version() -> str:
    for name in importlib.metadata.packages_distributions().get("mooncake", []):
        return f"{name} {importlib.metadata.version(name)}"
    return "version unknown"


def _left_behind() -> Finding:
    try:
        snapshot = inventory.take_snapshot()
    except FastShmError as error:
        return Finding("left behind", "warn", str(error))
    dead = [each for each in snapshot.endpoints if each.state in ("dead", "orphaned")]
    broken = [each for each in snapshot.oddities if each.kind in ("half-made", "stray", "damaged")]
    memory = sum(each.memory for each in dead) + sum(each.allocated for each in broken)
    if not dead and not broken:
        living = len(snapshot.endpoints)
        return Finding("left behind", "ok", f"nothing; {count(living, 'endpoint')} alive")
    text = f"{count(len(dead), 'dead endpoint')}, {count(len(broken), 'broken object')}, {human_bytes(memory)}"
    return Finding("left behind", "warn", text, "omni-fastshm ls shows them, omni-fastshm reap takes them away")


CHECKS: tuple[Check, ...] = (
    _shm_mount,
    _memlock_limit,
    _huge_pages,
    _cores,
    _torch,
    _cuda,
    _page_locking,
    _mooncake,
    _left_behind,
)
"""In the order of the report. Further checks are joined to these by the options that ask for them."""
