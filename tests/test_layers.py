"""Imports and includes go down only. The two lists below are the diagram; the test is whether the files follow it."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "omni_fastshm"
SRC = ROOT / "src"

# Each may import only from lines above its own. Modules on one line do not know each other.
LAYERS = [
    "errors",
    "settings _codec _meter",
    "base _core _codec_dtypes observers _staging_runtime",
    "_place",
    "keys",
    "_codec_classes views placement _staging_cuda _staging_pins _staging_parked",
    "_staging_devices",
    "_codec_forms _codec_host",
    "codec loans",
    "segments reading staging",
    "arrivals copiers directory consumer metadata inventory",
    "janitor lease_trace watching",
    "producer",
    "connectors._leaves connectors._spaces connectors._ends connectors._refusals connectors._shared_settings",
    "connectors._later connectors._watch",
    "connectors._mooncake_codes connectors._mooncake_keys connectors._mooncake_net",
    "connectors._mooncake_ledger connectors._mooncake_metadata connectors._mooncake_gate",
    "connectors._mooncake_session",
    "connectors._mooncake_settings connectors._mooncake_shelf",
    "connectors._mooncake_send connectors._mooncake_receive",
    "connectors.shared_memory connectors.in_process connectors.mooncake connectors",
    "factory",
    "config_file",
    "config_check",
    "config",
    "initialization",
    "adapter",
    "metrics sizing",
    "simulation",
]
# The pipeline runner, the integrations and the commands, on top of everything that a host uses.
RUNNER = [
    "_figures",
    "_edges",
    "_ledger _stage_worker",
    "_pipeline_plan",
    "_stage_process",
    "_stage_child",
    "_pipeline_run",
    "pipeline",
    "integrations._vllm_wire integrations._vllm_keys integrations._vllm_transport",
    "integrations._vllm_host integrations._vllm_contract integrations",
    "integrations.vllm_omni",
    "integrations._vllm_check integrations._vllm_early",
    "cli.job cli.text cli.load",
    "cli.checks",
    "cli.validate cli.run cli.mooncake cli.ls cli.reap cli.bench cli.top cli.plan cli.simulate cli.doctor",
    "cli",
    "__main__ cli.__main__",
]
RANK = {name: rank for rank, line in enumerate(LAYERS + RUNNER) for name in line.split()}
FACE = "__init__"  # re-exports; at import it loads only these:
FACE_IMPORTS = {"base", "errors"}

INCLUDES = [
    "ofs_status.h ofs_atomic.h ofs_fault.h ofs_hash.h ofs_pack.h",
    "ofs_layout.h ofs_segment.h ofs_ring.h ofs_choice.h",
    "ofs_copy.h",
    "ofs_wait.h",
    "ofs_block.h",
    "ofs_keys.h ofs_directory.h",
]
HEADER_RANK = {name: rank for rank, line in enumerate(INCLUDES) for name in line.split()}


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}
COMPILED = {"_core", "_codec", "_place", "_meter"}


def imported(name: str, path: Path) -> set[str]:
    """Modules of ours that this one imports when it is imported."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in module_level(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("omni_fastshm.") for a in node.names if a.name.startswith("omni_fastshm")}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] if name != FACE else []
            elif (node.module or "").split(".")[0] == "omni_fastshm":
                base = []
            else:
                continue
            stem = [*base, *(node.module or "").removeprefix("omni_fastshm").strip(".").split(".")]
            where = ".".join(part for part in stem if part)
            for alias in node.names:
                inner = f"{where}.{alias.name}".strip(".")
                found.add(inner if inner in MODULES or inner in COMPILED else where)
    return found - {name, ""}


def module_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run at import: also inside `try` and `if`, but not `if TYPE_CHECKING`."""
    todo, found = list(tree.body), []
    while todo:
        node = todo.pop()
        found.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "finalbody"):
                todo += [n for n in getattr(node, part, []) if isinstance(n, ast.stmt)]
            for handler in getattr(node, "handlers", []):
                todo += handler.body
    return found


def test_every_module_has_its_place() -> None:
    assert set(RANK) == (set(MODULES) | COMPILED) - {FACE}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {FACE}))
def test_imports_go_down(name: str) -> None:
    for other in imported(name, MODULES[name]):
        assert RANK[other] < RANK[name], f"{name} imports {other}, which stands on the same line or above it"


def test_the_package_itself_loads_only_leaves() -> None:
    assert imported(FACE, MODULES[FACE]) == FACE_IMPORTS


def test_nothing_imports_a_host() -> None:
    """Not even the integrations: one of them asks for it by name, when it is told to."""
    for name, path in MODULES.items():
        asks = name.startswith("integrations") and "import_module" in path.read_text()
        assert asks == (name == "integrations._vllm_host"), name
        roots = {
            (n.module or "").split(".")[0] if isinstance(n, ast.ImportFrom) else n.names[0].name.split(".")[0]
            for n in ast.walk(ast.parse(path.read_text()))
            if (isinstance(n, ast.ImportFrom) and n.level == 0) or isinstance(n, ast.Import)
        }
        assert not roots & {"vllm", "vllm_omni"}, name


def test_only_commands_import_integrations() -> None:
    for name, path in MODULES.items():
        users = any(other.startswith("integrations") for other in imported(name, path))
        assert not users or name.startswith(("integrations", "cli.doctor")), name


def test_compiled_modules_import_only_errors() -> None:
    for name in COMPILED - {"_place"}:
        text = (SRC / f"{name}.pyx").read_text()
        ours = set(re.findall(r"^\s*(?:from|import)\s+omni_fastshm(?:\.(\w+))? import", text, flags=re.M))
        assert ours <= {"errors"}, f"{name}.pyx imports {ours}"


def test_what_compiled_modules_call_in_each_other_goes_down() -> None:
    for name in COMPILED:
        text = (SRC / f"{name}.pyx").read_text()
        lines = re.findall(r"^from omni_fastshm cimport ([\w, ]+)$", text, flags=re.M)
        for other in re.findall(r"\w+", " ".join(lines)):
            assert RANK[other] < RANK[name], f"{name}.pyx cimports {other}"
        assert not re.search(r"from omni_fastshm\.\w+ cimport", text), (
            "by the module's name, so that a reader sees whose it is"
        )


@pytest.mark.parametrize("path", sorted((SRC / "omni_fastshm").glob("_[a-z]*.pxd")), ids=lambda p: p.name)
def test_compiled_modules_share_functions_only(path: Path) -> None:
    """A class in a .pxd ties its users to its layout."""
    assert "cdef class" not in path.read_text()


# ---- C


def sources(*ends: str) -> list[Path]:
    return sorted(path for end in ends for path in SRC.glob(f"ofs_*{end}"))


def code(path: Path) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)


def includes(path: Path) -> list[str]:
    return re.findall(r'#include\s+["<]([^">]+)[">]', code(path))


@pytest.mark.parametrize("path", sources(".h", ".c"), ids=lambda p: p.name)
def test_includes_go_down(path: Path) -> None:
    ours = [name for name in includes(path) if name.startswith("ofs_") and name != "ofs_layout_rows.h"]
    own = path.with_suffix(".h").name
    if path.name == "ofs_layout_rows.h":
        assert not includes(path)
        return
    for name in ours:
        assert HEADER_RANK[name] <= HEADER_RANK[own] if name == own else HEADER_RANK[name] < HEADER_RANK[own], name
    if path.suffix == ".c":
        assert includes(path)[0] == own, "a source includes its own header first: it must stand alone"


def test_every_header_has_its_place() -> None:
    assert set(HEADER_RANK) == {path.name for path in sources(".h")} - {"ofs_layout_rows.h"}
    assert all(set(above.split()).isdisjoint(below.split()) for above, below in pairwise(INCLUDES))


@pytest.mark.parametrize(
    ("pattern", "only"),
    [
        (r"Python\.h", ()),
        (r"stdatomic\.h", ("ofs_atomic.h",)),
        (r"atomic_\w+_explicit|atomic_thread_fence|__atomic|__sync", ("ofs_atomic.h",)),
        (r"futex", ("ofs_wait.c",)),
        (r"\bmmap\s*\(|fallocate|\bfcntl\s*\(|sys/mman\.h|ftruncate", ("ofs_segment.c",)),
        (r"\bvolatile\b", ()),
    ],
)
def test_what_only_one_file_may_use(pattern: str, only: tuple[str, ...]) -> None:
    users = {path.name for path in sources(".h", ".c") if re.search(pattern, code(path))}
    assert users == set(only)


def test_names_in_the_pxd_stand_in_headers() -> None:
    """Cython does not compare externs with headers: a name that no header has is found when it is used, or never."""
    headers = "\n".join(code(path) for path in sources(".h"))
    text = re.sub(r"#[^\n]*", "", (SRC / "ofs.pxd").read_text())
    names = set(re.findall(r"\b(?:ofs|OFS)_\w+", text)) - set(re.findall(r'"(\w+)\.h"', text))
    assert len(names) > 60
    assert not {name for name in names if not re.search(rf"\b{name}\b", headers)}


def test_structures_in_shared_memory_have_no_fields_in_cython() -> None:
    text = (SRC / "ofs.pxd").read_text()
    for name in ("ofs_control", "ofs_block", "ofs_directory"):
        assert re.search(rf"cdef struct {name}:\n\s+pass\n", text), f"{name} must stay opaque"
