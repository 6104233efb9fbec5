from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, final

COPY_BELOW: int
MAX_DEPTH: int
FORMAT_VERSION: int
MAX_HEADER_BYTES: int
TORCH_DTYPES: tuple[str, ...]

KIND_NATIVE: int
KIND_TENSOR: int
KIND_ARRAY: int
KIND_SCALAR: int
KIND_DATACLASS: int
KIND_STRUCT: int
KIND_NAMEDTUPLE: int
KIND_ENUM: int
KIND_STANDARD: int
KIND_CUSTOM: int
KIND_REFUSED: int
KIND_AS: int
MARK_DATACLASS: int
MARK_STRUCT: int
MARK_NAMEDTUPLE: int
MARK_ENUM: int
MARK_STANDARD: int
MARK_CUSTOM: int

class _Loans(Protocol):
    def claim(self, address: int, nbytes: int, /) -> tuple[int, int] | None: ...

class _Source(Protocol):
    def view(self, offset: int, nbytes: int, readonly: bool, /) -> Any: ...
    def external(self, segment: int, offset: int, nbytes: int, readonly: bool, /) -> Any: ...

class _Devices(Protocol):
    def flatten(self, tensor: Any, /) -> Any: ...
    def fetch(self, flat: Any, /) -> Any: ...
    def placing(self, device: Any, /) -> Any: ...

def tensor_view(buffer: Any, shape: Sequence[int], dtype: Any) -> Any: ...

@final
class Window:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __new__(cls, address: int, nbytes: int, owner: Any) -> Window: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Kind:
    code: int
    name: str | None
    extract: Callable[[Any], Any] | None
    def __new__(cls, code: int, name: str | None = None, extract: Callable[[Any], Any] | None = None) -> Kind: ...

@final
class Plan:
    @property
    def size(self) -> int: ...
    @property
    def frame_size(self) -> int: ...
    @property
    def external(self) -> bool: ...
    @property
    def deferred(self) -> bool: ...
    def deferred_tensors(self) -> list[Any]: ...
    def take_deferred(self) -> list[tuple[int, int, Any]]: ...
    def pack_into(self, address: int) -> None: ...
    def pack_part(self, address: int, part: int, parts: int) -> None: ...
    def gather(self, direct_from: int) -> tuple[list[int], list[int], bytes]: ...
    def to_bytes(self) -> bytes: ...

@final
class Codec:
    def __new__(
        cls,
        *,
        classify: Callable[[type, bool], Kind],
        restore: Callable[[int, str, tuple[Any, ...], Collection[str]], Any],
        describe_dtype: Callable[[Any], bytes],
        parse_dtype: Callable[[bytes], Any],
        devices: _Devices,
    ) -> Codec: ...
    def forget_types(self) -> None: ...
    def plan(
        self,
        obj: Any,
        *,
        wire: str = "exact",
        allow_pickle: bool = False,
        loans: _Loans | None = None,
    ) -> Plan: ...
    def decode(
        self,
        frame: Any,
        *,
        source: _Source | None = None,
        copy: bool | None = None,
        writable: bool = True,
        device: Any = None,
        types: Collection[str] = (),
        allow_pickle: bool = False,
        wire: str = "exact",
        copy_below: int = ...,
    ) -> Any: ...
    def decoder(
        self,
        *,
        types: Collection[str] = (),
        allow_pickle: bool = False,
        wire: str = "exact",
        copy_below: int = ...,
    ) -> Decoder: ...

@final
class Decoder:
    def read(
        self,
        frame: Any,
        source: _Source | None = None,
        copy: bool | None = None,
        writable: bool = True,
        device: Any = None,
    ) -> Any: ...
