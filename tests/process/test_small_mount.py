"""Shared memory mounts of a few megabytes, as containers have them."""

from __future__ import annotations

import pytest
from support.child import Child, Children

SMALL_MOUNT = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"', "sh")


@pytest.mark.root
class TestSmallMount:
    """A shared memory mount of 8 MiB, as containers have it."""

    def child(self, children: Children) -> Child:
        child = children.start(command=SMALL_MOUNT)
        child.run(
            "import numpy as np, os, time, logging\n"
            "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
            "from omni_fastshm.errors import *\n"
            "lines = []\n"
            "class Keep(logging.Handler):\n"
            "    def emit(self, record): lines.append(record.getMessage())\n"
            "logging.getLogger().addHandler(Keep())"
        )
        return child

    def test_a_segment_that_does_not_fit_is_an_error_or_smaller_and_never_a_crash(self, children: Children) -> None:
        child = self.child(children)
        answer = child.run(
            "start = time.monotonic()\n"
            "try:\n"
            "    c = SharedMemoryConnector({'segment_bytes': 64 << 20, 'put_timeout_s': 0.1})\n"
            "    result = [c.put('a', 'b', n, np.ones(125_000), consumers=1)[0] for n in range(10)]\n"
            "    c.close()\n"
            "except SegmentError as error:\n"
            "    result = str(error)\n"
            "took = time.monotonic() - start"
        )
        if isinstance(answer, str):
            assert str(64 << 20) in answer
            assert child.run("result = took") < 1
        else:
            assert answer[0] is True
            assert False in answer
        assert child.run("result = os.listdir('/dev/shm')") == []

    def test_the_defaults_work_on_it(self, children: Children) -> None:
        child = self.child(children)
        assert (
            child.run(
                "c = SharedMemoryConnector({})\n"
                "result = []\n"
                "for n in range(50):\n"
                "    ok, _, md = c.put('a', 'b', n, np.full(50_000, n))\n"
                "    result.append(ok and bool((c.get('a', 'b', n, md)[0] == n).all()))\n"
                "c.close()"
            )
            == [True] * 50
        )

    def test_a_mount_that_others_filled(self, children: Children) -> None:
        child = self.child(children)
        answers = child.run(
            "settings = {'segment_bytes': 1 << 20, 'max_bytes': 7 << 20, 'put_timeout_s': 0.2}\n"
            "c = SharedMemoryConnector(settings)\n"
            "first = c.put('a', 'b', 'first', np.ones(60_000))[2]\n"
            "with open('/dev/shm/filler', 'wb', buffering=0) as f:\n"
            "    try:\n"
            "        while True: f.write(b'x' * 4096)\n"
            "    except OSError: pass\n"
            "result = [c.put('a', 'b', f'request-{n}', np.ones(60_000)) for n in range(4)]"
        )
        assert answers[-1] == (False, 0, None)
        assert any("request-3" in line for line in child.run("result = lines"))
        assert child.run("result = float(c.get('a', 'b', 'first', first)[0].sum())") == 60_000
        assert child.run(
            "os.unlink('/dev/shm/filler')\n"
            "for n in range(4): c.cleanup(f'request-{n}')\n"
            "result = c.put('a', 'b', 'again', np.ones(600_000))[0]\n"
            "c.close()"
        )
        assert child.run("result = os.listdir('/dev/shm')") == []

    def test_orphans_give_way_when_nothing_else_does(self, children: Children) -> None:
        child = self.child(children)
        assert (
            child.run(
                "import subprocess, sys\n"
                "code = '''\n"
                "import os, signal, numpy as np\n"
                "from omni_fastshm.connectors.shared_memory import SharedMemoryConnector\n"
                "size = {'segment_bytes': 5 << 20, 'max_bytes': 5 << 20}\n"
                "c = SharedMemoryConnector({**size, 'orphan_ttl_s': 3600})\n"
                "assert c.put('a', 'b', 'r', np.ones(600_000))[0]\n"
                "os.kill(os.getpid(), signal.SIGKILL)\n"
                "'''\n"
                "assert subprocess.run([sys.executable, '-c', code]).returncode == -9\n"
                "c = SharedMemoryConnector({'segment_bytes': 5 << 20, 'max_bytes': 5 << 20})\n"
                "ok, _, md = c.put('a', 'b', 'r', np.ones(600_000))\n"
                "result = ok and float(c.get('a', 'b', 'r', md)[0].sum())\n"
                "c.close()"
            )
            == 600_000
        )
        assert child.run("result = os.listdir('/dev/shm')") == []
