"""The layer for multi-token prediction that checkpoints of Qwen3-Next and Qwen3.5 hold under `mtp.`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.draft_head import load_mtp
from cluster.model.language import LanguageModel, SequenceChunk
from tests.flow.tiny_hybrid_models import qwen3_5_moe

BLOCK_SIZE, NUM_TOKENS, NUM_FIRST = 4, 11, 7


def test_it_computes_what_is_published(tmp_path: Path) -> None:
    """norm(layer(fc([norm(embedding), norm(hidden row)]))), where the layer has full attention; in a checkpoint
    of a model with images, whose experts are one tensor, as on the hub."""
    whole: Any = qwen3_5_moe().model
    config = copy.deepcopy(whole.config.get_text_config())
    config.layer_types, config._attn_implementation = ["full_attention"], "eager"
    width, draw = config.hidden_size, torch.Generator().manual_seed(1)
    text = whole.model.language_model
    layer = type(text.layers[-1])(config, 0).eval().requires_grad_(False)
    sizes = {"fc": (width, 2 * width)} | dict.fromkeys(
        ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"), (width,)
    )
    own = {name: 0.3 * torch.randn(*size, generator=draw) for name, size in sizes.items()}
    for parameter in layer.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(
        load_file(file) | tensors | {f"mtp.{n}.weight": t for n, t in own.items()}, file, {"format": "pt"}
    )

    target = LanguageModel.load(tmp_path, dtype=torch.float32, block_size=BLOCK_SIZE)
    head, ids = load_mtp(tmp_path, target), [(5 * i + 3) % target.vocab_size for i in range(NUM_TOKENS)]
    hidden = torch.randn(NUM_TOKENS, width, generator=draw)
    kv, found, table = BlockMemory(head.kv_layout, 3), [], [2, 0, 1]
    for start, end in ((0, NUM_FIRST), (NUM_FIRST, NUM_TOKENS)):
        chunk = SequenceChunk(ids[start:end], start, start, table, num_logits=end - start)
        logits, rows = head.forward([chunk], hidden[start:end], kv)
        torch.testing.assert_close(logits, target.logits_of(rows))
        found.append(rows)

    def normed(rows: Tensor, name: str) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return rows * scale * (1 + own[name])

    embeds = target.inputs.rows(torch.tensor(ids))
    inputs = [normed(embeds, "pre_fc_norm_embedding"), normed(hidden, "pre_fc_norm_hidden")]
    rows = (torch.cat(inputs, dim=-1) @ own["fc"].T)[None]
    rotary = text.rotary_emb(rows, torch.arange(NUM_TOKENS)[None])
    mask = torch.full((1, 1, NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)
    wanted = normed(layer(rows, rotary, mask)[0], "norm")
    torch.testing.assert_close(torch.cat(found), wanted, atol=1e-4, rtol=1e-4)
