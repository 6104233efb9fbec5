"""What can go wrong, grouped by what the caller should do about it.

"Not now" (the place is full, nothing has arrived yet) is never an exception: `put` answers
``(False, 0, None)`` and `get` answers ``None``. Everything below is for what somebody has to mend. What follows
"To do:" in a docstring stands in docs/errors.md, which is made from them.

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
    ├─ DeviceError              (RuntimeError) a copy from or to a device failed there
    ├─ MissingPayload             (LookupError)  the stage halts: its input never came
    └─ StageFailed                (RuntimeError) a stage of a pipeline raised or died
"""

from __future__ import annotations


class FastShmError(Exception):
    """Base of all errors of this library.

    To do: catch it where anything of this library may fail; `op`, `segment` and `key` say where it did.

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


def locate(error: BaseException, op: str, key: str) -> None:
    """Where one of our errors does not say so yet: note the operation and the request id it came up in."""
    if isinstance(error, FastShmError):
        error.op = error.op or op
        error.key = error.key or key


class UsageError(FastShmError):
    """The call has to be changed.

    To do: nothing at run time. The same call fails again; the message says what to write instead.
    """


class ConfigError(UsageError, ValueError):
    """A setting, a name or a pipeline file is wrong.

    To do: mend every place that the message lists, each with its line or path of keys. ``omni-fastshm validate
    FILE`` finds them before anything starts.
    """


class CodecError(UsageError, TypeError):
    """A payload cannot be carried; the message names the path to the culprit.

    To do: on the sending side, send the parts instead, or `register_type`. On the receiving side, import or register
    the class that the message names and get again: the payload was not used up. Different `wire` or `allow_pickle` on
    the two sides: make them the same.
    """


class MetadataError(UsageError, ValueError):
    """Metadata is malformed, from another host, or points outside its segment.

    To do: hand `get` exactly what `put` returned, with the same edge and request id, on the same host, as the same
    user. Between hosts use `MooncakeConnector`, or ``worker_backend="ray"``, which sends everything inline. A `get`
    without metadata needs ``key_lookup: true``.
    """


class ConnectorClosed(UsageError, RuntimeError):
    """The connector was closed before this call.

    To do: end the thread that still calls, or close later. Views that were received before stay valid.
    """


class ForkedConnector(ConnectorClosed):
    """The connector was made before a fork; the child has to make its own.

    To do: build connectors in the process that uses them, from the same settings; or start it with "spawn".
    """


class LiveViews(UsageError, BufferError):
    """A lease cannot be given back while tensors or arrays still look at its memory.

    To do: drop the views first; only `Lease.release` of the core raises this. What `get` returns gives itself back.
    """


class SegmentError(FastShmError, OSError):
    """Shared memory could not be made, opened or mapped.

    To do: go by `errno`. ENOSPC, ENOMEM, EMFILE: make room (``omni-fastshm ls`` says who has it), or raise the limit
    that the message names. EACCES, EPERM: the object is another user's. ENOENT: there is no shm mount, or somebody
    removes names from it. `put` turns this into ``(False, 0, None)`` and a line in the log.
    """

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


class DeviceError(FastShmError, RuntimeError):
    """A copy between shared memory and a device failed; the device's own error is its cause.

    To do: go by that error; after most of CUDA's the process can use its devices no more and has to be started again.
    The payload was not sent, or can be got again by another process.
    """


class MissingPayload(FastShmError, LookupError):
    """A stage's input is not there: the stage must halt.

    To do: see why it is gone: the sender closed or was killed, the request was cancelled or got twice, or it never was
    put. Only `recv_via_connector` and `Pipeline` raise it.
    """


class StageFailed(FastShmError, RuntimeError):
    """A stage of a pipeline raised an exception or its process died.

    To do: the first line says which stage and why, the stage's traceback follows. After a death the pipeline has ended:
    start a new one. After an exception it goes on with the other requests.

    Args:
        message: what happened.
        stage: the stage's name or id, as in the pipeline's file.
    """

    def __init__(self, message: str, *, stage: str, op: str | None = None, key: str | None = None) -> None:
        super().__init__(message, op=op, key=key)
        self.stage = stage
