"""Types of the standard library, torch, NumPy and Pillow that travel in a form of their own."""

from __future__ import annotations

import builtins
import importlib
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
    except CodecError:
        raise
    except ImportError as error:
        raise CodecError(f"the payload holds a {name}, which needs a package that is missing here: {error}") from error
    except Exception as error:
        raise MetadataError(f"a damaged payload: {name}: {type(error).__name__}: {error}") from error


def _from(module: str, name: str) -> Callable[..., Any]:
    """A constructor that is imported when it is first called."""

    def make(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    return make


def _spread(make: Callable[..., Any]) -> Decode:
    return lambda state: make(*state)


def _encode_memoryview(view: memoryview) -> tuple[Any, ...]:
    if len(view.format.lstrip("@")) != 1:
        raise TypeError(f"its items have the format {view.format!r}; send an array instead")
    return view.format, view.shape, view.readonly, view.tobytes()


def _decode_memoryview(state: Any) -> memoryview:
    format_, shape, readonly, data = state
    view = memoryview(data if readonly else bytearray(data))
    if 0 in shape and tuple(shape) != (0,):
        raise ValueError("an empty memoryview of several dimensions")
    return view if format_ == "B" and len(shape) == 1 else view.cast("B").cast(format_, list(shape))


def _encode_datetime(value: Any) -> tuple[Any, ...]:
    return (*value.timetuple()[:6], value.microsecond, value.tzinfo, value.fold)


def _decode_datetime(state: Any) -> Any:
    import datetime

    *parts, fold = state
    return datetime.datetime(*parts, fold=fold)


def _encode_time(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _decode_time(state: Any) -> Any:
    import datetime

    *parts, fold = state
    return datetime.time(*parts, fold=fold)


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
    name, items = state
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"unknown default_factory {name!r}")
    return _from("collections", "defaultdict")(None if name is None else getattr(builtins, name), items)


def _named_in_torch(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if type(found).__name__ not in ("dtype", "layout", "memory_format"):
        raise ValueError(f"torch.{name} is no constant")
    return found


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _encode_image(image: Any) -> tuple[Any, ...]:
    image.load()  # a file that was only opened: reading it settles mode, palette and info
    palette = None
    if image.palette is not None and image.mode in ("P", "PA"):
        kept = image.palette.mode
        palette = (kept, image.im.getpalette(kept, kept))
    return image.mode, image.size, palette, dict(image.info), image.tobytes()


def _decode_image(state: Any) -> Any:
    from PIL import Image

    mode, (width, height), palette, info, data = state
    row = (width + 7) // 8 if mode == "1" else width * len(Image.new(mode, (1, 1)).tobytes())
    if min(width, height) < 0 or row * height != len(data):  # checked before anything of that size is made
        raise ValueError(f"{len(data)} bytes are no {mode} image of {width} x {height}")
    image = Image.frombytes(mode, (width, height), data)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info = info
    return image


def _decode_itxt(state: Any) -> Any:
    return _from("PIL.PngImagePlugin", "iTXt")(*state)


FORMS: dict[str, tuple[Encode, Decode]] = {
    "builtins:range": (lambda r: (r.start, r.stop, r.step), _spread(range)),
    "builtins:ellipsis": (lambda _: None, lambda _: Ellipsis),
    "builtins:memoryview": (_encode_memoryview, _decode_memoryview),
    "uuid:UUID": (lambda u: u.int, lambda number: importlib.import_module("uuid").UUID(int=number)),
    "decimal:Decimal": (str, _from("decimal", "Decimal")),
    "fractions:Fraction": (lambda f: (f.numerator, f.denominator), _spread(_from("fractions", "Fraction"))),
    "datetime:datetime": (_encode_datetime, _decode_datetime),
    "datetime:date": (lambda d: (d.year, d.month, d.day), _spread(_from("datetime", "date"))),
    "datetime:time": (_encode_time, _decode_time),
    "datetime:timedelta": (
        lambda d: (d.days, d.seconds, d.microseconds),
        _spread(_from("datetime", "timedelta")),
    ),
    "datetime:timezone": (lambda z: z.__getinitargs__(), _spread(_from("datetime", "timezone"))),
    "zoneinfo:ZoneInfo": (_encode_zone, _from("zoneinfo", "ZoneInfo")),
    "pathlib:PosixPath": (str, _from("pathlib", "PosixPath")),
    "pathlib:PurePosixPath": (str, _from("pathlib", "PurePosixPath")),
    "pathlib:PureWindowsPath": (str, _from("pathlib", "PureWindowsPath")),
    "collections:OrderedDict": (dict, _from("collections", "OrderedDict")),
    "collections:defaultdict": (_encode_defaultdict, _decode_defaultdict),
    "collections:Counter": (dict, _from("collections", "Counter")),
    "collections:deque": (lambda d: (list(d), d.maxlen), _spread(_from("collections", "deque"))),
    "types:SimpleNamespace": (
        lambda n: dict(vars(n)),
        lambda state: importlib.import_module("types").SimpleNamespace(**state),
    ),
    "torch:Size": (tuple, _from("torch", "Size")),
    "torch:dtype": (_torch_name, _named_in_torch),
    "torch:layout": (_torch_name, _named_in_torch),
    "torch:memory_format": (_torch_name, _named_in_torch),
    "torch:device": (str, _from("torch", "device")),
    "numpy:dtype": (describe_dtype, parse_dtype),
    "PIL.Image:Image": (_encode_image, _decode_image),
    "PIL.PngImagePlugin:iTXt": (lambda t: (str(t), t.lang, t.tkey), _decode_itxt),
    "PIL.TiffImagePlugin:IFDRational": (
        lambda r: (r.numerator, r.denominator),
        _spread(_from("PIL.TiffImagePlugin", "IFDRational")),
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
