"""The host profile: what its serializer makes of the types that msgpack lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from omni_fastshm import _codec
from omni_fastshm._codec import Kind
from omni_fastshm._codec_classes import import_path, is_enum, is_struct

__all__ = ["host_kind"]

Encode = Callable[[Any], Any]

_HOST_NATIVE = (
    "uuid:UUID",
    "decimal:Decimal",
    "datetime:datetime",
    "datetime:date",
    "datetime:time",
    "datetime:timedelta",
)


def _host_struct(cls: Any) -> Encode:
    config = cls.__struct_config__
    names = tuple(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    defaults = dict(zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False))

    def is_default(name: str, value: Any) -> bool:
        if name not in defaults:
            return False
        default = defaults[name]
        if value is default:
            return True
        factory = getattr(default, "factory", None)
        return factory in (list, dict, set) and type(value) is factory and not value

    def as_list(value: Any) -> list[Any]:
        tag = [] if config.tag is None else [config.tag]
        return tag + [getattr(value, name) for name, _ in names]

    def as_dict(value: Any) -> dict[str, Any]:
        out = {} if config.tag is None else {config.tag_field: config.tag}
        for name, wire_name in names:
            item = getattr(value, name)
            if item is msgspec.UNSET or (config.omit_defaults and is_default(name, item)):
                continue
            out[wire_name] = item
        return out

    return as_list if config.array_like else as_dict


def _host_dataclass(cls: type) -> Encode:
    fields = tuple(field.name for field in dataclasses.fields(cls))

    def as_dict(value: Any) -> dict[str, Any]:
        state = {name: getattr(value, name) for name in fields}
        return {name: item for name, item in state.items() if item is not msgspec.UNSET}

    return as_dict


def host_kind(cls: type) -> Kind | None:
    if is_enum(cls):
        return Kind(_codec.KIND_AS, "enum", lambda value: value.value)
    if is_struct(cls):
        return Kind(_codec.KIND_AS, None, _host_struct(cls))
    if dataclasses.is_dataclass(cls):
        return Kind(_codec.KIND_AS, None, _host_dataclass(cls))
    if issubclass(cls, dict):
        return Kind(_codec.KIND_AS, None, dict)
    if issubclass(cls, list | tuple | set | frozenset):
        return Kind(_codec.KIND_AS, None, list)
    if cls is memoryview:
        return Kind(_codec.KIND_AS, None, bytes)
    if import_path(cls) in _HOST_NATIVE:
        return Kind(_codec.KIND_NATIVE)
    return None
