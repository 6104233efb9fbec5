"""What the torture found, as small as it gets: those who live on keep nothing of the dead."""

from __future__ import annotations

from typing import Any

import pytest
from support import leftovers
from support.child import Child, Children
from support.steps import PUT_BIG

IN_DIRECTORY = (
    "from omni_fastshm.directory import open_directory, leave_directory\n"
    "d = open_directory(namespace, make=False)\n"
    "result = 0 if d is None else len(d.endpoints())\n"
    "if d is not None: leave_directory(d)\n"
)


def kept() -> tuple[int, int]:
    """How many objects of ours this process has open, and mapped."""
    with open("/proc/self/maps") as file:
        maps = sum("omnifs." in line for line in file)
    return sum("omnifs." in target for target in leftovers.descriptors().values()), maps


def with_payload(children: Children, keyed: bool, namespace: str) -> tuple[Child, Any]:
    child = children.with_connector(orphan_ttl_s=0, key_lookup=keyed, namespace=namespace)
    metadata = child.run(PUT_BIG, rid="r", seed=1)[2]
    return child, metadata


@pytest.mark.parametrize("keyed", [False, True])
def test_a_reader_lets_go_of_killed_producers(children: Children, connect: Any, namespace: str, keyed: bool) -> None:
    """A crash loop of its peer must not cost a reader a descriptor and a mapping each time."""
    from omni_fastshm.connectors.shared_memory import SharedMemoryConnector

    reader = connect(SharedMemoryConnector, key_lookup=keyed, namespace=namespace)
    found = []
    for _ in range(4):
        child, metadata = with_payload(children, keyed, namespace)
        assert reader.get("0", "1", "r", None if keyed else metadata) is not None
        child.kill()
        connect(SharedMemoryConnector, namespace=namespace).close()  # whoever starts next sweeps
        assert not [name for name in leftovers.names(namespace) if name.endswith(".ctl")]
        found.append(kept())
    assert found[-1] == found[0]


DIE_THERE = "import os\nfrom omni_fastshm import janitor, segments\n"


def cut_short(children: Children, code: str, namespace: str) -> None:
    """A process that ends, as by SIGKILL, where `code` says."""
    child = children.start()
    child.killed = True
    child.start(DIE_THERE + code, namespace=namespace)
    child.process.wait(40)


@pytest.mark.parametrize("name", ["ctl", "d0"])
def test_a_janitor_that_dies_half_way_leaves_no_place_in_the_directory(
    children: Children, namespace: str, name: str
) -> None:
    """There are 1024 of them: each lost one is lost until nobody uses the namespace any more."""
    watcher = children.with_connector(namespace=namespace, key_lookup=True)
    child, _ = with_payload(children, True, namespace)
    child.kill()
    cut_short(
        children,
        "unlink = segments.unlink\n"
        "def last(name):\n"
        f"    unlink(name)\n    if name.endswith('.{name}'): os.kill(os.getpid(), 9)\n"
        "segments.unlink = last\n"
        "janitor.sweep(namespace)\n",
        namespace,
    )
    watcher.run("from omni_fastshm import janitor\njanitor.sweep(namespace)", namespace=namespace)
    assert watcher.run(IN_DIRECTORY, namespace=namespace) == 0


def test_a_producer_that_dies_in_close_leaves_no_place_in_the_directory(children: Children, namespace: str) -> None:
    watcher = children.with_connector(namespace=namespace, key_lookup=True)
    cut_short(
        children,
        "import numpy as np\n"
        "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
        "c = SharedMemoryConnector({'namespace': namespace, 'key_lookup': True})\n"
        "c.put('a', 'b', 'r', np.zeros(100_000))\n"
        "unlink = segments.unlink\n"
        "def last(name):\n    unlink(name)\n    if name.endswith('.ctl'): os.kill(os.getpid(), 9)\n"
        "segments.unlink = last\n"
        "c.close()\n",
        namespace,
    )
    watcher.run("from omni_fastshm import janitor\njanitor.sweep(namespace)", namespace=namespace)
    assert watcher.run(IN_DIRECTORY, namespace=namespace) == 0
