"""Is everything in the sdist and the wheel? Run as ``python tests/check_package.py dist`` from the project's root.

With generated sources kept elsewhere, an sdist can lack a .pyx and still look complete; with a src/ folder beside the
package, a wheel can hold the compiled modules and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

LEFT_OUT = {".gitignore", "MANIFEST.in"}


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    return {name for name in listed if name and name not in LEFT_OUT and not name.startswith((".ci/", ".github/"))}


def main(dist: Path) -> int:
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    ours = {name for name in tracked() if name.startswith("omni_fastshm/")}
    missing = [f"sdist: {name}" for name in sorted(tracked() - packed)]
    missing += [f"wheel: {name}" for name in sorted(ours - installed)]
    for module in ("_core", "_codec", "_place", "_meter"):
        if not any(name.startswith(f"omni_fastshm/{module}.") and name.endswith(".so") for name in installed):
            missing.append(f"wheel: the compiled {module}")
    extra = [
        f"wheel: {name} does not belong there" for name in sorted(installed) if name.endswith((".c", ".pyx", ".h"))
    ]
    print("\n".join(missing + extra) or f"{len(packed)} names in the sdist, {len(installed)} in the wheel: complete")
    return 1 if missing or extra else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
