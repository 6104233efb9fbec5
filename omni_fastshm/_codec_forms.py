"""Types of the standard library, torch, NumPy and Pillow that travel in a form of their own."""

from __future__ import annotations

import builtins
import collections
import datetime
import importlib
import numbers
import sys
from collections.abc import Callable
from typing import Any

from omni_fastshm._codec_dtypes import describe_dtype, parse_dtype
from omni_fastshm.errors import CodecError, MetadataError

__all__ = ["FORMS", "form_name", "restore_form"]

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


def restore_form(name: str, items: tuple[Any, ...]) -> Any:
    known = FORMS.get(name)
    if known is None:
        raise CodecError(f"the payload holds a {name}, which this version of omni_fastshm does not know")
    try:
        (state,) = items
        return known[1](state)
    except (CodecError, MemoryError):
        raise
    except ImportError as error:
        raise CodecError(f"the payload holds a {name}, which needs a package that is missing here: {error}") from error
    except Exception as error:
        raise MetadataError(f"a damaged payload: {name}: {type(error).__name__}: {error}") from error


# Constructors take more than their own encoders send: one counts through a range of 10**12 items, another computes
# "1e999999999" digit by digit, a third makes as many bytes as an int says. So each part must be of the very kind that
# the encoder sends before any constructor sees it.

Kinds = type | tuple[type, ...]
_MAYBE_TEXT = (str, bytes, type(None))
_ZONE = (datetime.tzinfo, type(None))


def _checked(state: Any, *kinds: Kinds) -> Any:
    """`state`, a tuple (a list in the host profile) of one item of each of these kinds."""
    if not isinstance(state, (tuple, list)) or len(state) != len(kinds):
        raise ValueError(f"it is not made of {len(kinds)} parts")
    for item, kind in zip(state, kinds, strict=True):
        if not isinstance(item, kind):
            raise TypeError(f"one of its parts is a {type(item).__name__}")
    return state


def _from(module: str, name: str, kind: Kinds) -> Decode:
    """A constructor with one argument of that kind; imported when it is first called."""

    def make(state: Any) -> Any:
        _checked((state,), kind)
        return getattr(importlib.import_module(module), name)(state)

    return make


def _spread(module: str, name: str, *kinds: Kinds) -> Decode:
    """The same with several arguments."""
    return lambda state: getattr(importlib.import_module(module), name)(*_checked(state, *kinds))


def _sizes(state: Any) -> Any:
    if not isinstance(state, (tuple, list)):
        raise TypeError(f"a {type(state).__name__} is no shape")
    return _checked(state, *(int,) * len(state))


def _encode_memoryview(view: memoryview) -> tuple[Any, ...]:
    if len(view.format.lstrip("@")) != 1:
        raise TypeError(f"its items have the format {view.format!r}; send an array instead")
    return view.format, view.shape, view.readonly, view.tobytes()


def _decode_memoryview(state: Any) -> memoryview:
    format_, shape, readonly, data = _checked(state, str, tuple, bool, bytes)
    _sizes(shape)
    view = memoryview(data if readonly else bytearray(data))
    if 0 in shape and tuple(shape) != (0,):
        raise ValueError("an empty memoryview of several dimensions")
    return view if format_ == "B" and len(shape) == 1 else view.cast("B").cast(format_, list(shape))


def _encode_datetime(value: Any) -> tuple[Any, ...]:
    return (*value.timetuple()[:6], value.microsecond, value.tzinfo, value.fold)


def _decode_datetime(state: Any) -> Any:
    *parts, fold = _checked(state, *(int,) * 7, _ZONE, int)
    return datetime.datetime(*parts, fold=fold)


def _encode_time(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _decode_time(state: Any) -> Any:
    *parts, fold = _checked(state, *(int,) * 4, _ZONE, int)
    return datetime.time(*parts, fold=fold)


def _decode_timezone(state: Any) -> Any:
    return datetime.timezone(*_checked(state, *(datetime.timedelta, str)[: 2 if len(state) > 1 else 1]))


def _encode_zone(value: Any) -> str:
    if value.key is None:
        raise TypeError("it was read from a file and has no key")
    return str(value.key)


_FACTORIES = ("int", "float", "complex", "bool", "str", "bytes", "list", "tuple", "dict", "set", "frozenset")


def _encode_defaultdict(value: Any) -> tuple[str | None, dict[Any, Any]]:
    factory = value.default_factory
    if factory is None:
        return None, dict(value)
    name = getattr(factory, "__name__", "")
    if name not in _FACTORIES or getattr(builtins, name) is not factory:
        raise TypeError(f"its default_factory {factory!r} is not a builtin type; send dict(x)")
    return name, dict(value)


def _decode_defaultdict(state: Any) -> Any:
    name, items = _checked(state, (str, type(None)), dict)
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"unknown default_factory {name!r}")
    return collections.defaultdict(None if name is None else getattr(builtins, name), items)


def _named_in_torch(name: Any) -> Any:
    import torch

    _checked((name,), str)
    found = vars(torch).get(name)  # getattr would run torch's own, which imports submodules by the names it is asked
    if type(found).__name__ not in ("dtype", "layout", "memory_format"):
        raise ValueError(f"torch.{name} is no constant")
    return found


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


_LONGEST_EMPTY = 1 << 20  # Pillow makes a table of its rows, also where they are empty


def _encode_image(image: Any) -> tuple[Any, ...]:
    image.load()  # a file that was only opened: reading it settles mode, palette and info
    palette = None
    if image.palette is not None and image.mode in ("P", "PA"):
        kept = image.palette.mode
        palette = (kept, image.im.getpalette(kept, kept))
    return image.mode, image.size, palette, dict(image.info), image.tobytes()


def _decode_image(state: Any) -> Any:
    from PIL import Image

    mode, size, palette, info, data = _checked(state, str, (tuple, list), (tuple, list, type(None)), dict, bytes)
    width, height = _checked(size, int, int)
    row = (width + 7) // 8 if mode == "1" else width * len(Image.new(mode, (1, 1)).tobytes())
    if min(width, height) < 0 or row * height != len(data):  # checked before anything of that size is made
        raise ValueError(f"{len(data)} bytes are no {mode} image of {width} x {height}")
    if not data and max(width, height) > _LONGEST_EMPTY:
        raise ValueError(f"an image without a pixel, but of {width} x {height}")
    image = Image.frombytes(mode, (width, height), data)
    if palette is not None:
        kept, colours = _checked(palette, str, bytes)
        image.putpalette(colours, kept)
    image.info = info
    return image


def _encode_rational(value: Any) -> tuple[Any, Any]:
    if not isinstance(value.numerator, numbers.Real):
        raise TypeError(f"its numerator is a {type(value.numerator).__name__}")
    return value.numerator, value.denominator


FORMS: dict[str, tuple[Encode, Decode]] = {
    "builtins:range": (lambda r: (r.start, r.stop, r.step), _spread("builtins", "range", int, int, int)),
    "builtins:ellipsis": (lambda _: None, lambda _: Ellipsis),
    "builtins:memoryview": (_encode_memoryview, _decode_memoryview),
    "uuid:UUID": (
        lambda u: u.int,
        lambda number: importlib.import_module("uuid").UUID(int=_checked((number,), int)[0]),
    ),
    "decimal:Decimal": (str, _from("decimal", "Decimal", str)),
    "fractions:Fraction": (
        lambda f: (f.numerator, f.denominator),
        _spread("fractions", "Fraction", numbers.Integral, numbers.Integral),
    ),
    "datetime:datetime": (_encode_datetime, _decode_datetime),
    "datetime:date": (lambda d: (d.year, d.month, d.day), _spread("datetime", "date", int, int, int)),
    "datetime:time": (_encode_time, _decode_time),
    "datetime:timedelta": (
        lambda d: (d.days, d.seconds, d.microseconds),
        _spread("datetime", "timedelta", int, int, int),
    ),
    "datetime:timezone": (lambda z: z.__getinitargs__(), _decode_timezone),
    "zoneinfo:ZoneInfo": (_encode_zone, _from("zoneinfo", "ZoneInfo", str)),
    "pathlib:PosixPath": (str, _from("pathlib", "PosixPath", str)),
    "pathlib:PurePosixPath": (str, _from("pathlib", "PurePosixPath", str)),
    "pathlib:PureWindowsPath": (str, _from("pathlib", "PureWindowsPath", str)),
    "collections:OrderedDict": (dict, _from("collections", "OrderedDict", dict)),
    "collections:defaultdict": (_encode_defaultdict, _decode_defaultdict),
    "collections:Counter": (dict, _from("collections", "Counter", dict)),
    "collections:deque": (
        lambda d: (list(d), d.maxlen),
        _spread("collections", "deque", list, (int, type(None))),
    ),
    "types:SimpleNamespace": (
        lambda n: dict(vars(n)),
        lambda state: importlib.import_module("types").SimpleNamespace(**_checked((state,), dict)[0]),
    ),
    "torch:Size": (tuple, lambda state: importlib.import_module("torch").Size(_sizes(state))),
    "torch:dtype": (_torch_name, _named_in_torch),
    "torch:layout": (_torch_name, _named_in_torch),
    "torch:memory_format": (_torch_name, _named_in_torch),
    "torch:device": (str, _from("torch", "device", str)),
    "numpy:dtype": (describe_dtype, lambda state: parse_dtype(*_checked((state,), bytes))),
    "PIL.Image:Image": (_encode_image, _decode_image),
    "PIL.PngImagePlugin:iTXt": (
        lambda t: (str(t), t.lang, t.tkey),
        _spread("PIL.PngImagePlugin", "iTXt", str, _MAYBE_TEXT, _MAYBE_TEXT),
    ),
    "PIL.TiffImagePlugin:IFDRational": (
        _encode_rational,
        _spread("PIL.TiffImagePlugin", "IFDRational", numbers.Real, numbers.Integral),
    ),
}


def form_name(cls: type) -> str | None:
    """The name of a type with a form of its own, or None."""
    numpy, image = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if numpy is not None and issubclass(cls, numpy.dtype):
        return "numpy:dtype"
    if image is not None and issubclass(cls, image.Image):
        return "PIL.Image:Image" if cls.__module__.partition(".")[0] == "PIL" else None
    module = "pathlib" if cls.__module__ == "pathlib._local" else cls.__module__
    path = f"{module}:{cls.__qualname__}"
    return path if path in FORMS and cls is not type(None) else None
