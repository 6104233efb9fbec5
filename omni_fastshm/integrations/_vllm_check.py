"""What an installed vllm-omni would do with our connector, tried out: for ``omni-fastshm doctor --vllm-omni``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from typing import Any, Literal, NamedTuple

from omni_fastshm import segments
from omni_fastshm.settings import NAMESPACE_VARIABLE

from ._vllm_host import Host, factory, find_host, is_installed, load_plugins, loads_plugins_itself
from ._vllm_transport import NAMESPACE
from .vllm_omni import REPLACE_VARIABLE, create_fast_shared_memory_connector, register

__all__ = ["Finding", "check", "resolved_names"]

GROUPS = ("vllm.general_plugins", "vllm_omni.general_plugins")
EARLY_GROUP = "vllm.platform_plugins"
ENTRY = "omni_fastshm"
THEIR_ENTRY = "vllm_omni_register_models"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
_ROOMY = 2 << 30


class Finding(NamedTuple):
    """One line of the report, of the form that ``omni-fastshm doctor`` prints.

    Attributes:
        name: of what was looked at.
        status: "ok"; "warn" (works, but should be known); "fail".
        found: what is there.
        advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def check() -> list[Finding]:
    """Look at the installation, load the plugins as the host's processes do, and try the connector.

    Takes as long as importing vllm-omni: 10 to 20 s.
    """
    if not is_installed():
        return [Finding("vllm-omni", "fail", "is not installed here", "run this with the Python that runs vllm-omni")]
    found = [_versions(), _entry_points(), *_allow_list()]
    try:
        host = find_host()
        load_plugins()
    except Exception as error:
        return [*found, Finding("vllm-omni", "fail", f"cannot be imported: {type(error).__name__}: {error}")]
    assert host is not None
    return [*found, _generation(host), *_names(), *_switches(), _mount()]


def resolved_names() -> dict[str, str]:
    """What each connector's name of the host stands for, as ``module:Class``; "" where only building it would tell."""
    register()
    known = factory()
    ours = {"SharedMemoryConnector", "FastSharedMemoryConnector"}
    return {
        name: _class_behind(known._registry[name]) if name in ours else ""
        for name in known.list_registered_connectors()
    }


def _class_behind(create: Any) -> str:
    connector = create({"namespace": _trial_namespace()})
    cls = type(connector)
    close = getattr(connector, "close", None)  # that of December 2025 has none
    if close is not None:
        close()
    return f"{cls.__module__}:{cls.__name__}"


def _trial_namespace() -> str:
    return f"doctor-{os.getpid()}"


def _versions() -> Finding:
    theirs, vllm = _version("vllm-omni"), _version("vllm")
    text = f"vllm-omni {theirs} with vllm {vllm}"
    if theirs.split(".")[:2] != vllm.split(".")[:2]:
        return Finding("versions", "warn", text, "they go in pairs: vllm-omni X.Y needs vllm X.Y")
    return Finding("versions", "ok", text)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def _entry_points() -> Finding:
    needed = GROUPS if loads_plugins_itself() else (GROUPS[0], EARLY_GROUP)
    missing = [
        group for group in needed if ENTRY not in {entry.name for entry in importlib.metadata.entry_points(group=group)}
    ]
    if missing:
        return Finding("plugin", "fail", f"no entry {ENTRY} in {', '.join(missing)}", "install omni-fastshm again")
    return Finding("plugin", "ok", f"entry {ENTRY} in {' and '.join(needed)}")


def _allow_list() -> list[Finding]:
    listed = os.environ.get(PLUGINS_VARIABLE)
    if listed is None:
        return []
    missing = sorted({ENTRY, THEIR_ENTRY} - {name.strip() for name in listed.split(",")})
    if missing:
        text = f"is set and does not list {', '.join(missing)}"
        return [Finding(PLUGINS_VARIABLE, "fail", text, "add it, or unset the variable")]
    return [Finding(PLUGINS_VARIABLE, "ok", f"lists {ENTRY}")]


def _generation(host: Host) -> Finding:
    what = "of 0.30 and later: keys lead to the data" if host.keyed else "of December 2025: metadata leads to the data"
    return Finding("contract", "ok", what)


def _names() -> list[Finding]:
    names = resolved_names()
    found = [
        Finding(name, "fail", "is not known to the factory", "see the log of the plugin")
        for name in ("FastSharedMemoryConnector", "FastMooncakeConnector")
        if name not in names
    ]
    found += [Finding(name, "ok", f"is {target}") for name, target in names.items() if target]
    rest = [name for name, target in names.items() if not target]
    return [*found, Finding("other names", "ok", ", ".join(rest)), _trial()]


def _trial() -> Finding:
    # Not `with` the connector itself: that of December 2025 is none to use so.
    with contextlib.closing(create_fast_shared_memory_connector({"namespace": _trial_namespace()})) as connector:
        put = connector.put("0", "1", "doctor_0_0", {"a": b"x" * 100_000})
        got = connector.get("0", "1", "doctor_0_0", put[2])
    if put[0] and got is not None and got[1] == put[1]:
        return Finding("trial", "ok", f"{put[1]} bytes went through FastSharedMemoryConnector")
    return Finding("trial", "fail", "no payload went through FastSharedMemoryConnector", "see the log above")


def _switches() -> list[Finding]:
    replaced, namespace = os.environ.get(REPLACE_VARIABLE), os.environ.get(NAMESPACE_VARIABLE)
    switch = Finding(
        REPLACE_VARIABLE, "ok", f"is {replaced!r}" if replaced else "is not set: the default stays the host's"
    )
    if namespace:
        return [switch, Finding("namespace", "ok", f"{namespace}, from {NAMESPACE_VARIABLE}")]
    advice = f"where one user runs several deployments on this machine, give each its own {NAMESPACE_VARIABLE}"
    return [switch, Finding("namespace", "ok", f"{NAMESPACE}, the default", advice)]


def _mount() -> Finding:
    size, free = segments.mount_size(), segments.mount_free()
    text = f"{free >> 20} MiB of {size >> 20} MiB free for what is unread or looked at"
    if size < _ROOMY:
        return Finding(segments.MOUNT, "warn", text, "little for prefills of up to 131 MB each: enlarge it")
    return Finding(segments.MOUNT, "ok", text)
