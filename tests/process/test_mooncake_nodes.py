"""Two nodes that share nothing but a wire, and machines that lack a library: as root, in namespaces of the kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import mooncake_child
from support.child import Children
from support.mooncake_master import Master, require_mooncake

require_mooncake()

PUT = "result = c.put('0', '1', rid, payload(3, 28 << 20))[2]"
GET = (
    "got, took = timed(c.get, '0', '1', rid, metadata)\n"
    "result = None if got is None else is_payload(got, 3, 28 << 20), took"
)


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.201.0.1 and 10.201.0.2, joined by a pair of virtual interfaces."""
    if shutil.which("ip") is None:
        if os.environ.get("OMNI_FASTSHM_CI"):
            pytest.fail("needs the program ip (iproute2)")
        pytest.skip("needs the program ip (iproute2)")
    names = f"ofsA{os.getpid()}", f"ofsB{os.getpid()}"
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "vA", "netns", names[0], "type", "veth", "peer", "name", "vB", "netns", names[1])
        for number, (name, link) in enumerate(zip(names, ("vA", "vB"), strict=True), 1):
            ip("-n", name, "addr", "add", f"10.201.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def inside(name: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", name


@pytest.mark.root
class TestTwoNodes:
    def test_both_directions_and_a_cut_wire(self, nodes: tuple[str, str], children: Children) -> None:
        master = Master("--default_kv_lease_ttl=5000", host="10.201.0.1", command=inside(nodes[0]))
        master.start()
        try:
            # The second node's address is found by itself: it is the one that leads to the master.
            near = mooncake_child.start(children, master, command=inside(nodes[0]))
            far = mooncake_child.start(children, master, command=inside(nodes[1]), host=None, get_timeout_s=3)
            assert far.run("result = c.health()['host']") == "10.201.0.2"
            there = near.run(PUT, rid="there")
            assert far.run(GET, rid="there", metadata=there)[0] is True
            back = far.run(PUT, rid="back")
            assert near.run(GET, rid="back", metadata=back)[0] is True
            assert near.run("result = c.health()['live_blocks']") == 0

            cut = near.run(PUT, rid="cut")
            small = far.run("result = c.put('0', '1', 'small', {'a': np.arange(10)}, consumers=2)")[2]
            assert "inline_bytes" in small, "what is small needs no wire"
            ip("-n", nodes[0], "link", "set", "vA", "down")
            answer, took = far.run(GET, rid="cut", metadata=cut, timeout=80)
            assert answer is None
            assert took < 25, "it waited much longer than get_timeout_s: the store's own limit is 30 s"
            assert far.run("result = c.health()['errors']") >= 1
            ip("-n", nodes[0], "link", "set", "vA", "up")
            deadline = time.monotonic() + 20
            while far.run("result = c.put('0', '1', 'again', payload(1))[0]") is not True:
                assert time.monotonic() < deadline
            for child in (near, far):
                child.kill()
        finally:
            master.stop()


@pytest.mark.root
@pytest.mark.parametrize("library", ["libibverbs.so.1", "libnuma.so.1"])
def test_a_library_that_is_missing_is_named_with_its_package(library: str, children: Children) -> None:
    """The folder of the system's libraries is laid over with one in which this library was removed."""
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    place = Path(next(line.split("=>")[1].strip() for line in found.splitlines() if line.strip().startswith(library)))
    folder = place.parent.resolve()
    hide = (
        "mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work && "
        f"mount -t overlay none -o lowerdir={folder},upperdir=/mnt/upper,workdir=/mnt/work {folder} && "
        f'rm {folder}/{library} && exec "$@"'
    )
    child = children.start(command=("unshare", "-m", "sh", "-c", hide, "sh"))
    text = child.run(
        "from omni_fastshm.connectors.mooncake import MooncakeConnector\n"
        "from omni_fastshm.errors import ConfigError\n"
        "try: MooncakeConnector({'master': '127.0.0.1:1'})\n"
        "except ConfigError as error: result = str(error)"
    )
    assert f"needs {library} of the system" in text
    assert "apt-get install libibverbs1 libnuma1 libcurl4" in text
