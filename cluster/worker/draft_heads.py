"""The head that drafts for a worker's answers, if the settings name one: which rows the target keeps for it,
before steps are recorded and KV is sized, and the head itself, afterwards.
"""

from __future__ import annotations

from pathlib import Path

from cluster.config.checkpoint import read_config
from cluster.config.draft_heads import layers_read, read_eagle3
from cluster.config.settings import ClusterArgs
from cluster.model.draft_head import DraftHead, load_mtp
from cluster.model.eagle3 import load_eagle3
from cluster.model.hidden_rows import HiddenRows
from cluster.model.language import LanguageModel


def keep_rows(args: ClusterArgs, model: LanguageModel, num_prompt_tokens: int) -> None:
    """Makes the model keep what the head reads. num_prompt_tokens: the most of a step. Raises ConfigError."""
    layers, speculation = layers_read(args), args.decode.speculation
    if layers is None:
        return
    # drafts, and with states those of the step before that were right
    num_drafts = speculation.num_speculative_tokens * (2 if model.state_blocks else 1)
    num_answer_tokens = args.decode.max_batch_sequences * (1 + num_drafts)
    model.keep_rows(
        HiddenRows(
            num_answer_tokens + num_prompt_tokens, model.hidden_size, model.dtype, model.device, layers
        )
    )


def load_head(args: ClusterArgs, model: LanguageModel) -> DraftHead:
    """Loads the head of the method, which has one. Blocks while it is read. Raises ConfigError."""
    speculation = args.decode.speculation
    if speculation.method == "mtp":
        return load_mtp(Path(args.model), model)
    return load_eagle3(read_eagle3(Path(speculation.model), read_config(args.model)), model)
