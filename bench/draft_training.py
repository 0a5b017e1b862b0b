"""Trains an EAGLE-3 head for the demo model, so that `bench.speculation` has one that is right now and then.

    python -m bench.draft_training --out build/demo_eagle3

The head learns the demo model's own next tokens on texts of its training, from the model's hidden rows and,
as it drafts, from its own (the "training-time test" of EAGLE-3, each unrolled step over rows of that step
alone). Takes a minute on two cores. Writes a folder in the published form.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from bench import DEMO_MODEL
from bench.arguments import parser_of
from cluster.config.checkpoint import read_config, text_config
from cluster.config.draft_heads import EAGLE3_CLASSES, Eagle3Head
from cluster.model.eagle3 import Eagle3Module
from cluster.model.loading import Half, load_half
from cluster.model.support import text_of
from deploy.demo_model.training import data

NUM_UNROLLED, IGNORED = 3, -100
_SHARED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def conversation(rng: random.Random, tokenizer: Any) -> list[int]:
    """One turn or two."""
    messages: list[dict[str, str]] = []
    for _ in range(rng.randint(1, 2)):
        turn = data.text_question(rng)
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def seen(target: Any, layers: tuple[int, ...], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, T] → embeddings [B, T, H], hidden rows [B, T, 3 H], and the model's next tokens [B, T]."""
    embeds = target.get_input_embeddings()(ids)
    out = text_of(target)(inputs_embeds=embeds, output_hidden_states=True, use_cache=False)
    rows = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)
    return embeds, rows, target.lm_head(out.last_hidden_state).argmax(-1)


def loss_of(module: Eagle3Module, embeds: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
    """wanted [B, T]: what follows each token; IGNORED: padding. Row i takes token i and the row before it."""
    hidden, total = F.pad(module.fused(rows), (0, 0, 1, -1)), embeds.new_zeros(())
    positions = torch.arange(embeds.shape[1])[None]
    for _ in range(NUM_UNROLLED):
        out = module(embeds, hidden, positions, None)
        logits = module.lm_head(module.norm(out))
        total = total + F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        hidden = F.pad(out, (0, 0, 1, -1))
    return total


def train(args: argparse.Namespace) -> Eagle3Module:
    target = load_half(DEMO_MODEL, Half.LANGUAGE, dtype=torch.float32, device="cpu")
    tokenizer, rng = AutoTokenizer.from_pretrained(DEMO_MODEL), random.Random(args.seed)
    torch.manual_seed(args.seed)
    config = head_config()
    llama = hf.LlamaConfig(**{name: value for name, value in config.items() if name != "architectures"})
    llama._attn_implementation = "sdpa"
    layers, vocab_size = (2, 2, 1), config["vocab_size"]
    module = Eagle3Module(
        llama, Eagle3Head(args.out, config, layers, llama.hidden_size, vocab_size), vocab_size
    )
    module.lm_head.weight.data.copy_(target.lm_head.weight)
    optimiser = torch.optim.AdamW(module.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.lr, total_steps=args.steps)
    for step in range(args.steps):
        batch = [torch.tensor(conversation(rng, tokenizer)) for _ in range(args.batch)]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        embeds, rows, wanted = seen(target, layers, ids)
        lens = torch.tensor([len(each) for each in batch])
        wanted[torch.arange(ids.shape[1])[None] >= lens[:, None]] = IGNORED
        loss = loss_of(module, embeds, rows, wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(json.dumps({"step": step, "loss": round(loss.item() / NUM_UNROLLED, 3)}), flush=True)
    return module


def head_config() -> dict[str, Any]:
    text = text_config(read_config(DEMO_MODEL))
    return {
        **{name: text[name] for name in _SHARED},
        "architectures": [EAGLE3_CLASSES[0]],
        "num_hidden_layers": 1,
        "draft_vocab_size": text["vocab_size"],
        "rope_parameters": {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to be written")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    module = train(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(head_config(), indent=1))
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(weights, args.out / "model.safetensors")


if __name__ == "__main__":
    main()
