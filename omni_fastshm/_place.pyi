from collections.abc import Callable, Iterable
from typing import Any, final

def make(
    name: str, size: int, block: int, sequence: int, edge: tuple[str, str], request: str, host: str
) -> dict[str, Any]: ...
def read(metadata: object, edge: tuple[str, str], request: str, host: str) -> tuple[str, int, int, int] | None: ...

@final
class Edge: ...

@final
class Path:
    open: bool
    producer: Any
    def __new__(
        cls,
        *,
        codec: Any,
        host_wire: bool,
        allow_pickle: bool,
        decoder: Any,
        meter: Any,
        threshold: int,
        keyed: bool,
        inboxes: dict[str, Any],
        host: str,
        edge: Callable[[Any, Any], tuple[tuple[str, str], int, int]],
        name: Callable[[Any], str],
        views: bool,
        alone: int,
    ) -> Path: ...
    @property
    def views(self) -> bool: ...
    def put(self, connector: Any, from_stage: Any, to_stage: Any, request_id: Any, data: Any) -> Any: ...
    def get(self, connector: Any, from_stage: Any, to_stage: Any, request_id: Any, metadata: Any) -> Any: ...
    def put_each(
        self, connector: Any, from_stage: Any, to_stage: Any, items: Iterable[Any], one: Callable[[Any], Any]
    ) -> list[Any]: ...
    def get_each(
        self, connector: Any, from_stage: Any, to_stage: Any, items: Iterable[Any], one: Callable[[Any], Any]
    ) -> list[Any]: ...
