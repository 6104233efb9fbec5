"""Payloads as bytes: `plan` measures and writes them, `decode` reads them back.

The compiled module ``_codec`` does the walking and the copying; the modules ``_codec_*`` know the rare types.
Here they are put together, with the classes that users register.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

from omni_fastshm import _codec
from omni_fastshm._codec import COPY_BELOW, Kind, Plan
from omni_fastshm._codec_classes import class_kind, import_module_of, import_path, restore_object
from omni_fastshm._codec_dtypes import describe_dtype, parse_dtype
from omni_fastshm._codec_forms import FORMS, form_name, restore_form
from omni_fastshm._codec_host import host_kind
from omni_fastshm._staging_devices import devices
from omni_fastshm.errors import CodecError

__all__ = ["CODEC", "COPY_BELOW", "Plan", "decode", "decoder", "plan", "register_type"]

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]

_CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(types.CodeType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)
_by_class: dict[type, tuple[str, Encode]] = {}
_by_name: dict[str, tuple[type, Decode]] = {}


def register_type(cls: type, encode: Encode, decode: Decode, *, name: str | None = None) -> None:
    """Teach the codec a class; call it on both sides, with the same name.

    Args:
        cls: exactly this class, not its subclasses. Comes before what the codec would do with it by itself.
        encode: takes an object apart into anything that the codec carries; tensors and arrays in it are copied
            once, like all others.
        decode: makes an object of what `encode` returned.
        name: the name on the wire; None means the class's import path, ``module:Class``.

    Raises:
        CodecError: `cls` is not a class, or another class has that name.
    """
    if not isinstance(cls, type):
        raise CodecError(f"register_type wants a class, not {cls!r}")
    wire_name = name if name is not None else import_path(cls)
    known = _by_name.get(wire_name)
    if known is not None and known[0] is not cls and import_path(known[0]) != import_path(cls):
        raise CodecError(f"{wire_name!r} is already the name of {known[0]!r}; give {cls!r} another `name`")
    _by_class[cls] = (wire_name, encode)
    _by_name[wire_name] = (cls, decode)
    CODEC.forget_types()


def _restore_custom(name: str, items: tuple[Any, ...], types: Collection[str]) -> Any:
    known = _by_name.get(name)
    if known is None and name in types:
        import_module_of(name)
        known = _by_name.get(name)
    if known is None:
        raise CodecError(
            f"the payload holds an object registered as {name!r}, unknown here: "
            "call register_type() with that name on the receiving side, too"
        )
    try:
        (state,) = items
        return known[1](state)
    except Exception as error:
        raise CodecError(
            f"the decode function registered for {name!r} failed with {type(error).__name__}: {error}"
        ) from error


def _restore(mark: int, name: str, items: tuple[Any, ...], types: Collection[str]) -> Any:
    """Make the object that a marked list stands for."""
    if mark == _codec.MARK_STANDARD:
        return restore_form(name, items)
    if mark == _codec.MARK_CUSTOM:
        return _restore_custom(name, items, types)
    return restore_object(mark, name, items, types)


def _refusal(cls: type) -> Kind:
    path = import_path(cls)
    for base in (str, int, float, complex, bytes, bytearray, list, tuple, dict, set, frozenset):
        if issubclass(cls, base):
            return Kind(
                _codec.KIND_REFUSED,
                f"{path} is a subclass of {base.__name__}, which would come back as another type; "
                f"send {base.__name__}(x), or register it with register_type()",
            )
    if issubclass(cls, _CODE):
        return Kind(
            _codec.KIND_REFUSED,
            f"code cannot be carried ({path}): send the name of the function, or what it returns; "
            "the receiver has the code itself",
        )
    return Kind(
        _codec.KIND_REFUSED,
        f"the class {path} is not known; register it with register_type() on both sides, "
        "send its parts in a dict, or set allow_pickle",
    )


def _array_kind(cls: type, host: bool) -> Kind | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(cls, torch.Tensor):
        if cls is torch.Tensor or cls is torch.nn.Parameter:
            return Kind(_codec.KIND_TENSOR)
        return Kind(
            _codec.KIND_REFUSED,
            f"{import_path(cls)} is a subclass of torch.Tensor; send x.as_subclass"
            "(torch.Tensor) or the tensors it is made of",
        )
    if numpy is None:
        return None
    if issubclass(cls, numpy.ndarray):
        if cls is numpy.ndarray or cls is numpy.recarray:
            return Kind(_codec.KIND_ARRAY)
        return Kind(
            _codec.KIND_REFUSED,
            f"{import_path(cls)} is a subclass of numpy.ndarray that keeps more than "
            "its items; send numpy.asarray(x), and what else it holds, by itself",
        )
    if issubclass(cls, numpy.generic):
        if host:
            return Kind(_codec.KIND_REFUSED, "the host's format has no NumPy scalars; send x.item()")
        return Kind(_codec.KIND_SCALAR)
    return None


def _classify(cls: type, host: bool) -> Kind:
    if cls in _by_class:
        name, encode = _by_class[cls]
        return Kind(_codec.KIND_CUSTOM, name, encode)
    kind = _array_kind(cls, host)
    if kind is None:
        kind = host_kind(cls) if host else class_kind(cls)
    if kind is None and (name_ := form_name(cls)) is not None and (not host or name_.startswith("PIL.")):
        kind = Kind(_codec.KIND_STANDARD, name_, FORMS[name_][0])
    return kind if kind is not None else _refusal(cls)


CODEC = _codec.Codec(
    classify=_classify, restore=_restore, describe_dtype=describe_dtype, parse_dtype=parse_dtype, devices=devices
)
plan = CODEC.plan
decode = CODEC.decode
decoder = CODEC.decoder
