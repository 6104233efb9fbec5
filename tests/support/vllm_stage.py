"""A stage of vllm-omni without its model: its loader, its factory and its chunk adapter, on a real deploy file."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from support.waiting import until


def load_plugins() -> None:
    """What an engine core's process does; nothing else registers anything there."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def spec_of(path: str, stage: int) -> dict[str, Any]:
    """The connector's name and settings, as the engine finds them."""
    from vllm_omni.config.stage_config import resolve_deploy_yaml
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config
    from vllm_omni.engine.stage_init_utils import get_stage_connector_spec

    deploy = resolve_deploy_yaml(path)
    config = load_omni_transfer_config(config_dict=deploy)
    spec = get_stage_connector_spec(config, stage, bool(deploy.get("async_chunk")))
    return {"name": spec.get("name", "SharedMemoryConnector"), "extra": spec.get("extra", {})}


def adapter(path: str, stage: int, *, worker: str, sends: bool) -> Any:
    from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

    model = types.SimpleNamespace(
        stage_connector_config=spec_of(path, stage),
        stage_id=stage,
        worker_type=worker,
        async_chunk=True,
        custom_process_next_stage_input_func=f"{__name__}.next_input" if sends else None,
    )
    scheduler = types.SimpleNamespace(max_num_seqs=8)
    return OmniChunkTransferAdapter(types.SimpleNamespace(model_config=model, scheduler_config=scheduler))


def request(name: str, *, finished: bool = False) -> Any:
    return types.SimpleNamespace(
        request_id=f"internal-{name}",
        external_req_id=name,
        resumable=False,
        num_computed_tokens=0,
        num_output_placeholders=0,
        prompt_token_ids=[],
        additional_information=None,
        is_finished=lambda: finished,
    )


def next_input(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool, **_: Any) -> Any:
    """The stage's processor: what the next stage gets."""
    from vllm_omni.data_entry_keys import CodesStruct, EmbeddingsStruct, IdsStruct, OmniPayloadStruct

    number = multimodal_output["number"]
    return OmniPayloadStruct(
        codes=CodesStruct(audio=torch.arange(number, number + 64)),
        embed=EmbeddingsStruct(prefill=torch.full((multimodal_output["rows"], 2048), number, dtype=torch.bfloat16)),
        ids=IdsStruct(all=list(range(number + 1))),
        speaker=[request.external_req_id],
    )


def send(sender: Any, names: list[str], chunks: int, *, rows: int, finish: bool = True) -> None:
    for number in range(chunks):
        for name in names:
            last = finish and number == chunks - 1
            sender.save_async({"number": number, "rows": rows}, request(name, finished=last), is_segment_finished=last)


def receive(receiver: Any, names: list[str], chunks: int) -> dict[str, list[Any]]:
    """All chunks of all requests, in the order in which the adapter hands them over."""
    requests = {name: request(name) for name in names}
    found: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(chunks):
        for each in requests.values():
            receiver.load_async(each)
        waiting = {each.request_id: name for name, each in requests.items()}
        until(lambda waiting=waiting: receiver._finished_load_reqs.issuperset(waiting))
        for identity, name in waiting.items():
            receiver._finished_load_reqs.discard(identity)
            if receiver.model_mode == "ar":
                found[name].append(receiver._pending_ar_prompt_updates.pop(identity)[1])
            else:
                each = requests[name]
                found[name].append({**each.additional_information, "audio": list(each.prompt_token_ids)})
    return found


def summary(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What can be compared in another process."""
    return {
        name: [
            (
                float(chunk["embed"]["prefill"].float().mean()),
                tuple(chunk["embed"]["prefill"].shape),
                chunk["ids"]["all"],
                chunk["speaker"],
            )
            for chunk in chunks
        ]
        for name, chunks in found.items()
    }


def deploy_file(name: str) -> str:
    import vllm_omni

    return str(Path(vllm_omni.__file__).parent / "deploy" / name)
