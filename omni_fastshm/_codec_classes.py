"""Dataclasses, Structs, NamedTuples and Enums: taken apart, and found again by their import path."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Collection
from types import MemberDescriptorType
from typing import Any

import msgspec

from omni_fastshm import _codec
from omni_fastshm._codec import Kind
from omni_fastshm.errors import CodecError, MetadataError

__all__ = ["class_kind", "import_module_of", "import_path", "restore_object"]

Encode = Callable[[Any], Any]

HOW_TO_KNOW = "import its module on the receiving side, list it under `types:`, or register it with register_type()"


def import_path(cls: type) -> str:
    # A spawned process knows its parent's main module by another name than the parent does.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def look_up(path: str) -> Any:
    """What stands at ``module:qualified.name`` among the modules imported so far; None if nothing does.

    Reads the dictionaries of module and class: getattr would run a module's own ``__getattr__``, which in lazy
    packages imports whatever name the wire holds.
    """
    module, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if found is None:
            return None
        found = getattr(found, "__dict__", {}).get(part)
    return found


def find_class(path: str, types: Collection[str], fits: Callable[[type], bool], what: str) -> type:
    found = look_up(path)
    if found is None and path in types:
        import_module_of(path)
        found = look_up(path)
    if found is None:
        how = HOW_TO_KNOW
        if path.startswith("__main__:"):  # which is another module in each program
            how = "it stands in the script that the sender was started with: move it into a module that both import"
        raise CodecError(f"the payload holds a {what} of the class {path}, unknown here: {how}")
    if not isinstance(found, type) or not fits(found):
        raise CodecError(f"the payload holds a {what} of the class {path}, but here that is no {what} class")
    return found


def import_module_of(path: str) -> None:
    module = path.partition(":")[0]
    try:
        importlib.import_module(module)
    except Exception as error:
        raise CodecError(
            f"`types:` lists {path}, but importing {module} failed with {type(error).__name__}: {error}"
        ) from error


def is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and type(getattr(cls, "_fields", None)) is tuple


def is_enum(cls: type) -> bool:
    return issubclass(cls, enum.Enum)


def is_struct(cls: type) -> bool:
    return issubclass(cls, msgspec.Struct)


def _is_dataclass(cls: type) -> bool:
    if not dataclasses.is_dataclass(cls):
        return False
    base: type | None = cls
    while base is not None and base is not object:
        if not base.__flags__ & (1 << 9):  # not made by a class statement: it keeps state that cannot be seen
            return False
        base = base.__base__
    return True


def _slots(cls: type) -> dict[str, Any]:
    return {
        name: member
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    }


def _dataclass_extractor(cls: type) -> Encode:
    slots = tuple((name, member.__get__) for name, member in _slots(cls).items())
    has_dict = bool(cls.__dictoffset__)
    fields = tuple(field.name for field in dataclasses.fields(cls))

    def extract(value: Any) -> dict[str, Any]:
        state: dict[str, Any] = dict(vars(value)) if has_dict else {}
        for name, get in slots:
            try:
                state[name] = get(value)
            except AttributeError:
                continue
        for name in fields:
            if name not in state and not hasattr(value, name):
                raise TypeError(f"its field {name!r} is not set")
        return state

    return extract


def _restore_dataclass(cls: type, state: dict[str, Any]) -> Any:
    value: Any = object.__new__(cls)
    slots = _slots(cls)
    own = value.__dict__ if cls.__dictoffset__ else None
    for name, item in state.items():
        if name in slots:
            slots[name].__set__(value, item)
        elif own is not None:
            own[name] = item
        else:
            raise CodecError(f"{import_path(cls)} has no field {name!r} here: the two sides' classes differ")
    for field in dataclasses.fields(cls):
        if field.name not in state and not hasattr(value, field.name):
            raise CodecError(f"{import_path(cls)} came without {field.name!r}: the two sides' classes differ")
    return value


def _struct_extractor(cls: Any) -> Encode:
    fields = tuple(cls.__struct_fields__)
    has_dict = bool(cls.__dictoffset__)

    def extract(value: Any) -> dict[str, Any]:
        state = {name: getattr(value, name) for name in fields}
        if has_dict:
            state.update(vars(value))
        return state

    return extract


def _restore_struct(cls: Any, state: dict[str, Any]) -> Any:
    fields = cls.__struct_fields__
    missing = [name for name in fields if name not in state]
    extra = {name: item for name, item in state.items() if name not in fields}
    if missing or (extra and not cls.__dictoffset__):
        raise CodecError(f"{import_path(cls)}: fields {missing or list(extra)} differ between the two sides")
    value = cls(**{name: state[name] for name in fields})
    for name in fields:
        # A __post_init__ may have changed what it was given; the sender's object is what counts.
        if getattr(value, name) is not state[name]:
            msgspec.structs.force_setattr(value, name, state[name])
    if extra:
        value.__dict__.update(extra)
    return value


def _check_bare(value: Any) -> None:
    if getattr(value, "__dict__", None):
        raise TypeError(f"it has attributes beside its items: {', '.join(map(str, vars(value)))}")


def _enum_token(value: Any) -> Any:
    name = value._name_
    if name is not None and type(value).__members__.get(name) is value:
        return name
    return value._value_  # a combination of flags


def _restore_enum(cls: Any, token: Any) -> Any:
    if type(token) is str and token in cls.__members__:
        return cls.__members__[token]
    if type(token) is int and issubclass(cls, enum.Flag):
        return cls(token)
    raise CodecError(f"{import_path(cls)} has no member {token!r} here: the two sides' classes differ")


_Fits = Callable[[type], bool]
_CLASSES: dict[int, tuple[str, _Fits]] = {
    _codec.MARK_DATACLASS: ("dataclass", _is_dataclass),
    _codec.MARK_STRUCT: ("Struct", is_struct),
    _codec.MARK_NAMEDTUPLE: ("named tuple", is_named_tuple),
    _codec.MARK_ENUM: ("Enum", is_enum),
}


def restore_object(mark: int, name: str, items: tuple[Any, ...], types: Collection[str]) -> Any:
    """Make the object of a dataclass, Struct, NamedTuple or Enum that a marked list stands for."""
    what, fits = _CLASSES[mark]
    cls: Any = find_class(name, types, fits, what)
    if mark == _codec.MARK_NAMEDTUPLE:
        if len(items) != len(cls._fields):
            raise CodecError(f"{name} has {len(cls._fields)} fields here, {len(items)} came")
        return tuple.__new__(cls, items)
    if len(items) != 1:
        raise MetadataError(f"a damaged payload: {name} came with {len(items)} parts")
    if mark == _codec.MARK_ENUM:
        return _restore_enum(cls, items[0])
    if type(items[0]) is not dict or not all(type(key) is str for key in items[0]):
        raise MetadataError(f"a damaged payload: the fields of {name} have no names")
    try:
        return _restore_struct(cls, items[0]) if mark == _codec.MARK_STRUCT else _restore_dataclass(cls, items[0])
    except CodecError:
        raise
    except Exception as error:
        raise CodecError(f"{name} cannot be restored: {type(error).__name__}: {error}") from error


def class_kind(cls: type) -> Kind | None:
    """Classes that are found again by their import path."""
    code: int
    extract: Any = None
    if is_enum(cls):
        code, extract = _codec.KIND_ENUM, _enum_token
    elif is_struct(cls):
        code, extract = _codec.KIND_STRUCT, _struct_extractor(cls)
    elif is_named_tuple(cls):
        code, extract = _codec.KIND_NAMEDTUPLE, _check_bare
    elif _is_dataclass(cls):
        code, extract = _codec.KIND_DATACLASS, _dataclass_extractor(cls)
    else:
        return None
    path = import_path(cls)
    if look_up(path) is not cls:
        return Kind(
            _codec.KIND_REFUSED,
            f"the class {path} cannot be found by that path (it is made inside a function, or another object "
            "has its name); move it to the top of a module, or register it with register_type()",
        )
    return Kind(code, path, extract)
