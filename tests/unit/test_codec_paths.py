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


REPLACED = """
def swap(mapping):
    del mapping['a']
    mapping['d'] = 1

def move(mapping):
    mapping['a'] = mapping.pop('a')

def rebuild(mapping):
    mapping.clear()
    mapping.update(z=1, b=2, a=3)

def mapping_that(change):
    mapping = {'a': 1, 'b': 2, 'c': 3}
    mapping['a' if change is not rebuild else 'b'] = Acts(lambda: change(mapping))
    return mapping

def outcome(payload):
    try:
        return codec.decode(codec.plan(payload(), wire=wire).to_bytes(), wire=wire)
    except CodecError as error:
        return str(error)
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

    @pytest.mark.parametrize("change", ["swap", "move", "rebuild", "replace"])
    @pytest.mark.parametrize("wire", ["exact", "host"])
    def test_a_dict_whose_keys_change_but_not_their_number(self, child: Any, change: str, wire: str) -> None:
        """What stands in the frame as its length, and once, has to be what follows."""
        child.run(f"{REPLACED}\nwire = {wire!r}\nresult = None")
        said = child.run(f"result = outcome(lambda: {{'outer': [mapping_that({change}), 'behind']}})")
        assert said == "outer[0]: dict cannot be carried: it changed while the payload was being encoded"

    def test_a_class_that_is_registered_while_another_one_is_taken_apart(self, child: Any) -> None:
        """As by a module that an encoder imports when it is first called."""
        child.run(
            "class Late: pass\n"
            "late = lambda: codec.register_type(Late, list, lambda state: state, name='late')\n"
            "for _ in range(50):\n"
            "    frame = codec.plan([Acts(int), Acts(late)]).to_bytes()\n"
            "result = codec.decode(frame) == 2 * [{'deep': {'deeper': 'x' * 40}}]",
        )

    @pytest.mark.parametrize("depth", [0, 1, 20])
    def test_a_key_in_a_tuple_in_the_hosts_format(self, child: Any, depth: int) -> None:
        message = child.run(
            "key = (1, 'x', (2, 1 << 70))\n"
            "payload = {key: 1}\n"
            f"for _ in range({depth}):\n"
            "    payload = [payload]\n"
            "try:\n"
            "    codec.plan(payload, wire='host')\n"
            "except CodecError as error:\n"
            "    result = str(error)",
        )
        assert f"[{(1, 'x', (2, 1 << 70))}][2][1]: int cannot be carried" in message


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
