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
    width = max(len(finding.subject) for finding in findings)
    for level, subject, text in findings:
        print(f"{level:7}  {subject:{width}}  {printable(text)}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0
