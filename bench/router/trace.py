"""What a simulator needs to replay live blocks, as JSON lines.

    {"type": "cluster", "block_size", "num_layers", "kv_bytes_per_token", "feature_bytes_per_row",
    "scheduling": {…},
     "workers": [{"replica_id", "role", "num_blocks", "max_batch", "cache_bytes", "curves": {…}}]}           once; curves: ServiceCurves as emulated
    {"type": "block", "block", "phase", "policy", "repetition", "slowdowns": {replica id: factor}, "measured":
    {replica id: {…}}, …} {"type": "request", "block", "request", "at_s", "kind", "prompt_tokens",
    "output_tokens", "block_hashes": [hex of 8 bytes],
     "items": [{"hash", "modality", "rows", "start", "end"}], "ttft_s", "placed_s", "predicted_s", "ledger": {…}}   in order of arrival

`at_s` counts from the block's start; `ttft_s` is the client's, `placed_s` begins when the door placed the
request: that is what a simulator without tokenizing and HTTP should arrive at. `rows` are before pooling.
`measured` are the ServiceCurves that the workers reported after the block: preparing and links are real. A
block begins with an idle cluster. The content of a block is seen in no other one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.records import Record
from bench.router.client import Answer
from cluster.config.settings import ClusterArgs
from cluster.types.curves import ServiceCurves
from cluster.types.members import Phase, Role
from encoder_service.service import MAX_BATCH_ROWS
from router.api.body import parse
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.door import Door
from router.prompts.builder import PreparedPrompt
from router.telemetry.timeline import RequestTimeline


class Trace:
    def __init__(
        self, path: Path, curves: Mapping[Role, ServiceCurves], args: ClusterArgs, counts: Mapping[Role, int]
    ):
        """Overwrites the file. `curves`: as emulated, by role."""
        self._path = path
        self._num_blocks = 0
        path.write_text(json.dumps(cluster_fields(curves, args, counts)) + "\n")

    async def add(self, block: Record, door: Door, answers: Sequence[Answer]) -> None:
        """A block that is over. The door prepares every prompt again, so that the simulator sees what the
        policy saw."""
        lines: list[Record] = [block | {"type": "block", "block": self._num_blocks}]
        for number, answer in enumerate(answers):
            call = chat_call(parse(ChatRequest, answer.call.body), CallContext(door.models, door.defaults))
            prompt = await door.prepare(call, RequestTimeline(0.0))
            prompt.release()  # only its tokens and names are wanted
            lines.append({"block": self._num_blocks, "request": number} | request_fields(answer, prompt))
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self._num_blocks += 1


def request_fields(answer: Answer, prompt: PreparedPrompt) -> Record:
    predicted = answer.predicted_s
    return {
        "type": "request",
        "at_s": answer.call.at_s,
        "kind": answer.call.kind,
        "prompt_tokens": prompt.num_tokens,
        "output_tokens": answer.call.num_tokens,
        "block_hashes": [block_hash[:8].hex() for block_hash in prompt.block_hashes],
        "items": [
            {"hash": placed.media_hash, "modality": placed.modality, "rows": item.num_call_rows, "start": placed.offset,
             "end": placed.end}
            for placed, item in zip(prompt.prompt.media, prompt.items, strict=True)
        ],
        "ttft_s": answer.ttft_s,
        "placed_s": answer.placed_ttft_s if answer.ledger else None,
        "predicted_s": predicted and predicted[0],
        "ledger": answer.ledger,
    }  # fmt: skip


def cluster_fields(
    curves: Mapping[Role, ServiceCurves], args: ClusterArgs, counts: Mapping[Role, int]
) -> Record:
    """What every block has in common."""
    config = json.loads((Path(args.model) / "config.json").read_text())["text_config"]
    width = torch.float32.itemsize
    kv_width = 2 * config["num_key_value_heads"] * config["head_dim"] * width
    by_role: dict[Role, dict[str, Any]] = {
        Role.ENCODE: {"num_blocks": 0, "max_batch": args.encode.max_batch_items, "cache_bytes": args.encode.cache_bytes},
        Role.PREFILL: {"num_blocks": args.cpu_kv_blocks[Phase.PREFILL], "max_batch": 0, "cache_bytes": 0},
        Role.DECODE: {"num_blocks": args.cpu_kv_blocks[Phase.DECODE], "max_batch": args.decode.max_batch_sequences, "cache_bytes": 0},
    }  # fmt: skip
    units = {Role.ENCODE: MAX_BATCH_ROWS, Role.PREFILL: args.prefill.max_batch_tokens, Role.DECODE: 0}
    known = {role: msgspec.structs.replace(curves[role], max_step_units=units[role]) for role in counts}
    return {
        "type": "cluster",
        "block_size": args.block_size,
        "num_layers": config["num_hidden_layers"],
        "kv_bytes_per_token": config["num_hidden_layers"] * kv_width,
        "feature_bytes_per_row": config["hidden_size"] * width,
        "step_target_s": args.prefill.step_target_s,
        "scheduling": args.scheduling.model_dump(),
        "workers": [
            {
                "replica_id": f"{role}-{idx}",
                "role": role,
                **by_role[role],
                "curves": msgspec.to_builtins(known[role]),
            }
            for role, count in counts.items()
            for idx in range(count)
        ],
    }
