"""NumPy dtypes as bytes."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from omni_fastshm.errors import CodecError, MetadataError

__all__ = ["describe_dtype", "parse_dtype"]


def _describe(dtype: Any) -> Any:
    import numpy as np

    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.names is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": list(dtype.names),
            "formats": [_describe(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "titles": [field[2] if len(field) > 2 else None for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    if dtype.char in "gG":  # as wide elsewhere, but of another precision
        return f"{dtype.str}@{np.finfo(np.longdouble).nmant}"
    return dtype.str


def describe_dtype(dtype: Any) -> bytes:
    if dtype.hasobject:
        raise TypeError(f"its dtype ({dtype}) holds Python objects; send a list, or set allow_pickle")
    described = _describe(dtype)
    data = described.encode() if isinstance(described, str) else b"{" + msgspec.json.encode(described)
    if len(data) > 65535 or parse_dtype(data) != dtype:
        raise TypeError(f"its dtype ({dtype}) is not one of NumPy's own")
    return data


def _build_dtype(described: Any) -> Any:
    import numpy as np

    if isinstance(described, str):
        name, _, precision = described.partition("@")
        if precision and int(precision) != np.finfo(np.longdouble).nmant:
            raise CodecError("the payload holds a longdouble of another machine's precision; send float64")
        return np.dtype(name)
    if "base" in described:
        return np.dtype((_build_dtype(described["base"]), tuple(described["shape"])))
    spec = {
        "names": described["names"],
        "formats": [_build_dtype(item) for item in described["formats"]],
        "offsets": described["offsets"],
        "itemsize": described["itemsize"],
    }
    if any(title is not None for title in described["titles"]):
        spec["titles"] = described["titles"]
    make: Any = np.dtype  # its stubs know fewer forms than it takes
    return make(spec, align=described["aligned"])


def _check_extent(dtype: Any) -> None:
    """Every part lies inside the whole. NumPy adds offsets and sizes as 32-bit numbers, and a sum that wraps passes."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        if dtype.itemsize != base.itemsize * math.prod(shape):
            raise MetadataError("a damaged payload: an array's dtype repeats its base in another size than it has")
        _check_extent(base)
    for name in dtype.names or ():
        part, offset = dtype.fields[name][:2]
        if not 0 <= offset <= dtype.itemsize - part.itemsize:
            raise MetadataError("a damaged payload: a field of an array's dtype lies outside its items")
        _check_extent(part)


def parse_dtype(data: bytes) -> Any:
    structured = data[:1] == b"{"
    dtype = _build_dtype(msgspec.json.decode(data[1:]) if structured else data.decode())
    _check_extent(dtype)
    if dtype.hasobject or (not structured and dtype.names is not None):
        raise MetadataError("a damaged payload: an array's dtype is one that never travels")
    return dtype
