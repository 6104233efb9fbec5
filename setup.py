"""Builds the compiled modules; everything else stands in pyproject.toml."""

from __future__ import annotations

import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

if not sys.platform.startswith("linux"):
    sys.exit("omni-fastshm runs on Linux only: it needs futexes, open file description locks and /dev/shm.")

DIRECTIVES = {
    "language_level": "3",
    "binding": True,
    "boundscheck": False,
    "wraparound": False,
    "embedsignature": True,
    # A copy of a handle would give back twice what it holds; Cython makes simple classes picklable unasked.
    "auto_pickle": False,
}
# A wrong extern declaration is silent in Cython: make the compiler refuse what it cannot match to a header.
FLAGS = ["-O3", "-std=gnu11", "-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types"]
LINK: list[str] = []
if sanitizer := os.environ.get("OMNI_FASTSHM_SANITIZE"):
    FLAGS += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-g", "-O1"]
    LINK += [f"-fsanitize={sanitizer}"]
PARTS = ["hash", "layout", "segment", "wait", "ring", "block", "keys", "directory"]
# A core that dies on demand, for tests/process/test_fault_points.py.
FAULTS = bool(os.environ.get("OMNI_FASTSHM_FAULTS"))
if FAULTS:
    FLAGS += ["-DOFS_FAULTS", "-O1"]

HEADERS = sorted(glob("src/*.h")) + sorted(glob("src/*.pxd")) + sorted(glob("src/omni_fastshm/*.pxd"))


def extension(name: str, *sources: str) -> Extension:
    return Extension(
        f"omni_fastshm.{name}",
        [f"src/{name}.pyx", *(f"src/{s}" for s in sources)],
        include_dirs=["src"],
        depends=HEADERS,
        extra_compile_args=FLAGS,
        extra_link_args=LINK,
    )


CODEC = extension("_codec", "ofs_choice.c", "ofs_copy.c", "ofs_pack.c")
CORE = extension("_core", *(f"ofs_{part}.c" for part in PARTS), *(["../tests/native/fault.c"] if FAULTS else []))
setup(
    ext_modules=cythonize(
        [CORE] if FAULTS else [CORE, CODEC, extension("_place"), extension("_meter")],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
        include_path=["src"],
    ),
)
