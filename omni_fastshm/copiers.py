"""Copying one large payload with several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from omni_fastshm.codec import Plan


class Copiers:
    """Threads that copy beside the one that puts; they are started when first needed.

    Args:
        threads: how many copy together, the caller's own included; at least 2.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, thread_name_prefix="omni-fastshm-copy")

    def pack(self, plan: Plan, address: int) -> None:
        """`plan.pack_into`; returns when all of it is written, and no thread touches the memory any more."""
        helped = []
        try:
            try:
                for part in range(1, self._threads):
                    helped.append(self._helpers.submit(plan.pack_part, address, part, self._threads))
            except RuntimeError:  # no more threads, or closed meanwhile: the rest is the caller's
                for part in range(len(helped) + 1, self._threads):
                    plan.pack_part(address, part, self._threads)
            plan.pack_part(address, 0, self._threads)
        finally:
            wait(helped)  # also on Ctrl-C: the memory may be given to another payload after this
        for each in helped:
            each.result()

    def close(self) -> None:
        """The threads end with what they are copying."""
        self._helpers.shutdown(wait=False)
