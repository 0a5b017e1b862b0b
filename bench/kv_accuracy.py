"""What a coarser KV cache costs in accuracy: tokens and log probabilities against the same model with its KV
in fp32.

    python -m bench.kv_accuracy

The undivided models of transformers run in fp32 with a cache that rounds each K and V row as it is written.
So every token, also those of the same forward pass, attends to what a cache of that format would hold.
Models: the demo model on real requests with media, and random models, plain and with outlier channels (some K
channels are 20 times larger and the query's as much smaller; that leaves the function as it was, but the rest
of the row is small against these channels). Per format:

    bytes           of one token in all layers
    top-1           share of positions whose likeliest token stays the same, with the fp32 answer as input
    |dlogp|         mean and maximum over positions, of the fp32 answer's tokens, nats
    same tokens     leading tokens that greedy decoding has in common with fp32, of all its tokens
    same answers    whole answers equal
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import DEMO_MODEL
from bench.arguments import parser_of
from bench.workload import Reference, make_cases
from cluster.kvcache.memory import MemoryLayout
from cluster.model.kv_format import dequantise, kv_segments, quantise

OUTLIER = 20.0


@dataclass(frozen=True)
class KvFormat:
    name: str
    rounded: Callable[[Tensor], Tensor]  # [..., D] → the same rows as they are read from the cache
    # Bytes of a token, from the row shapes of K and V of every layer.
    bytes_of: Callable[[list[tuple[int, int]]], int]


@dataclass
class FormatScore:
    positions: int = 0
    same_top: int = 0
    error_sum: float = 0.0
    error_max: float = 0.0
    tokens: int = 0
    same_tokens: int = 0
    answers: int = 0
    same_answers: int = 0


def _int8(rows: Tensor) -> Tensor:
    return dequantise(*quantise(rows), rows.dtype)


FORMATS = (
    KvFormat("bf16", lambda rows: rows.bfloat16().float(), lambda rows: _bytes(rows, torch.bfloat16, "auto")),
    KvFormat("int8", _int8, lambda rows: _bytes(rows, torch.bfloat16, "int8")),
)


def _bytes(rows: list[tuple[int, int]], dtype: torch.dtype, kv_cache_dtype: Any) -> int:
    return MemoryLayout(kv_segments(rows, 1, dtype, kv_cache_dtype)).block_bytes


def rounding_cache(model: Any, rounded: Callable[[Tensor], Tensor]) -> Any:
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
            return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)

    return RoundingCache(config=model.config.get_text_config())


@torch.inference_mode()
def compare(
    model: Any, inputs: list[dict[str, Any]], form: KvFormat, max_tokens: int, score: FormatScore
) -> None:
    """Adds the effect of `form` on the greedy answers of all inputs to the score."""
    for given in inputs:
        length = given["input_ids"].shape[1]
        answer = _greedy(model, given, max_tokens, None)
        full = dict(given) | _continued(given, answer)
        wanted = _logprobs(model, full, length, None)
        got = _logprobs(model, full, length, rounding_cache(model, form.rounded))
        column = answer[:, None]
        error = (got.gather(1, column) - wanted.gather(1, column)).abs()
        score.positions += len(answer)
        score.same_top += int((got.argmax(-1) == wanted.argmax(-1)).sum())
        score.error_sum += error.sum().item()
        score.error_max = max(score.error_max, error.max().item())
        other = _greedy(model, given, max_tokens, rounding_cache(model, form.rounded))
        overlap = min(len(answer), len(other))
        same = answer[:overlap] == other[:overlap]
        score.tokens += len(answer)
        score.same_tokens += int(same.cumprod(0).sum())
        score.answers += 1
        score.same_answers += len(answer) == len(other) and bool(same.all())


def _greedy(model: Any, given: dict[str, Any], max_tokens: int, cache: Any) -> Tensor:
    output = model.generate(**given, max_new_tokens=max_tokens, do_sample=False, past_key_values=cache)
    return output[0, given["input_ids"].shape[1] :]


def _continued(given: dict[str, Any], answer: Tensor) -> dict[str, Tensor]:
    """The inputs with the answer after the prompt, but for the last token: no compared position follows
    it.
    """
    ids = torch.cat([given["input_ids"], answer[None, :-1]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _logprobs(model: Any, given: dict[str, Any], length: int, cache: Any) -> Tensor:
    """[answer tokens, vocabulary]."""
    logits = model(**given, past_key_values=cache, use_cache=cache is not None).logits[0, length - 1 :]
    return logits.float().log_softmax(-1)


def demo_inputs(reference: Reference, num_requests: int) -> list[dict[str, Any]]:
    return [reference.inputs(case) for case in make_cases(5, num_requests)]


def random_model(head_dim: int, num_outliers: int) -> Any:
    """A Llama of random weights that attends to distant tokens: queries and keys have unit size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=1024, initializer_range=0.08,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        pairs = torch.randperm(head_dim // 2, generator=generator)[: num_outliers // 2]
        # Rotary embeddings rotate these two channels into each other.
        channels = torch.cat([pairs, pairs + head_dim // 2])
        for projection, factor in (
            (layer.self_attn.k_proj, OUTLIER),
            (layer.self_attn.q_proj, 1 / OUTLIER),
        ):
            projection.weight.data.view(-1, head_dim, config.hidden_size)[:, channels] *= factor
    return model


def random_inputs(num_requests: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 512, (1, 40 + 17 * i), generator=generator) for i in range(num_requests)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts]


def report(name: str, model: Any, inputs: list[dict[str, Any]], max_tokens: int) -> None:
    config = model.config.get_text_config()
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = [(heads, width)] * (2 * config.num_hidden_layers)
    for form in FORMATS:
        score = FormatScore()
        compare(model, inputs, form, max_tokens, score)
        print(
            f"{name:<34}{form.name:>6}{form.bytes_of(rows):>8}"
            f"{score.same_top / score.positions:>9.4f}"
            f"{score.error_sum / score.positions:>10.5f}{score.error_max:>9.4f}"
            f"{score.same_tokens:>8}/{score.tokens:<6}{score.same_answers:>6}/{score.answers}",
            flush=True,
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    print(
        f"{'model':<34}{'KV':>6}{'bytes':>8}{'top-1':>9}{'|dlogp|':>10}{'max':>9}{'same tokens':>15}{'same answers':>14}"
    )
    reference = Reference(args.model)
    report(Path(args.model).name, reference.model, demo_inputs(reference, args.num_requests), args.max_tokens)
    for head_dim in (64, 128):
        for num_outliers in (0, 4, 16):
            name = f"random, width {head_dim}, {num_outliers} outliers"
            model = random_model(head_dim, num_outliers)
            report(name, model, random_inputs(args.num_requests // 4), args.max_tokens)


if __name__ == "__main__":
    main()
