"""Where an error says it happened, when the payload changes under the walk or errors come from elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.child import Children
from support.codec_tools import round_trip, same

TYPES = """
import msgspec
from omni_fastshm import codec
from omni_fastshm.errors import CodecError

class Made:
    'Taken apart into objects that live no longer than its encoding.'

class Acts:
    'Runs something in the middle of a walk.'
    def __init__(self, action):
        self.action = action

class Hashless(type):
    def __hash__(cls):
        raise RuntimeError('no hash')

class Odd(metaclass=Hashless):
    pass

def act(acts):
    acts.action()
    return {'deep': {'deeper': 'x' * 40}}

def long_key(n):
    return 'a key that nobody else has ' * 3 + str(n)

codec.register_type(Made, lambda made: {(long_key(n), n): [{long_key(-n): n}] for n in range(50)}, lambda state: state)
codec.register_type(Acts, act, lambda state: state)

def message(payload):
    try:
        codec.plan(payload())
    except CodecError as error:
        return str(error)
    return None

def released():
    view = memoryview(bytearray(10))
    ext = msgspec.msgpack.Ext(5, view)
    view.release()
    return ext

def changing(change, keys):
    mapping = {}
    mapping.update({key: Acts(lambda: change(mapping)) if n == 2 else n for n, key in enumerate(keys)})
    return {'outer': [mapping]}

def grow(mapping):
    mapping[long_key(len(mapping))] = 1

def shrink(mapping):
    del mapping[next(iter(mapping))]

def empty(mapping):
    mapping.clear()

def replace(mapping):
    for n, key in enumerate(list(mapping)):
        if n != 2:
            del mapping[key]
            mapping[long_key(n)] = n
"""


@pytest.fixture
def child(children: Children, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An interpreter that fills what it frees with a pattern, so that looking at it again shows."""
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    child = children.start()
    child.run(TYPES)
    return child


class TestPaths:
    """A path names what was at fault, out of objects that are still there."""

    @pytest.mark.parametrize("culprit", ["released()", "Odd()"])
    def test_an_error_without_a_path_after_a_deeper_walk(self, child: Any, culprit: str) -> None:
        messages = child.run(
            f"result = {{message(lambda: {{'req': [Made(), {culprit}]}}) for _ in range(50)}}",
        )
        assert len(messages) == 1
        assert messages.pop().startswith("req[1]: ")

    @pytest.mark.parametrize("culprit", ["released()", "Odd()"])
    def test_inside_what_was_made_for_the_walk(self, child: Any, culprit: str) -> None:
        message = child.run(
            f"codec.register_type(Acts, lambda acts: {{('made', 1): [Made(), {culprit}]}}, lambda state: state)\n"
            "result = message(lambda: {'req': [Acts(None)]})",
        )
        assert "req[0]" in message
        assert "[('made', 1)][1]: " in message

    @pytest.mark.parametrize("keys", ["'abcdef'", "[(c, 1) for c in 'abcdef']", "['\\xe4' + c for c in 'abcdef']"])
    @pytest.mark.parametrize("change", ["grow", "shrink", "empty"])
    def test_a_dict_that_changes_while_it_is_walked(self, child: Any, change: str, keys: str) -> None:
        messages = child.run(f"result = {{message(lambda: changing({change}, {keys})) for _ in range(50)}}")
        assert len(messages) == 1
        message = messages.pop()
        assert message.startswith("outer[0]"), message
        assert "chang" in message
        assert "deep" not in message

    @pytest.mark.parametrize("keys", ["'abcdef'", "[(c, 1) for c in 'abcdef']"])
    def test_a_dict_of_the_same_length_with_other_items(self, child: Any, keys: str) -> None:
        """It may be carried or refused; nobody crashes."""
        child.run(f"result = [message(lambda: changing(replace, {keys})) for _ in range(50)]")


TEXTS = [np.str_(""), np.bytes_(b""), np.str_("a\0"), np.bytes_(b"a\0"), np.str_("\0"), np.bytes_(b"\0\0")]
TEXTS += [np.str_("abc"), np.bytes_(b"abc"), np.str_("\N{GRINNING FACE}\0"), np.str_("\ud800")]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
class TestNumpyText:
    """NumPy's scalars of text, whose dtype can tell neither an empty one nor zeros at the end."""

    def test_alone(self, text: Any) -> None:
        got = round_trip(text)
        assert type(got) is type(text)
        assert len(got) == len(text)
        assert got == text
        assert list(got) == list(text)

    def test_in_a_tree(self, text: Any) -> None:
        got = round_trip({"text": [text], "after": np.arange(1000)})
        assert got["text"] == [text]
        assert len(got["text"][0]) == len(text)
        assert same(got["after"], np.arange(1000))
