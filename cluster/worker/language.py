"""What prefill and decode workers begin with: the language half of the model, and memory for its KV that is known to fit."""

from __future__ import annotations

import logging

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel
from cluster.worker.codec_probe import check_codec
from cluster.worker.memory_plan import MemoryPlan, available_bytes, step_bytes
from cluster.worker.setup import WorkerSetup
from kv_transfer.codecs import GROUP_TOKENS, CodecName, is_available, wire_layout
from kv_transfer.wire import Wire

logger = logging.getLogger(__name__)


def load_language(
    args: ClusterArgs,
    setup: WorkerSetup,
    *,
    num_kv_blocks: int,
    feature_bytes: int,
    max_step_tokens: int,
    max_step_sequences: int,
) -> tuple[LanguageModel, BlockMemory, Wire | None]:
    """The model, memory for its KV, and, where KV travels coded, room for that. Blocks while the weights are read. Raises ConfigError
    for a model or a codec that is not supported, or memory that is not there."""
    model = LanguageModel.load(
        args.model,
        dtype=setup.dtype,
        device=setup.device,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype,
        weight_dtype=args.weight_dtype,
    )
    codec = _codec(args, model)
    wire_groups = args.transfer.wire_tokens // GROUP_TOKENS
    plan = MemoryPlan(
        weights=model.weight_bytes,
        kv_per_token=model.kv_layout.block_bytes // args.block_size,
        num_kv_tokens=num_kv_blocks * args.block_size,
        features=feature_bytes,
        wire=wire_layout(model.kv_layout, codec).block_bytes * wire_groups if codec else 0,
        step=step_bytes(
            max_step_tokens, model.hidden_size, model.vocab_size, max_step_sequences, setup.dtype.itemsize
        ),
    )
    available = available_bytes(setup.device)
    plan.check(available)
    logger.info("%s: memory\n%s", setup.replica_id, plan.describe(available))
    kv = BlockMemory(model.kv_layout, num_kv_blocks, setup.device)
    if codec is None:
        return model, kv, None
    wire = Wire(kv, codec, args.transfer.wire_tokens, is_forced=args.transfer.codec != "auto")
    if codec == "int4":
        logger.info("%s: int4 on the wire: %s", setup.replica_id, check_codec(model, kv, wire))
    logger.info(
        "%s: %s on the wire, %.2f times fewer bytes; codes %.1f and decodes %.1f GB/s",
        setup.replica_id, codec, wire.ratio, wire.speed.encode / 1e9, wire.speed.decode / 1e9,
    )  # fmt: skip
    return model, kv, wire


def _codec(args: ClusterArgs, model: LanguageModel) -> CodecName | None:
    wanted = args.transfer.codec
    if wanted == "raw":
        return None
    if is_available(model.kv_layout):
        return "int8" if wanted == "auto" else wanted
    if wanted == "auto":
        return None
    raise ConfigError(
        f"transfer.codec {wanted} needs plain K and V (kv_cache_dtype auto) in blocks whose size divides {GROUP_TOKENS}",
        param="transfer.codec",
    )
