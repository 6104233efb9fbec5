"""What can go wrong, grouped by what the caller should do about it.

"Not now" (the place is full, nothing has arrived yet) is never an exception: `put` answers
``(False, 0, None)`` and `get` answers ``None``. Everything below is for what somebody has to mend.

::

    FastShmError                  base; attributes op, segment, key say where
    ├─ UsageError                 fix the call
    │  ├─ ConfigError             (ValueError)   a setting, a name, a pipeline file
    │  ├─ CodecError              (TypeError)    a payload that cannot be carried, or a class the receiver lacks
    │  ├─ MetadataError           (ValueError)   metadata that is malformed, foreign or points nowhere
    │  ├─ ConnectorClosed         (RuntimeError) put or get after close
    │  │  └─ ForkedConnector      a connector that was inherited through fork
    │  └─ LiveViews               (BufferError)  a lease given back while views on it are alive
    ├─ SegmentError               (OSError)      the shared memory itself: no room, no permission, gone
    ├─ MissingPayload             (LookupError)  the stage halts: its input never came
    └─ StageFailed                (RuntimeError) a stage of a pipeline raised or died
"""

from __future__ import annotations


class FastShmError(Exception):
    """Base of all errors of this library.

    Args:
        message: what was wrong, where, and what to do next.
        op: the operation that failed ("put", "get", "open", …).
        segment: name of the shared memory object concerned.
        key: request id concerned.
    """

    def __init__(
        self, message: str, *, op: str | None = None, segment: str | None = None, key: str | None = None
    ) -> None:
        super().__init__(message)
        self.op = op
        self.segment = segment
        self.key = key


class UsageError(FastShmError):
    """The call has to be changed."""


class ConfigError(UsageError, ValueError):
    """A setting, a name or a pipeline file is wrong."""


class CodecError(UsageError, TypeError):
    """A payload cannot be carried; the message names the path to the culprit."""


class MetadataError(UsageError, ValueError):
    """Metadata is malformed, from another host, or points outside its segment."""


class ConnectorClosed(UsageError, RuntimeError):
    """The connector was closed before this call."""


class ForkedConnector(ConnectorClosed):
    """The connector was made before a fork; the child has to make its own."""


class LiveViews(UsageError, BufferError):
    """A lease cannot be given back while tensors or arrays still look at its memory."""


class SegmentError(FastShmError, OSError):
    """Shared memory could not be made, opened or mapped."""

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        op: str | None = None,
        segment: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message, op=op, segment=segment, key=key)
        self.errno = errno


class MissingPayload(FastShmError, LookupError):
    """A stage's input is not there: the stage must halt."""


class StageFailed(FastShmError, RuntimeError):
    """A stage of a pipeline raised an exception or its process died.

    Args:
        message: what happened.
        stage: the stage's name or id, as in the pipeline's file.
    """

    def __init__(self, message: str, *, stage: str, op: str | None = None, key: str | None = None) -> None:
        super().__init__(message, op=op, key=key)
        self.stage = stage
