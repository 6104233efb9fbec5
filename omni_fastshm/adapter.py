"""Glue between a stage and its connectors: payloads go through a connector, a small notification by a queue.

The notification is a plain dict that any control plane can carry (a queue, a pipe, an HTTP body)::

    {"request_id": …, "sampling_params": …, "from_connector": True, "from_stage": "0", "to_stage": "1",
     "sent_ts": seconds since the epoch, "connector_metadata": what put returned}

A refused `put` is False and a payload that is not there is ``(None, None)`` or, from `recv_via_connector`,
`MissingPayload`. Nothing else is swallowed here: a payload that cannot be encoded, foreign metadata or a
closed connector is an error that reaches the caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .base import OmniConnectorBase, StageId
from .errors import CodecError, ConfigError, MetadataError, MissingPayload
from .settings import check_edge, describe, request_name, stage_name

__all__ = ["TransferMetrics", "recv_via_connector", "try_recv_via_connector", "try_send_via_connector"]

# How a path into the payload that is put begins, and what the caller gave for it.
_PATH = re.compile(r"^(?:engine_inputs|metadata\.(original_prompt))(?!\w)")


class TransferMetrics(Protocol):
    """What `try_send_via_connector` reports each sent payload to."""

    def on_forward(
        self,
        from_stage: StageId,
        to_stage: StageId,
        request_id: StageId,
        size_bytes: int,
        tx_ms: float,
        used_connector: bool,
    ) -> None:
        """One payload was sent: its serialized size, and the milliseconds that `put` took."""


def try_send_via_connector(
    connector: OmniConnectorBase,
    stage_id: StageId,
    next_stage_id: StageId,
    req_id: StageId,
    next_inputs: Any,
    sampling_params: Any,
    original_prompt: Any,
    next_stage_queue_submit_fn: Callable[[dict[str, Any]], Any],
    metrics: TransferMetrics | None = None,
) -> bool:
    """Send one stage's output to the next stage and notify that stage.

    The payload is ``{"engine_inputs": next_inputs, "sampling_params": …, "metadata": {…}}``, the form that
    the ecosystem's receivers expect. `sampling_params` travel twice: in the payload and in the notification.

    Args:
        connector: the edge's connector.
        stage_id: the sending stage.
        next_stage_id: the receiving stage.
        req_id: names the payload on this edge.
        next_inputs: what the next stage gets.
        sampling_params: passed on as they are; the control plane has to be able to carry them.
        original_prompt: passed on in the payload's metadata.
        next_stage_queue_submit_fn: puts the notification on the next stage's queue. When it raises, the
            payload is taken back, so that nothing stays that no one was told about, and the error goes on.
        metrics: gets `on_forward` after the notification was sent; None for none.

    Returns:
        True when the payload is there and the next stage was notified; False when there was no room for it:
        no notification was sent then.

    Raises:
        CodecError: something in the payload cannot be carried; the path begins with ``payload`` for `next_inputs`.
        ConfigError: a stage or the id is out of range.
        ConnectorClosed: the connector was closed before.
    """
    from_stage, to_stage = check_edge(stage_id, next_stage_id)
    key = request_name(req_id)
    payload = {
        "engine_inputs": next_inputs,
        "sampling_params": sampling_params,
        "metadata": {
            "original_prompt": original_prompt,
            "stage_transition": f"{from_stage}->{to_stage}",
            "timestamp": time.time(),
        },
    }
    started = time.perf_counter_ns()
    try:
        ok, size, metadata = connector.put(from_stage, to_stage, key, payload)
    except CodecError as error:
        # The path begins at the dict that was made here, which the caller has never seen.
        error.args = (_PATH.sub(lambda found: found[1] or "payload", str(error), count=1), *error.args[1:])
        raise
    took_ms = (time.perf_counter_ns() - started) / 1e6
    if not ok:
        return False
    notification = {
        "request_id": req_id,
        "sampling_params": sampling_params,
        "from_connector": True,
        "from_stage": from_stage,
        "to_stage": to_stage,
        "sent_ts": time.time(),
        "connector_metadata": metadata,
    }
    try:
        next_stage_queue_submit_fn(notification)
    except BaseException:
        # Not cleanup(): that would also drop what other edges hold of this request.
        _take_back(connector, from_stage, to_stage, key, metadata)
        raise
    if metrics is not None:
        metrics.on_forward(stage_id, next_stage_id, req_id, size, took_ms, True)
    return True


def try_recv_via_connector(
    task: Mapping[str, Any],
    connectors: Mapping[Any, OmniConnectorBase],
    stage_id: StageId,
    *,
    timeout: float | None = 0,
    copy: bool | None = None,
    device: Any = None,
) -> tuple[Any, dict[str, Any] | None]:
    """Fetch the input that a notification announces.

    A task without ``from_connector`` carries its input itself, as ``task["engine_inputs"]`` (the first
    stage's requests come so).

    Args:
        task: the notification.
        connectors: the stage's connectors, keyed by ``(from_stage, to_stage)``, text or int.
        stage_id: the receiving stage.
        timeout: seconds to wait for a payload that is not there yet; None waits for ever.
        copy: as in `OmniConnectorBase.get`.
        device: as in `OmniConnectorBase.get`.

    Returns:
        ``(inputs, rx_metrics)``. Views in `inputs` stay valid until the last of them dies. `rx_metrics` has
        ``rx_decode_time_ms`` (the time of `get`, until the tensors can be used), ``rx_transfer_bytes`` and
        ``rx_in_flight_time_ms`` (from the notification to `get`, by the wall clocks of both sides); it is
        None for an input that did not come through a connector. ``(None, None)``: the payload is not there.

    Raises:
        MetadataError: the notification is incomplete, meant for another stage, or its metadata is foreign.
        ConfigError: the stage has no connector for that edge.
        CodecError: the payload holds a class that this process does not know; it can be got again.
    """
    if not task.get("from_connector"):
        return task.get("engine_inputs"), None
    from_stage, to_stage, key = _address(task, stage_id)
    connector = _connector(connectors, from_stage, to_stage, key)
    lag_ms = _lag_ms(task.get("sent_ts"))
    started = time.perf_counter_ns()
    got = connector.get(
        from_stage,
        to_stage,
        key,
        metadata=task.get("connector_metadata"),
        timeout=timeout,
        copy=copy,
        device=device,
    )
    took_ms = (time.perf_counter_ns() - started) / 1e6
    if got is None:
        return None, None
    payload, size = got
    figures = {"rx_decode_time_ms": took_ms, "rx_transfer_bytes": size, "rx_in_flight_time_ms": lag_ms}
    return _engine_inputs(payload, from_stage, to_stage, key), figures


def recv_via_connector(
    task: Mapping[str, Any],
    connectors: Mapping[Any, OmniConnectorBase],
    stage_id: StageId,
    *,
    timeout: float | None = 0,
    copy: bool | None = None,
    device: Any = None,
) -> tuple[Any, dict[str, Any] | None]:
    """Like `try_recv_via_connector`, but a missing payload is an error, so that the stage halts.

    Args:
        task: the notification.
        connectors: the stage's connectors, keyed by ``(from_stage, to_stage)``, text or int.
        stage_id: the receiving stage.
        timeout: seconds to wait for a payload that is not there yet; None waits for ever.
        copy: as in `OmniConnectorBase.get`.
        device: as in `OmniConnectorBase.get`.

    Returns:
        ``(inputs, rx_metrics)``; `rx_metrics` is None for an input that came in the task itself.

    Raises:
        MissingPayload: the payload is not there, or the task holds no input at all.
        MetadataError: the notification is incomplete, meant for another stage, or its metadata is foreign.
        ConfigError: the stage has no connector for that edge.
        CodecError: the payload holds a class that this process does not know.
    """
    inputs, figures = try_recv_via_connector(task, connectors, stage_id, timeout=timeout, copy=copy, device=device)
    if figures is None and (task.get("from_connector") or "engine_inputs" not in task):
        key = task.get("request_id")
        if not task.get("from_connector"):
            raise MissingPayload(
                f"stage {stage_id}: the task of request {key!r} holds neither engine_inputs nor from_connector",
                op="get",
                key=None if key is None else str(key),
            )
        raise MissingPayload(
            f"stage {stage_id}: the input of request {key!r} from stage {task['from_stage']} is not there: "
            "it was delivered before, cancelled, replaced, or its producer is gone",
            op="get",
            key=str(key),
        )
    return inputs, figures


def _address(task: Mapping[str, Any], stage_id: StageId) -> tuple[str, str, str]:
    """From, to and request id of a notification; refuses one that is not for this stage."""
    missing = [name for name in ("request_id", "from_stage") if task.get(name) is None]
    if missing:
        raise MetadataError(
            f"stage {stage_id}: a notification with from_connector lacks {' and '.join(missing)}", op="get"
        )
    from_stage, to_stage = check_edge(task["from_stage"], stage_id)
    key = request_name(task["request_id"])
    told = task.get("to_stage")
    if told is not None and stage_name(told) != to_stage:
        raise MetadataError(
            f"stage {to_stage}: the notification of request {key!r} is for stage {told}", op="get", key=key
        )
    return from_stage, to_stage, key


def _connector(
    connectors: Mapping[Any, OmniConnectorBase], from_stage: str, to_stage: str, key: str
) -> OmniConnectorBase:
    """The connector of an edge, whose stages the mapping may name by text or by int."""
    found = connectors.get((from_stage, to_stage))
    if found is not None:
        return found
    by_name = {_edge_title(edge): connector for edge, connector in connectors.items()}
    wanted = f"{from_stage}->{to_stage}"
    if wanted in by_name:
        return by_name[wanted]
    raise ConfigError(
        f"stage {to_stage} has no connector for the edge {wanted} that request {key!r} came by; "
        f"its connectors, by (from_stage, to_stage): {', '.join(sorted(by_name)) or 'none'}",
        op="get",
        key=key,
    )


def _edge_title(edge: Any) -> str:
    if isinstance(edge, tuple) and len(edge) == 2:
        return "->".join(map(stage_name, edge))
    raise ConfigError(f"connectors: the key {describe(edge)} is not (from_stage, to_stage)", op="get")


def _lag_ms(sent_ts: Any) -> float:
    """Milliseconds since the notification was sent; 0 where a host left the time out or the clocks differ."""
    if isinstance(sent_ts, bool) or not isinstance(sent_ts, (int, float)):
        return 0.0
    return max(0.0, (time.time() - sent_ts) * 1e3)


def _engine_inputs(payload: Any, from_stage: str, to_stage: str, key: str) -> Any:
    if isinstance(payload, dict) and "engine_inputs" in payload:
        return payload["engine_inputs"]
    raise MetadataError(
        f"the payload of request {key!r} on {from_stage}->{to_stage} has no engine_inputs: it was not put by "
        "try_send_via_connector; use the connector's get() for it",
        op="get",
        key=key,
    )


def _take_back(connector: OmniConnectorBase, from_stage: str, to_stage: str, key: str, metadata: Any) -> None:
    """Consume a payload that nobody was notified of; the error on its way out matters more than one here."""
    try:
        connector.get(from_stage, to_stage, key, metadata=metadata)
    except Exception:
        pass
