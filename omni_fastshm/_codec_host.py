"""The host profile: what its serializer makes of the types that msgpack lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import astuple

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
    if config.array_like:
        tag = [] if config.tag is None else [config.tag]
        return lambda value: tag + list(astuple(value))
    head = {} if config.tag is None else {config.tag_field: config.tag}
    defaults = dict(zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False))
    if not config.omit_defaults:
        defaults = {}
    # Field by field: its name, what is left out of it, and of what class it is left out when empty. A host's structs
    # have dozens of fields, nearly all of them unset, so that these loops are most of what a small payload costs.
    unset = msgspec.UNSET
    rows = tuple(
        (wire_name, defaults.get(name, unset), getattr(defaults.get(name), "factory", None))
        for name, wire_name in zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True)
    )
    names = tuple((wire_name, default) for wire_name, default, _ in rows)

    def as_plain_dict(value: Any) -> dict[str, Any]:
        return {
            wire_name: item
            for (wire_name, default), item in zip(names, astuple(value))  # noqa: B905 - strict takes a third longer
            if item is not default and item is not unset
        }

    def as_dict(value: Any) -> dict[str, Any]:
        out = dict(head)
        for (wire_name, default, factory), item in zip(rows, astuple(value), strict=True):
            if item is default or item is unset:
                continue
            if factory in (list, dict, set) and type(item) is factory and not item:
                continue
            out[wire_name] = item
        return out

    return as_dict if head or any(factory for _, _, factory in rows) else as_plain_dict


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
