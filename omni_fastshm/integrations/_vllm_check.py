"""What an installed vllm-omni would do with our connector, tried out: for ``omni-fastshm doctor --vllm-omni``."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any, Literal, NamedTuple

from omni_fastshm import segments
from omni_fastshm.settings import NAMESPACE_VARIABLE

from ._vllm_host import Host, factory, find_host, is_installed, load_plugins
from ._vllm_transport import NAMESPACE
from .vllm_omni import REPLACE_VARIABLE, register

__all__ = ["Finding", "check", "resolved_names"]

GROUPS = ("vllm.general_plugins", "vllm_omni.general_plugins")
ENTRY = "omni_fastshm"
THEIR_ENTRY = "vllm_omni_register_models"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
_ROOMY = 2 << 30


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        level: "ok", "note" (works, but should be known) or "problem".
        subject: what was looked at.
        text: what was found, and what to do.
    """

    level: Literal["ok", "note", "problem"]
    subject: str
    text: str


def check() -> list[Finding]:
    """Look at the installation, load the plugins as the host's processes do, and try the connector.

    Takes as long as importing vllm-omni: 10 to 20 s.
    """
    if not is_installed():
        return [Finding("problem", "vllm-omni", "is not installed here: run this with the Python that runs it")]
    found = [*_versions(), *_entry_points(), *_allow_list()]
    try:
        host = find_host()
        load_plugins()
    except Exception as error:
        return [*found, Finding("problem", "vllm-omni", f"cannot be imported: {type(error).__name__}: {error}")]
    assert host is not None
    return [*found, _generation(host), *_names(host), *_switches(), _mount()]


def resolved_names() -> dict[str, str]:
    """What each connector's name of the host stands for, as ``module:Class``; "" where only building it would tell."""
    register()
    known = factory()
    ours = {"SharedMemoryConnector", "FastSharedMemoryConnector"}
    found = {}
    for name in known.list_registered_connectors():
        found[name] = _class_behind(known._registry[name]) if name in ours else ""
    return found


def _class_behind(create: Any) -> str:
    connector = create({"namespace": f"doctor-{os.getpid()}"})
    cls = type(connector)
    connector_close = getattr(connector, "close", None)  # that of December 2025 has none
    if connector_close is not None:
        connector_close()
    return f"{cls.__module__}:{cls.__name__}"


def _versions() -> list[Finding]:
    theirs, vllm = _version("vllm-omni"), _version("vllm")
    text = f"vllm-omni {theirs} with vllm {vllm}"
    if theirs.split(".")[:2] != vllm.split(".")[:2]:
        return [Finding("problem", "versions", f"{text}: they go in pairs, X.Y needs X.Y")]
    return [Finding("ok", "versions", text)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def _entry_points() -> list[Finding]:
    missing = [
        group for group in GROUPS if ENTRY not in {entry.name for entry in importlib.metadata.entry_points(group=group)}
    ]
    if missing:
        return [Finding("problem", "plugin", f"no entry {ENTRY} in {', '.join(missing)}: install omni-fastshm again")]
    return [Finding("ok", "plugin", f"entry {ENTRY} in {' and '.join(GROUPS)}")]


def _allow_list() -> list[Finding]:
    listed = os.environ.get(PLUGINS_VARIABLE)
    if listed is None:
        return []
    missing = {ENTRY, THEIR_ENTRY} - {name.strip() for name in listed.split(",")}
    if missing:
        text = f"is set and does not list {', '.join(sorted(missing))}: add it, or unset the variable"
        return [Finding("problem", PLUGINS_VARIABLE, text)]
    return [Finding("ok", PLUGINS_VARIABLE, f"lists {ENTRY}")]


def _generation(host: Host) -> Finding:
    what = "of 0.30 and later: keys lead to the data" if host.keyed else "of December 2025: metadata leads to the data"
    return Finding("ok", "contract", what)


def _names(host: Host) -> list[Finding]:
    found = []
    names = resolved_names()
    for name in ("FastSharedMemoryConnector", "FastMooncakeConnector"):
        if name not in names:
            found.append(Finding("problem", name, "is not known to the factory: see the log of the plugin"))
    for name, target in names.items():
        if target:
            found.append(Finding("ok", name, f"is {target}"))
    rest = [name for name, target in names.items() if not target]
    found.append(Finding("ok", "other names", ", ".join(rest)))
    return [*found, _trial()]


def _trial() -> Finding:
    from omni_fastshm.integrations.vllm_omni import create_fast_shared_memory_connector

    with create_fast_shared_memory_connector({"namespace": f"doctor-{os.getpid()}"}) as connector:
        put = connector.put("0", "1", "doctor_0_0", {"a": b"x" * 100_000})
        got = connector.get("0", "1", "doctor_0_0", put[2])
    if put[0] and got is not None and got[1] == put[1]:
        return Finding("ok", "trial", f"{put[1]} bytes went through FastSharedMemoryConnector")
    return Finding("problem", "trial", "a payload did not go through FastSharedMemoryConnector: see the log above")


def _switches() -> list[Finding]:
    namespace = os.environ.get(NAMESPACE_VARIABLE)
    text = f"{namespace or NAMESPACE} ({f'from {NAMESPACE_VARIABLE}' if namespace else 'the default'})"
    if not namespace:
        text += f"; where one user runs several deployments on this machine, give each its own {NAMESPACE_VARIABLE}"
    replaced = os.environ.get(REPLACE_VARIABLE)
    return [
        Finding("ok", REPLACE_VARIABLE, f"is {replaced!r}" if replaced else "is not set: the default stays the host's"),
        Finding("ok" if namespace else "note", "namespace", text),
    ]


def _mount() -> Finding:
    size, free = segments.mount_size(), segments.mount_free()
    text = f"{free >> 20} MiB of {size >> 20} MiB free; what is unread or looked at lies there"
    if size < _ROOMY:
        return Finding("note", segments.MOUNT, f"{text}: little for prefills of up to 131 MB each; enlarge it")
    return Finding("ok", segments.MOUNT, text)
