"""Processes of the multiprocessing module: each builds a connector of its own, and one that is handed over says no."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.queues import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support import leftovers

from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import ForkedConnector

WANT = np.arange(20_000)


def work(method: str, settings: dict[str, Any], metadata: dict[str, Any], answers: SimpleQueue[Any]) -> None:
    """Take what the parent sent, and send something back that nobody can take once this process has ended."""
    own: Any = SharedMemoryConnector(settings)
    received = own.get("a", "b", "there", metadata)[0]
    assert np.array_equal(received, WANT)
    globals().update(own=own, received=received)  # alive when the process ends
    answers.put((method, own.put("b", "c", "back", received + 1)[2]))


def use(connector: SharedMemoryConnector, answers: SimpleQueue[Any]) -> None:
    try:
        connector.put("a", "b", "r", WANT)
    except ForkedConnector as error:
        answers.put(str(error))


def own_connectors(method: str, parent: Any) -> None:
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    names = leftovers.names(parent.namespace)
    metadata = [parent.put("a", "b", "there", WANT)[2] for _ in range(2)]
    processes = [context.Process(target=work, args=(method, {}, each, answers)) for each in metadata]
    for process in processes:
        process.start()
    back = [answers.get() for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, (method, process.exitcode)
        process.close()
    answers.close()
    assert [name for name, _ in back] == [method] * 2
    assert parent.put("a", "b", "whole", np.zeros(900_000, np.uint8))[0], "what they held is not given back"
    parent.cleanup("whole")
    assert leftovers.names(parent.namespace) == names, f"{method}: its children left something"
    assert [parent.get("b", "c", "back", metadata) for _, metadata in back] == [None, None]


def handed_over(method: str, parent: Any) -> None:
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=use, args=(parent, answers))
    if method == "fork":
        process.start()
        assert "fork" in answers.get()
        process.join(60)
        assert process.exitcode == 0
    else:
        with pytest.raises(TypeError, match=r"cannot be pickled.*Send its settings and build a connector"):
            process.start()
    answers.close()
    metadata = parent.put("a", "b", "r", WANT)[2]
    assert np.array_equal(parent.get("a", "b", "r", metadata)[0], WANT)


def main(method: str) -> None:
    if method == "forkserver":
        multiprocessing.set_forkserver_preload([SharedMemoryConnector.__module__])
    parent = SharedMemoryConnector({"segment_bytes": 1 << 20, "max_bytes": 1 << 20})
    parent.put("a", "b", "first", WANT)
    parent.cleanup("first")
    own_connectors(method, parent)
    handed_over(method, parent)
    parent.close()
    assert leftovers.names(os.environ["OMNI_FASTSHM_NAMESPACE"]) == []
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
