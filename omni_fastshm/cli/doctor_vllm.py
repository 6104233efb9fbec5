"""``omni-fastshm doctor --vllm-omni``: which connector each name stands for in the vllm-omni that is installed."""

from __future__ import annotations

from omni_fastshm.cli.text import printable
from omni_fastshm.integrations._vllm_check import check

__all__ = ["report"]


def report() -> int:
    """Print the findings.

    Returns:
        The exit status: 0 all is well, 1 something is wrong.
    """
    findings = check()
    width = max(len(finding.name) for finding in findings)
    for name, status, found, advice in findings:
        print(f"{name:{width}}  {status:4}  {printable(found)}")
        if advice:
            print(f"    {printable(advice)}")
    return 1 if any(finding.status == "fail" for finding in findings) else 0
