"""What a worker does of the language phases, as numbers: its role."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.settings import ClusterArgs, EncodeArgs
from cluster.types.members import Phase, Role
from cluster.worker.language import LanguageSizes


@dataclass(frozen=True)
class StepLimits:
    """The largest step."""

    max_prompt_tokens: int  # of prompts; 0: no prompt is computed here
    max_sequences: int  # of answers; 0: no answer is generated here
    target_s: float  # how long a step without answers may last


MAX_LOCAL_PREFILL_TOKENS = 1024  # of prompts in a step of a decode worker, for which memory is planned


def limits_of(role: Role, args: ClusterArgs) -> StepLimits:
    """What a worker of this role does."""
    max_prompt_tokens = max(args.block_size, args.prefill.max_batch_tokens)
    return StepLimits(
        max_prompt_tokens if role.prefills else MAX_LOCAL_PREFILL_TOKENS,
        args.decode.max_batch_sequences if role.decodes else 0,
        args.prefill.step_target_s,
    )


def sizes_of(role: Role, args: ClusterArgs, limits: StepLimits, device_type: str) -> LanguageSizes:
    """What the memory of such a worker is planned for. A worker that does both phases has the memory of
    both."""
    pool = args.pools[role.value]
    assert not isinstance(pool, EncodeArgs)
    return LanguageSizes(
        num_kv_blocks=_num_kv_blocks(role, args, device_type),
        memory_share=pool.memory_share,
        feature_bytes=args.prefill.feature_bytes,
        max_step_tokens=max(limits.max_prompt_tokens, limits.max_sequences),
        max_step_sequences=max(
            limits.max_sequences, role.prefills * limits.max_prompt_tokens // args.block_size
        ),
    )


def _num_kv_blocks(role: Role, args: ClusterArgs, device_type: str) -> int | None:
    given = {Phase.PREFILL: args.prefill.kv_blocks, Phase.DECODE: args.decode.kv_blocks}
    phases = role.phases & given.keys()
    if device_type == "cuda" and any(given[phase] is None for phase in phases):
        return None
    return sum(args.cpu_kv_blocks[phase] for phase in phases)
