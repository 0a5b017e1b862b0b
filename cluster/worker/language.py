"""What prefill and decode workers load first: the language half of the model, or one rank's share of it, and
memory for its KV that is known to fit.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial

import torch

from cluster.config.adapters import adapter_room
from cluster.config.checkpoint import kv_row_bytes
from cluster.config.settings import ClusterArgs, DecodeArgs
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.cuda.graphs import RecordedSizes, Recording, recording_of
from cluster.model.half_files import CheckRoom, HalfSizes
from cluster.model.language import LanguageModel
from cluster.model.parallel import ParallelGroup, smallest_of
from cluster.model.sharding import UNDIVIDED, Sharding
from cluster.model.step_model import StepModel
from cluster.types.members import Role
from cluster.types.request import NUM_PLACES
from cluster.worker.codec_probe import check_codec
from cluster.worker.draft_heads import keep_rows
from cluster.worker.memory_plan import MemoryPlan, available_bytes, gpu_bytes, library_bytes, step_bytes
from cluster.worker.setup import WorkerSetup
from cluster.worker.step_profile import measured_step_bytes, run_largest_step
from kv_transfer.codecs.quantisation import GROUP_TOKENS, CodecName, is_available, wire_layout
from kv_transfer.codecs.wire_memory import Wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanguageSizes:
    """What the memory of a worker's share of the model is planned for. Equal on all ranks."""

    num_kv_blocks: int | None  # that requests may use; None: as many as `memory_share` leaves
    memory_share: float  # of a GPU
    feature_bytes: int
    max_step_tokens: int
    max_step_sequences: int
    encoder_bytes: int = 0  # that calls of an encoder in the same process will take


@dataclass(frozen=True)
class Language:
    model: LanguageModel
    steps: StepModel  # computes the model's steps
    kv: BlockMemory
    num_kv_blocks: int  # that requests may use
    wire: Wire | None  # memory for KV that travels coded; None: KV travels raw

    @property
    def memories(self) -> list[BlockMemory]:
        return [self.kv] if self.wire is None else [self.kv, self.wire.memory]


def load_language(
    args: ClusterArgs,
    setup: WorkerSetup,
    role: Role,
    sizes: LanguageSizes,
    group: ParallelGroup | None = None,
) -> Language:
    """Blocks while the weights are read. `group`: this is one of several ranks, and all of them call it at
    once. Raises ConfigError for a model or a codec that is not supported, and for memory that is not
    available."""
    if group is not None:
        setup = dataclasses.replace(setup, device=group.device)
    sharding = UNDIVIDED if group is None else Sharding(group.size, args.expert_parallel)
    model = _model(args, setup, sharding, partial(_check_room, args, setup, sizes, sharding.num_ranks))
    if role.decodes:
        keep_rows(args, model, sizes.max_step_tokens)
    recording = _recording(model, args.decode, role, sizes.max_step_tokens)
    codec = _codec(args, model)
    wire_groups = args.transfer.wire_tokens // GROUP_TOKENS
    plan = MemoryPlan(
        weights=model.weight_bytes,
        kv_per_token=model.kv_layout.block_bytes // args.block_size,
        features=sizes.feature_bytes,
        wire=wire_layout(model.kv_layout, codec).block_bytes * wire_groups if codec else 0,
        tier=args.kv_cache.host_bytes if setup.device.type == "cpu" else 0,
        graphs=0 if recording is None else recording.num_bytes,
        step=_step_bytes(model, sizes),
        encoder=sizes.encoder_bytes,
        libraries=library_bytes(setup.device),
    )
    num_padding = 0 if recording is None else recording.num_blocks
    with setup.late_memory.granting() as promised:
        available = available_bytes(setup.device, model.evictable_bytes) - promised
        num_kv_blocks = sizes.num_kv_blocks
        if num_kv_blocks is None:
            total, used = gpu_bytes(setup.device)
            fitting = plan.blocks_within(args.block_size, sizes.memory_share, total, used, available)
            num_kv_blocks = fitting - num_padding
            if group is not None:
                num_kv_blocks = smallest_of(group, num_kv_blocks)
        if num_kv_blocks < 1 + NUM_PLACES * model.state_blocks:
            raise ConfigError(
                f"{num_kv_blocks} blocks of KV hold no sequence: the states before and after a step take "
                f"{model.state_blocks} each"
            )
        num_with_padding = num_kv_blocks + num_padding
        plan = dataclasses.replace(plan, num_kv_tokens=num_with_padding * args.block_size)
        plan.check(available)
        setup.late_memory.promise(plan.late)
    logger.info("%s: memory\n%s", setup.replica_id, plan.describe(available))
    kv = BlockMemory(model.kv_layout, num_with_padding, setup.device)
    wire = None if codec is None else _make_wire(args, setup, model, kv, codec)
    steps = model if recording is None else recording.over(model, kv)
    if setup.device.type == "cuda":
        _check_largest_step(model, kv, sizes, plan)
    return Language(model, steps, kv, num_kv_blocks, wire)


def _check_room(
    args: ClusterArgs, setup: WorkerSetup, sizes: LanguageSizes, num_ranks: int, half: HalfSizes
) -> None:
    """Raises ConfigError if this rank's weights cannot fit with the least memory that the rest takes. What
    only the loaded model knows, e.g. the scores of its attention, is left out."""
    config = half.config.get_text_config()
    itemsize = 1 if args.kv_cache_dtype == "int8" else setup.dtype.itemsize
    num_blocks = 2 if sizes.num_kv_blocks is None else sizes.num_kv_blocks
    plan = MemoryPlan(
        weights=half.num_weights if args.weight_dtype == "int8" else half.num_bytes,
        kv_per_token=kv_row_bytes(half.config.to_dict(), itemsize) // num_ranks,
        num_kv_tokens=num_blocks * args.block_size,
        features=sizes.feature_bytes,
        step=step_bytes(
            sizes.max_step_tokens, config.hidden_size, config.vocab_size // num_ranks,
            sizes.max_step_sequences, setup.dtype.itemsize,
        ),
        is_loaded=False,
    )  # fmt: skip
    with setup.late_memory.granting() as promised:
        available = available_bytes(setup.device) - promised
    if sizes.num_kv_blocks is None:
        total, used = gpu_bytes(setup.device)
        available = min(available, int(sizes.memory_share * total) - used)
    plan.check(available)


def _model(args: ClusterArgs, setup: WorkerSetup, sharding: Sharding, check_room: CheckRoom) -> LanguageModel:
    return LanguageModel.load(
        args.model,
        dtype=setup.dtype,
        device=setup.device,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype,
        weight_dtype=args.weight_dtype,
        sharding=sharding,
        weight_cache=WeightCache(args.weight_cache.path, args.weight_cache.max_bytes),
        adapters=adapter_room(args),
        check_room=check_room,
    )


def _step_bytes(model: LanguageModel, sizes: LanguageSizes) -> int:
    num_tokens, num_sequences = sizes.max_step_tokens, sizes.max_step_sequences
    tensors = step_bytes(
        num_tokens, model.hidden_size, model.vocab_size, num_sequences, model.dtype.itemsize
    )  # fmt: skip
    if model.states is not None:
        tensors += model.states.layout.step_bytes(num_tokens, num_sequences)
    tensors += model.score_bytes(num_tokens) + max(model.scratch_bytes, model.expert_bytes(num_tokens))
    if model.device.type == "cuda":
        return max(tensors, measured_step_bytes(model, num_tokens, num_sequences))
    return tensors


def _check_largest_step(
    model: LanguageModel, kv: BlockMemory, sizes: LanguageSizes, plan: MemoryPlan
) -> None:
    """Raises ConfigError if there is no memory for it, now that everything else is allocated."""
    try:
        run_largest_step(model, kv, sizes.max_step_tokens, sizes.max_step_sequences)
    except torch.OutOfMemoryError as error:
        described = plan.describe(available_bytes(model.device))
        raise ConfigError(f"the largest step of this worker finds no memory:\n{described}") from error
    torch.cuda.empty_cache()


def _recording(
    model: LanguageModel, decode: DecodeArgs, role: Role, max_step_tokens: int
) -> Recording | None:
    """Equal on all ranks, but for its bytes."""
    if not role.decodes:
        return recording_of(model, RecordedSizes.of_prompts(max_step_tokens))
    drafts = 0 if decode.speculation.method == "off" else decode.speculation.num_speculative_tokens
    return recording_of(model, RecordedSizes.up_to(decode.max_batch_sequences, max_step_tokens, drafts))


def _make_wire(
    args: ClusterArgs, setup: WorkerSetup, model: LanguageModel, kv: BlockMemory, codec: CodecName
) -> Wire:
    wire = Wire(kv, codec, args.transfer.wire_tokens)
    if codec == "int4":
        logger.info("%s: int4 on the wire: %s", setup.replica_id, check_codec(model, kv, wire))
    logger.info(
        "%s: %s on the wire, %.2f of the bytes; codes %.1f and decodes %.1f GB/s",
        setup.replica_id, codec, wire.ratio, 1e-9 / wire.encoding.s_per_byte, 1e-9 / wire.decoding.s_per_byte,
    )  # fmt: skip
    return wire


def _codec(args: ClusterArgs, model: LanguageModel) -> CodecName | None:
    codec = args.transfer.codecs[-1]
    if codec == "raw":
        return None
    if is_available(model.kv_layout):
        return codec
    if "raw" in args.transfer.codecs:
        return None
    raise ConfigError(
        f"transfer.codec {codec} needs plain K and V in all layers; model type '{model.family}' keeps others",
        param="transfer.codec",
    )
