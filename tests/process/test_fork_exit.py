"""Forks, threads, signals, and every end of a process: the others go on, nothing is left, stderr is empty."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from support import leftovers, payloads
from support.child import Child, Children, complaints, environment, run_script

from omni_fastshm import janitor, segments

IMPORTS = """
import atexit, builtins, contextvars, gc, os, signal, sys, threading, types, weakref
from concurrent.futures import ThreadPoolExecutor
import numpy as np
def late():
    "What a program may still want to do at its end: use its connector, its views, or a new connector."
    for user in (c, SharedMemoryConnector({})):
        sent = user.put('a', 'b', 'late', view)[2]
        assert user.get('a', 'b', 'late', sent)[0]['x'][7] == 7
    assert view['x'][7] == 7
"""
CONNECT = """
from omni_fastshm.connectors.shared_memory import SharedMemoryConnector
from omni_fastshm.errors import *
c = SharedMemoryConnector({'segment_bytes': 1 << 20})
def get(request='r'):
    sent = c.put('a', 'b', request, {'x': np.arange(50_000), 'y': [np.arange(9_000)]})[2]
    return c.get('a', 'b', request, sent)[0]
view = get()
"""
IN_THREAD = """
started = threading.Event()
def run():
    try:
        work()
    except ConnectorClosed:
        pass
threading.Thread(target=run, daemon=True).start()
started.wait()
"""

ENDS = {
    "names everywhere": (
        "m = sys.modules['m'] = types.ModuleType('m'); m.view, m.c = view, c\n"
        "builtins.view, builtins.c = view, c\n"
        "class Holder: view, c = view, c\n"
        "contextvars.ContextVar('view').set(view); contextvars.ContextVar('c').set(c)\n"
        "raw = memoryview(view['x'])[5:]"
    ),
    "many connectors": (
        "many = [SharedMemoryConnector({'segment_bytes': 1 << 20}) for _ in range(20)]\n"
        "kept = [m.get('a', 'b', 1, m.put('a', 'b', 1, np.arange(20_000))[2]) for m in many]\n"
        "loan = c.allocate(100_000, np.uint8); loan[:] = 1; part = loan[5:]"
    ),
    "a reference cycle": "class Node: pass\nn = Node(); n.me, n.view, n.c = n, view, c; del n, view, c",
    "a cycle with a finalizer": (
        "gc.disable()\n"
        "class Node:\n"
        "    def __del__(self): assert self.view['x'][5] == 5; self.c.close()\n"
        "n = Node(); n.me, n.view, n.c = n, view, c; del n, view, c"
    ),
    "suspended frames": (
        "def generate():\n    try: yield view\n    finally: assert view['x'][3] == 3\n"
        "suspended = generate(); next(suspended)\n"
        "def fail(view):\n    raise ValueError\n"
        "try: fail(get('s'))\n"
        "except ValueError as error: sys.last_exc = sys.last_value = error; sys.last_traceback = error.__traceback__"
    ),
    "threads that still read": (
        "own = threading.local()\n"
        "def work():\n    own.view = get('s'); started.set()\n    while True: view['x'].sum()\n" + IN_THREAD
    ),
    "threads that still put and get": (
        "def work():\n    n = 0\n    while True: kept = get(n); started.set(); n += 1\n" + IN_THREAD
    ),
    "a thread that waits in get": (
        "c = SharedMemoryConnector({'key_lookup': True, 'namespace': c.namespace})\n"
        "def work(): started.set(); c.get('a', 'b', 'never', timeout=None)\n" + IN_THREAD
    ),
    "a thread that waits in put": (
        "c = SharedMemoryConnector({'segment_bytes': 1 << 20, 'max_bytes': 1 << 20, 'put_timeout_s': 1000})\n"
        "def work():\n    c.put('a', 'b', 1, np.zeros(120_000)); started.set(); c.put('a', 'b', 2, np.zeros(120_000))\n"
        + IN_THREAD
    ),
    "threads that end later": (
        "threading.Thread(target=late).start()\n"
        "pool = ThreadPoolExecutor(4); kept = [pool.submit(get, n) for n in range(40)]\n"
        "sent = [c.put('a', 'b', n, np.arange(20_000), wait=False) for n in range(40)]"
    ),
    "exit handlers and finalizers": (
        "atexit.register(late)\nclass Known: pass\nknown = Known(); weakref.finalize(known, late)"
    ),
    "modules taken away": "for name in [n for n in sys.modules if n.startswith('omni_fastshm')]: del sys.modules[name]",
    "no modules at all": "sys.modules.clear()",
}
# Their code runs before the connector's module is imported, and so after everything of it at the end.
EARLY_ENDS = {
    "an exit handler made before the connector": (
        "@atexit.register\ndef early(): assert view['x'][7] == 7; assert c.health()['leases'] == 1; c.close()"
    ),
    "a connector that an exit handler makes": (
        "@atexit.register\n"
        "def early():\n"
        "    global new, kept\n"
        "    new = SharedMemoryConnector({})\n"
        "    kept = new.get('a', 'b', 'q', new.put('a', 'b', 'q', np.arange(20_000))[2])"
    ),
}


def ends_well(code: str, *flags: str) -> None:
    """Run a program; it must end well and without a word."""
    lines = f"import sys\nsys.path[:] = {[*environment()['PYTHONPATH'].split(os.pathsep), *sys.path]!r}\n"
    done = subprocess.run(
        [sys.executable, *flags, "-c", lines + code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout, complaints(done.stderr)) == (0, "", "")
    assert leftovers.names(os.environ["OMNI_FASTSHM_NAMESPACE"]) == []


class TestInterpreterEnd:
    """What is still alive when the interpreter ends, and wherever it is held: no crash, no word, nothing left."""

    @pytest.mark.parametrize("what", ENDS)
    def test_alive_in(self, what: str) -> None:
        ends_well(IMPORTS + CONNECT + ENDS[what], "-X", "dev", "-W", "error")

    @pytest.mark.parametrize("what", EARLY_ENDS)
    def test_alive_for(self, what: str) -> None:
        ends_well(IMPORTS + EARLY_ENDS[what] + CONNECT, "-X", "dev", "-W", "error")

    def test_tensors(self) -> None:
        tensors = "import torch\nt = torch.from_numpy(view['x'])[5:]\nu = get('s'); u['x'] = torch.from_numpy(u['x'])"
        ends_well(IMPORTS + CONNECT + tensors, "-X", "dev", "-W", "error")

    @pytest.mark.parametrize(
        "flags",
        [("-I", "-bb"), ("-S", "-OO"), ("-X", "faulthandler"), ("-X", "tracemalloc")],
        ids=" ".join,
    )
    def test_started_with(self, flags: tuple[str, ...]) -> None:
        ends_well(IMPORTS + CONNECT + "atexit.register(late)", *flags, "-W", "error")

    def test_a_second_interpreter_in_the_process(self) -> None:
        """It cannot have the module; the first one does not mind."""
        for module in ("_interpreters", "_xxsubinterpreters"):
            if importlib.util.find_spec(module):
                break
        else:
            pytest.skip("no module for interpreters here")
        second = (
            f"import {module} as interpreters\n"
            "second = interpreters.create()\n"
            "code = f'import sys; sys.path[:] = {sys.path!r}; import omni_fastshm._core'\n"
            "try: failure = interpreters.run_string(second, code)\n"
            "except Exception as error: failure = error\n"
            "assert failure is not None\n"
            "interpreters.destroy(second)\n"
        )
        ends_well(IMPORTS + CONNECT + second + "atexit.register(late)")

    def test_code_after_close_and_before_the_end(self) -> None:
        ends_well(IMPORTS + CONNECT + "c.close(); assert view['x'][7] == 7\natexit.register(c.close)", "-X", "dev")


LIVE = """
import os, threading
kept = [c.get('0', '1', 0, c.put('0', '1', 0, np.arange(50_000))[2])[0], c.allocate(80_000, np.uint8)]
waiter = SharedMemoryConnector({'key_lookup': True, 'namespace': c.namespace})
threading.Thread(target=waiter.get, args=('a', 'b', 'never'), kwargs={'timeout': None}, daemon=True).start()
result = c.put('0', '1', 'left', np.arange(60_000))[2]
"""


class TestSuddenEnd:
    """A process ends without any of its code running, with everything alive: what it sent can be got, then all goes."""

    @pytest.mark.parametrize(
        ("how", "code"),
        [
            ("os._exit(3)", 3),
            *((f"os.kill(os.getpid(), {int(s)})", -s) for s in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL)),
            # faulthandler has its say on stderr, then the signal's own effect follows.
            *((f"os.kill(os.getpid(), {int(s)})", -s) for s in (signal.SIGSEGV, signal.SIGBUS)),
        ],
    )
    def test_by(self, make: Any, children: Children, shm_names: Any, how: str, code: int) -> None:
        child = children.with_connector(orphan_ttl_s=60)
        child.run("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))")
        metadata = child.run(LIVE)
        child.killed = True
        child.start(how)
        assert child.process.wait(60) == code
        consumer = make()
        view = consumer.get("0", "1", "left", metadata)[0]
        assert np.array_equal(view, np.arange(60_000))
        make().close()
        assert np.array_equal(view, np.arange(60_000)), "the janitor took what somebody looks at"
        del view
        consumer.close()
        make().close()
        assert shm_names() == []


class TestFork:
    """What a forked child inherits neither works nor keeps anything, and nothing goes with the child."""

    def test_children_that_end_in_every_manner_beside_busy_threads(self) -> None:
        run_script("fork_ends.py")

    def test_while_another_thread_makes_segments(self) -> None:
        run_script("fork_while_making.py", "60")

    @pytest.mark.parametrize("keyed", ["plain", "keyed"])
    def test_from_a_signal_handler_while_segments_are_made(self, keyed: str) -> None:
        run_script("handlers.py", "forks", keyed, "50")

    def test_a_program_that_it_started_does_not_stand_in_for_a_dead_producer(
        self, make: Any, children: Children, shm_names: Any
    ) -> None:
        child = children.with_connector(orphan_ttl_s=0)
        program = child.run(
            "import subprocess\n"
            "c.put('a', 'b', 'r', np.arange(20_000))\n"
            "result = subprocess.Popen(['sleep', '60'], close_fds=False).pid"
        )
        try:
            child.kill()
            assert shm_names()
            make().close()
            assert [name for name in shm_names() if not name.endswith(".dir")] == []
        finally:
            os.kill(program, signal.SIGKILL)

    def test_a_child_of_a_child(self) -> None:
        run_script("fork_twice.py")


class TestStartMethods:
    """Processes of the multiprocessing module."""

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_each_builds_its_own_and_one_handed_over_says_no(self, method: str) -> None:
        run_script("start_methods.py", method)


class TestExceptions:
    """A traceback keeps the frames it went through, and they keep their views."""

    def test_views_live_as_long_as_the_exception(self, make: Any) -> None:
        producer, consumer = make(), make()
        metadata = producer.put("a", "b", "r", payloads.array(100_000))[2]

        def fail() -> None:
            view = consumer.get("a", "b", "r", metadata)[0]
            raise ValueError(view.shape)

        with pytest.raises(ValueError) as caught:
            fail()
        assert consumer.health()["leases"] == 1
        consumer.close()
        frame = caught.traceback[-1].frame
        assert payloads.same(frame.f_locals["view"], payloads.array(100_000)), "the frame's view changed"
        del frame, caught
        gc.collect()
        assert consumer.health()["leases"] == 0
        assert producer.health()["live_blocks"] == 0


WAITS = {
    "get": "emit('waits'); c.get('a', 'b', 'never', timeout=None)",
    "put": "emit('waits'); c.put('a', 'b', 'second', np.zeros(110_000))",
}


class TestSignals:
    """Signals in a call that waits."""

    def waiting(self, children: Children, namespace: str, before: str, wait: str) -> Child:
        """A child that has begun to wait in that call."""
        child = children.with_connector(
            key_lookup=True, namespace=namespace, segment_bytes=1 << 20, max_bytes=1 << 20, put_timeout_s=60
        )
        child.run("import os, signal; full = c.put('a', 'b', 'first', np.zeros(110_000))[0]\n" + before)
        child.start(wait)
        assert child.event() == "waits"
        return child

    @pytest.mark.parametrize("call", WAITS)
    def test_ctrl_c(self, children: Children, namespace: str, call: str) -> None:
        wait = f"try: {WAITS[call]}; result = 'went on'\nexcept KeyboardInterrupt: result = 'interrupted'"
        child = self.waiting(children, namespace, "", wait)
        child.process.send_signal(signal.SIGINT)
        assert child.finish() == "interrupted"
        assert child.run("c.cleanup('first'); result = c.put('a', 'b', 'next', np.zeros(110_000))[0]"), "in line still"
        assert child.run("result = c.get('a', 'b', 'next')[0].size; c.close()") == 110_000

    @pytest.mark.parametrize("call", WAITS)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_that_end_the_program(
        self, children: Children, namespace: str, shm_names: Any, number: signal.Signals, call: str
    ) -> None:
        """Ctrl-C as it comes, and a SIGTERM whose handler ends in good order: names go away."""
        before = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
        child = self.waiting(children, namespace, "import sys\n" + before, WAITS[call])
        child.killed = True  # the code and the traceback are looked at here
        assert shm_names()
        child.process.send_signal(number)
        assert child.process.wait(60) == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 3}[number]
        assert shm_names() == []
        assert ("KeyboardInterrupt" in child.stderr()) is (number == signal.SIGINT)

    def test_a_handler_that_makes_room_for_the_put_it_interrupts(self, children: Children, namespace: str) -> None:
        handler = "signal.signal(signal.SIGUSR1, lambda *_: c.cleanup('first'))"
        child = self.waiting(children, namespace, handler, WAITS["put"].replace("c.put", "result = c.put"))
        child.process.send_signal(signal.SIGUSR1)
        assert child.finish()[0] is True
        child.run("c.cleanup('second'); c.close()")

    def test_a_handler_that_puts_what_the_get_it_interrupts_waits_for(self, children: Children, namespace: str) -> None:
        handler = "signal.signal(signal.SIGUSR1, lambda *_: c.put('a', 'b', 'never', 5))"
        child = self.waiting(children, namespace, handler, WAITS["get"].replace("c.get", "result = c.get"))
        child.process.send_signal(signal.SIGUSR1)
        assert child.finish()[0] == 5
        child.run("c.cleanup('first'); c.close()")

    def test_a_handler_that_puts_while_its_own_put_waits_is_refused_in_its_time(
        self, make: Any, run_thread: Any
    ) -> None:
        """It stands behind the put that it interrupts, and that one cannot go on before it: nobody hangs."""
        connector = make(segment_bytes=1 << 20, max_bytes=1 << 20, put_timeout_s=2)
        connector.put("a", "b", "first", payloads.array(900_000))
        answers = []

        def handler(*_: object) -> None:
            answers.append(connector.put("a", "b", "in the handler", payloads.array(900_000))[0])
            connector.cleanup("first")

        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            waiting = run_thread(self.when_it_waits, connector, os.getpid())
            assert connector.put("a", "b", "second", payloads.array(900_000))[0]
        finally:
            waiting.result(20)
            signal.signal(signal.SIGUSR1, previous)
        assert answers == [False]
        connector.cleanup("second")

    def when_it_waits(self, connector: Any, pid: int) -> None:
        """Send a signal to the main thread as soon as its put stands in line."""
        end = time.monotonic() + 20
        while not connector._producer.queue:
            assert time.monotonic() < end
        os.kill(pid, signal.SIGUSR1)

    @pytest.mark.parametrize("keyed", ["plain", "keyed"])
    def test_a_handler_that_puts_and_gets_at_any_moment(self, keyed: str) -> None:
        run_script("handlers.py", "puts", keyed, "200")

    @pytest.mark.parametrize("keyed", ["plain", "keyed"])
    def test_a_handler_that_joins_in_at_any_moment(self, keyed: str) -> None:
        run_script("handlers.py", "joins", keyed, "100")

    @pytest.mark.parametrize(
        ("what", "keyed", "removed"),
        [("put", "plain", ""), ("close", "plain", ""), ("put_and_close", "plain", ".ctl"), ("put", "keyed", ".dir")],
    )
    def test_a_handler_at_each_place_of_a_connectors_life(self, what: str, keyed: str, removed: str) -> None:
        """Nothing is left, whatever it does there; `removed`: somebody takes away such names meanwhile."""
        run_script("interrupted.py", what, keyed, removed)

    def test_a_handler_that_puts_while_the_producer_is_made(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, shm_names: Any
    ) -> None:
        connector, consumer = make(), make()
        sent = self.put_once_inside(connector, monkeypatch, "make_control")
        sent.append(connector.put("a", "b", "outer", payloads.array(100_000))[2])
        assert all(consumer.get("a", "b", name, md) for name, md in zip(("inner", "outer"), sent, strict=True))
        connector.close()
        assert shm_names() == []

    def test_a_handler_that_puts_while_a_segment_is_added(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, shm_names: Any
    ) -> None:
        connector = make(segment_bytes=1 << 20, max_bytes=1 << 20, put_timeout_s=0)
        connector.put("a", "b", "inline", 1)
        connector._make_producer()
        self.put_once_inside(connector, monkeypatch, "make")
        connector.put("a", "b", "outer", payloads.array(100_000))
        assert connector.health()["capacity_bytes"] <= 1 << 20
        connector.cleanup("inner")
        connector.cleanup("outer")

    def test_a_handler_that_puts_while_a_sweep_removes_the_directory_is_refused(
        self, make: Any, children: Children, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would wait for ever for a lock that the sweep it interrupts holds."""
        connector = make(namespace=namespace)
        children.with_connector(namespace=namespace, key_lookup=True).kill()
        sent = self.put_once_inside(connector, monkeypatch, "unlink")
        assert janitor.sweep(namespace).removed == [segments.directory_name(namespace)]
        assert sent == [None]
        assert connector.put("a", "b", "later", payloads.array(100_000))[0]

    def put_once_inside(self, connector: Any, monkeypatch: pytest.MonkeyPatch, function: str) -> list[Any]:
        """The next call of that function is interrupted by a handler that puts; gives the metadata it got."""
        real, sent = getattr(segments, function), []

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(segments, function, real)
            sent.append(connector.put("a", "b", "inner", payloads.array(100_000))[2])
            return real(*args, **kwargs)

        monkeypatch.setattr(segments, function, interrupted)
        return sent
