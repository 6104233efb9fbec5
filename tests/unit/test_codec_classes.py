"""Objects of classes: which can travel, how their class is found, what runs when they are restored."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from support.codec_tools import leased, round_trip, same

from omni_fastshm import CodecError, _codec, register_type
from omni_fastshm.codec import decode, plan


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the check of shared memory, which these tests do not touch and which takes longer than they do."""


class Color(enum.Enum):
    RED = (1, 2)
    GREEN = "g"
    ALSO_RED = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any = None


Pair = collections.namedtuple("Pair", "a b")


class LoosePoint(Point):
    pass


@dataclasses.dataclass
class Sampling:
    temperature: float
    stop: list[str] = dataclasses.field(default_factory=list)
    derived: int = dataclasses.field(init=False, default=3)
    extra: dataclasses.InitVar[int] = 0

    def __post_init__(self, extra: int) -> None:
        self.stop = [*self.stop, "added by __post_init__"]


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    t: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenSlots:
    __slots__ = ("a", "b")
    a: int
    b: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Child(FrozenSlots):
    c: int = 0


@dataclasses.dataclass
class Cached:
    a: int

    @functools.cached_property
    def twice(self) -> int:
        return self.a * 2


@dataclasses.dataclass
class DictLike(dict):  # type: ignore[type-arg]
    a: int = 1


class Request(msgspec.Struct):
    name: str
    tags: list[str] = []
    data: Any = None


class Strict(msgspec.Struct, frozen=True, kw_only=True, tag="strict", rename="camel", omit_defaults=True):
    some_value: int = 0
    other_value: Any = msgspec.UNSET


class Lax(msgspec.Struct, dict=True, array_like=True):
    a: int

    def __post_init__(self) -> None:
        self.a += 1


class Outer:
    class Inner(msgspec.Struct):
        a: int


def sampling() -> Sampling:
    value = Sampling(0.5, ["x"])
    value.stop.append("later")
    value.derived = 9
    return value


VALUES: list[Any] = [
    Color.RED, Color.GREEN, Level.LOW, Word.YES, Access.READ, Access.READ | Access.WRITE, Access(0),
    Point(1), Point((1,), [2]), Pair({1}, None), LoosePoint(1, 2),
    Frozen(1), Frozen(2, Frozen(3, (4,))), FrozenSlots(1, (2,)), Child(1, (2,), 3),
    Request("a"), Request("a", ["b"], {"t": (1,)}), Strict(some_value=3), Outer.Inner(4),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_objects_come_back_as_themselves(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"k": [value]}), {"k": [value]})


def test_enum_members_are_the_same_objects_and_work_as_keys() -> None:
    got = round_trip({Color.RED: 1, "x": Access.READ | Access.WRITE, Word.YES: 2, Point(1, 2): 3})
    assert next(iter(got)) is Color.RED
    assert Word.YES in got
    assert type(list(got)[-1]) is Point


def test_dataclass_state_comes_back_without_running_its_code() -> None:
    value = sampling()
    value.note = "not a field"  # type: ignore[attr-defined]
    got = round_trip(value)
    assert vars(got) == vars(value)
    assert got.stop == ["x", "added by __post_init__", "later"]
    cached = Cached(2)
    assert cached.twice == 4
    assert vars(round_trip(cached)) == {"a": 2, "twice": 4}


def test_tensors_inside_objects_are_views() -> None:
    value = Frozen(1, {"t": torch.ones(5000), "s": Request("r", data=np.ones(5000))})
    got, lease = leased(value)
    assert got.t["t"].sum() == 5000
    assert got.t["s"].data.sum() == 5000
    assert lease.live == 2
    del got
    assert lease.live == 0


def test_struct_values_win_over_its_post_init() -> None:
    value = Lax(1)
    value.more = (1,)  # type: ignore[attr-defined]
    got = round_trip(value)
    assert (got.a, got.more) == (2, (1,))


def test_objects_that_hide_state_are_refused() -> None:
    @dataclasses.dataclass
    class Local:
        a: int

    loose = LoosePoint(1, 2)
    loose.note = 1  # type: ignore[attr-defined]
    unset = Cached(1)
    del unset.a
    for value, why in [
        (Local(1), "cannot be found by that path"),
        (DictLike(), "is a subclass of dict"),
        (loose, "attributes beside its items: note"),
        (unset, "its field 'a' is not set"),
        (enum.Enum("Made", "A")["A"], "cannot be found by that path"),
        (ValueError("x"), "the class builtins:ValueError is not known"),
    ]:
        with pytest.raises(CodecError, match=rf"x\[0\]: \w+ cannot be carried: .*{why}"):
            plan({"x": [value]})


@pytest.mark.parametrize("code", [lambda: 1, len, [].append, functools.partial(len), (n for n in ())], ids=repr)
def test_code_is_refused_with_advice_that_helps(code: Any) -> None:
    with pytest.raises(
        CodecError, match=r"on_done: \w+ cannot be carried: code cannot be carried .*send the name"
    ) as caught:
        plan({"on_done": code})
    assert "register_type" not in str(caught.value)


def test_a_culprit_inside_an_object_has_its_path() -> None:
    with pytest.raises(CodecError, match=r"p\.t\.data\[1\]: object cannot"):
        plan({"p": Frozen(1, Request("x", data=[0, object()]))})


@pytest.mark.parametrize("cls", [Request, Frozen, Point])
def test_nested_as_deep_as_it_can_be_read(cls: Any) -> None:
    """What is too deep for the receiver is the sender's error."""
    frames = []
    for depth in (100, 128, 129, 200, 256, 257):
        value: Any = 1
        for _ in range(depth):
            value = Request("", data=value) if cls is Request else cls(1, value)
        try:
            frames.append(plan(value).to_bytes())
        except CodecError:
            break
    with pytest.raises(CodecError, match="nested deeper than"):
        plan(value)
    for frame in frames:
        decode(frame)


@pytest.mark.parametrize("key", [3, 1.5, (1, 2), None])
def test_attributes_without_a_name_are_refused_by_the_sender(key: Any) -> None:
    for value in (Sampling(1.0), Lax(1)):
        vars(value)[key] = 1
        with pytest.raises(
            CodecError, match=rf"p: {type(value).__name__} cannot be carried: the name of one of its attr"
        ):
            plan({"p": value})


class Boastful(NamedTuple):
    x: int
    y: int


class Iterates(Boastful):
    """Its items are those of the tuple, whatever it says of itself."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return iter((7, 8, 9))

    def __len__(self) -> int:
        return 3


def test_a_named_tuple_with_an_iterator_of_its_own() -> None:
    got = decode(plan([Iterates(1, 2), "behind"]).to_bytes())
    assert (type(got[0]), got[0].x, got[0].y, got[1]) == (Iterates, 1, 2, "behind")


# -- classes that the receiver does not know

LATE = """
import dataclasses, enum, msgspec
from omni_fastshm import register_type

@dataclasses.dataclass
class Late:
    a: int

class Odd:
    def __init__(self, a): self.a = a

register_type(Odd, lambda o: o.a, Odd)
"""


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "late_codec_module.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import late_codec_module

    yield late_codec_module
    sys.modules.pop("late_codec_module", None)


def test_modules_are_imported_only_where_listed(late: Any) -> None:
    frame = plan([late.Late(3)]).to_bytes()
    assert decode(frame)[0].a == 3
    del sys.modules["late_codec_module"]
    for types in ((), ("late_codec_module:Other",), ["late_codec_module"]):
        with pytest.raises(
            CodecError, match=r"dataclass of the class late_codec_module:Late, unknown here: .*types.*register_type"
        ):
            decode(frame, types=types)
        assert "late_codec_module" not in sys.modules
    got = decode(frame, types=["late_codec_module:Late"])
    assert got[0].a == 3
    assert type(got[0]) is sys.modules["late_codec_module"].Late


def test_a_listed_module_that_fails_to_import_is_named(tmp_path: Path, late: Any) -> None:
    frame = plan(late.Late(3)).to_bytes()
    del sys.modules["late_codec_module"]
    (tmp_path / "late_codec_module.py").write_text("1 / 0")
    import importlib

    importlib.invalidate_caches()
    with pytest.raises(CodecError, match="importing late_codec_module failed with ZeroDivisionError"):
        decode(frame, types=["late_codec_module:Late"])


def test_a_listed_module_may_register_its_classes(late: Any) -> None:
    frame = plan(late.Odd("x")).to_bytes()
    assert decode(frame).a == "x"


def swapped(value: Any, old: str, new: str) -> bytes:
    """The frame of `value` with one name in it exchanged for another of the same length."""
    assert len(old) == len(new)
    frame = plan(value).to_bytes()
    assert old.encode() in frame
    return frame.replace(old.encode(), new.encode())


def test_names_on_the_wire_give_classes_of_the_right_kind_only() -> None:
    here = __name__
    for value, old, new in [
        (Frozen(1), f"{here}:Frozen", f"{here}:Access"),  # an Enum, not a dataclass
        (Request("x"), f"{here}:Request", f"{here}:LATE___"),
        (Color.RED, f"{here}:Color", f"{here}:Outer"),
        (Point(1, 2), f"{here}:Point", f"{here}:plan_"),
        (Frozen(1), f"{here}:Frozen", f"{here}:pytest"),
    ]:
        with pytest.raises(CodecError, match=r"is no .* class|unknown here"):
            decode(swapped(value, old, new))
    with pytest.raises(CodecError, match="unknown here"):
        decode(swapped(Frozen(1), f"{here}:Frozen", "os.path:system".ljust(len(here) + 7, "m")))


def test_a_class_of_the_senders_script_has_advice_that_helps() -> None:
    """Its module is another one in each program: neither importing nor listing it would."""
    path = f"{__name__}:Frozen"
    frame = swapped(Frozen(1), path, "__main__:Froze".ljust(len(path), "n"))
    with pytest.raises(CodecError, match=r"class __main__:Froze.*script that the sender.* move it into a module"):
        decode(frame, types=["__main__:Frozen"])


def test_classes_that_differ_between_the_sides_are_reported() -> None:
    for value, old, new, why in [
        (FrozenSlots(1, ()), "\xa1b", "\xa1c", "no field 'c' here"),
        (Request("x"), "tags", "tegs", "differ between the two sides"),
        (Color.RED, "RED", "BED", "no member 'BED' here"),
    ]:
        frame = plan(value).to_bytes().replace(old.encode("latin1"), new.encode("latin1"))
        with pytest.raises(CodecError, match=why):
            decode(frame)


def test_lazy_module_attributes_are_not_triggered(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    lazy = types.ModuleType("lazy_codec_module")
    asked: list[str] = []
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_codec_module", lazy)
    path = f"{__name__}:Frozen"
    with pytest.raises(CodecError, match="unknown here"):
        decode(swapped(Frozen(1), path, "lazy_codec_module:" + "F" * (len(path) - 18)))
    assert asked == []


# -- register_type


class Audio:
    def __init__(self, samples: torch.Tensor, rate: int) -> None:
        self.samples, self.rate = samples, rate


class Title(str):
    pass


@pytest.fixture
def registry() -> Iterator[None]:
    from omni_fastshm import codec

    before = dict(codec._by_class), dict(codec._by_name)
    yield
    for table, saved in zip((codec._by_class, codec._by_name), before, strict=True):
        table.clear()
        table.update(saved)  # type: ignore[arg-type]
    codec.CODEC.forget_types()


@pytest.mark.usefixtures("registry")
def test_registered_classes_travel_their_own_way() -> None:
    with pytest.raises(CodecError):
        plan(Audio(torch.ones(1), 1))
    register_type(Audio, lambda a: {"s": a.samples, "r": a.rate}, lambda d: Audio(d["s"], d["r"]))
    register_type(Title, str, Title, name="title")
    register_type(Frozen, lambda f: f.a, Frozen, name="short-frozen")
    got, lease = leased([Audio(torch.ones(3000), 16000), Title("x"), {Title("k"): Frozen(1, "dropped")}])
    assert (got[0].rate, got[0].samples.sum()) == (16000, 3000)
    assert type(got[1]) is Title
    assert type(next(iter(got[2]))) is Title
    assert got[2] == {"k": Frozen(1)}
    assert lease.live == 1


@pytest.mark.usefixtures("registry")
def test_registering_is_checked() -> None:
    register_type(Audio, str, str, name="audio")
    register_type(Audio, str, str, name="audio")
    with pytest.raises(CodecError, match="'audio' is already the name of"):
        register_type(Title, str, str, name="audio")
    with pytest.raises(CodecError, match="wants a class"):
        register_type("Audio", str, str)  # type: ignore[arg-type]


@pytest.mark.usefixtures("registry")
def test_failing_functions_are_named_with_the_place() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("no good")

    register_type(Audio, fail, fail, name="audio")
    with pytest.raises(CodecError, match=r"x\[0\]: Audio cannot be carried: ValueError: no good"):
        plan({"x": [Audio(torch.ones(1), 1)]})
    register_type(Audio, lambda a: a.rate, fail, name="audio")
    frame = plan(Audio(torch.ones(1), 1)).to_bytes()
    with pytest.raises(CodecError, match="registered for 'audio' failed with ValueError: no good"):
        decode(frame)
    register_type(Audio, lambda a: a, fail, name="audio")
    with pytest.raises(CodecError, match="deeper than"):
        plan(Audio(torch.ones(1), 1))
    register_type(Audio, lambda a: object(), fail, name="audio")
    with pytest.raises(CodecError, match=r"x\.state: object cannot be carried"):
        plan({"x": Audio(torch.ones(1), 1)})


@pytest.mark.usefixtures("registry")
def test_a_name_that_the_receiver_never_registered() -> None:
    register_type(Audio, lambda a: a.rate, str, name="audio")
    frame = plan(Audio(torch.ones(1), 1)).to_bytes().replace(b"audio", b"video")
    with pytest.raises(CodecError, match=r"registered as 'video', unknown here: call register_type\(\)"):
        decode(frame)


def test_classes_made_on_the_fly_are_not_kept_for_ever() -> None:
    import gc
    import weakref

    made = [type(f"Made{i}", (), {}) for i in range(5000)]
    first = weakref.ref(made[0])
    for cls in made:
        with pytest.raises(CodecError):
            plan(cls())
    del made, cls
    gc.collect()
    assert first() is None
    assert _codec.Kind(_codec.KIND_REFUSED, "x").name == "x"
