"""What a head drafts from the target's hidden rows, and what it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cluster.config.checkpoint import read_config
from cluster.config.draft_heads import read_eagle3
from cluster.engine.head_drafts import HeadProposer
from cluster.model.draft_head import load_mtp
from cluster.model.eagle3 import load_eagle3
from cluster.model.hidden_rows import HiddenRows
from cluster.model.language import LanguageModel
from tests.flow.draft_heads import HIDDEN, save_eagle3, save_with_mtp
from tests.flow.quantised_folders import FP8_ENTRY, Checkpoint, in_fp8_blocks, quantised
from tests.unit.engine.drafting import BLOCK_SIZE, NUM_TOKENS, decode, requests_of

NAMES = ("deepseek_v3", "glm4_moe", "eagle3")


class Case:
    """A target that keeps its rows, and its head."""

    def __init__(
        self, name: str, folder: Path, *, is_right: bool, change: Callable[[Path], object] = lambda _: None
    ):
        self.folder, self.head_folder, layers = folder, folder / "head", ()
        if name == "eagle3":
            save_eagle3(folder, self.head_folder, is_right=is_right)
        else:
            save_with_mtp(folder, name, is_right=is_right)
        change(folder)
        self.target = LanguageModel.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE)
        self.expected = decode(self.target, requests_of(self.target))
        if name == "eagle3":
            read = read_eagle3(self.head_folder, read_config(folder))
            layers, self.head = read.layers, load_eagle3(read, self.target)
        else:
            self.head = load_mtp(folder, self.target)
        self.rows = HiddenRows(512, self.target.hidden_size, self.target.dtype, self.target.device, layers)
        self.target.keep_rows(self.rows)

    def proposer(self, num_blocks: int = 512, forbidden: Sequence[int] = ()) -> HeadProposer:
        return HeadProposer(self.head, self.rows, num_blocks, forbidden)


@pytest.fixture(scope="module", params=NAMES)
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("right"), is_right=True)


@pytest.fixture(scope="module", params=NAMES)
def random(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("random"), is_right=False)


def test_a_head_that_computes_what_the_target_computes_is_always_right(right):
    """Greedy and sampled: it draws with the request's own noise. Its KV of guesses that were right is
    computed again from the target's rows, and right."""
    requests, proposer = requests_of(right.target), right.proposer()
    assert decode(right.target, requests, proposer, max_draft=3, reader=proposer) == right.expected
    # one step before the first draft: only the prompt's own rows are known then
    assert all(len(r.drafts) == 1 + -(-(NUM_TOKENS - 1) // 4) for r in requests)
    assert proposer.blocks.num_referenced == 0
    proposer.blocks.check_integrity()


def in_fp8(folder: Path) -> Path:
    """The experts of every layer."""
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FP8_ENTRY}
    whole = Checkpoint(config, load_file(folder / "model.safetensors"), hf.DeepseekV3ForCausalLM)
    return quantised(whole, in_fp8_blocks, lambda name: "experts" in name).save(folder)


def test_the_layer_of_a_quantised_checkpoint_is_dequantised_as_the_others_are(tmp_path):
    case = Case("deepseek_v3", tmp_path, is_right=True, change=in_fp8)
    requests, proposer = requests_of(case.target), case.proposer()
    assert decode(case.target, requests, proposer, max_draft=3, reader=proposer) == case.expected
    assert all(len(r.drafts) == 1 + -(-(NUM_TOKENS - 1) // 4) for r in requests)


class MtpReference:
    """transformers' own layer over all tokens at once, without any cache."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch):
        from transformers.modeling_layers import MtpModel

        main: Any = hf.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()
        # transformers knows the published numbers of layers only
        pattern = re.compile(rf"model\.layers\.{main.config.num_hidden_layers}\.")
        monkeypatch.setattr(MtpModel, "get_mtp_weights_regex", lambda main: pattern)
        self._main: Any = main
        self._mtp: Any = MtpModel.from_pretrained(main).eval()

    def hidden(self, ids: Tensor) -> Tensor:
        return self._main.model(ids).last_hidden_state

    def layer(self, ids: Tensor, hidden: Tensor) -> Tensor:
        embeds, positions, mask = self._mtp.embed_tokens(ids), torch.arange(ids.shape[1])[None], mask_of(ids)
        rotary = self._mtp.rotary_emb(embeds, position_ids=positions)
        return self._mtp.layers[0](embeds, hidden, rotary, mask, positions, None)

    def token(self, row: Tensor) -> int:
        return int(self._mtp.shared_head(row).argmax())


class Eagle3Reference:
    """The published head, written down once more, over all tokens at once."""

    def __init__(self, case: Case, _monkeypatch: pytest.MonkeyPatch):
        self._main: Any = hf.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()
        self._weights = torch.load(case.head_folder / "pytorch_model.bin")

    def hidden(self, ids: Tensor) -> Tensor:
        every = self._main.model(ids, output_hidden_states=True).hidden_states
        return torch.cat([every[2], every[2], every[1]], dim=-1) @ self._weights["fc.weight"].T

    def layer(self, ids: Tensor, hidden: Tensor) -> Tensor:
        embeds, positions = self._main.model.embed_tokens(ids), torch.arange(ids.shape[1])[None]
        both = torch.cat([self._norm("input_layernorm", embeds), self._norm("hidden_norm", hidden)], dim=-1)
        queries, keys, values = (self._heads(both, name) for name in ("q_proj", "k_proj", "v_proj"))
        cos, sin = self._main.model.rotary_emb(embeds, position_ids=positions)
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        seen = F.scaled_dot_product_attention(queries, keys, values, mask_of(ids), enable_gqa=True)
        hidden = hidden + self._times("self_attn.o_proj", seen.transpose(1, 2).flatten(2))
        normed = self._norm("post_attention_layernorm", hidden)
        gated = F.silu(self._times("mlp.gate_proj", normed)) * self._times("mlp.up_proj", normed)
        return hidden + self._times("mlp.down_proj", gated)

    def token(self, row: Tensor) -> int:
        normed = F.rms_norm(row, (HIDDEN,), self._weights["norm.weight"], 1e-12)
        drafted = int((normed @ self._weights["lm_head.weight"].T).argmax())
        return drafted + int(self._weights["d2t"][drafted])

    def _times(self, name: str, rows: Tensor) -> Tensor:
        return rows @ self._weights[f"midlayer.{name}.weight"].T

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, (HIDDEN,), self._weights[f"midlayer.{name}.weight"], 1e-12)

    def _heads(self, both: Tensor, name: str) -> Tensor:
        return self._times(f"self_attn.{name}", both).unflatten(-1, (-1, 16)).transpose(1, 2)


def mask_of(ids: Tensor) -> Tensor:
    return torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]


@torch.inference_mode()
def guesses(reference: MtpReference | Eagle3Reference, token_ids: Sequence[int], most: int) -> list[int]:
    """The greedy ones."""
    hidden = reference.hidden(torch.tensor([token_ids]))[:, :-1]
    # nothing is before the first token
    hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], dim=1)
    drafted: list[int] = []
    for _ in range(most):
        rows = reference.layer(torch.tensor([[*token_ids, *drafted]]), hidden)
        drafted.append(reference.token(rows[:, -1]))
        hidden = torch.cat([hidden, rows[:, -1:]], dim=1)
    return drafted


def test_drafts_are_those_of_the_published_head_over_all_tokens(random, monkeypatch):
    made = Eagle3Reference if random.head_folder.exists() else MtpReference
    proposer, reference, lengths = random.proposer(), made(random, monkeypatch), set()

    class Compared:
        forget = proposer.forget

        def propose(self, sequences, max_tokens):
            limits = [min(most, 1 + i) for i, most in enumerate(max_tokens)]
            drafts = proposer.propose(sequences, limits)
            for sequence, draft in zip(sequences, drafts, strict=True):
                if sequence.sampling.temperature == 0:
                    assert draft == guesses(reference, sequence.token_ids, len(draft))
                    lengths.add(len(draft))
            return drafts

    requests = requests_of(random.target)[::-1]  # the greedy one is the last: its drafts are the longest
    assert decode(random.target, requests, Compared(), reader=proposer) == random.expected[::-1]
    assert {0, 4} <= lengths


def test_a_step_whose_rows_are_not_kept_costs_drafts_only(right):
    """As one with more tokens than there is room for."""
    requests, proposer = requests_of(right.target), right.proposer()

    class Forgetful:
        num_steps = 0

        def take(self, known):
            self.num_steps += 1
            if self.num_steps % 4:
                proposer.take(known)

    assert decode(right.target, requests, proposer, reader=Forgetful()) == right.expected
    assert all(requests[0].drafts[step] for step in (1, 2, 4, 5)) and requests[0].drafts[3] == []


@pytest.mark.parametrize("num_blocks", [1, 12])
def test_a_small_pool_costs_drafts_only_and_leaks_nothing(right, num_blocks):
    requests, proposer = requests_of(right.target), right.proposer(num_blocks)
    assert decode(right.target, requests, proposer, reader=proposer) == right.expected
    assert sum(len(guess) for r in requests for guess in r.drafts) > 20
    assert proposer.blocks.num_referenced == 0
    proposer.blocks.check_integrity()


def test_no_draft_goes_on_beyond_a_placeholder(right):
    plain, barred = requests_of(right.target), requests_of(right.target)
    proposer = right.proposer()
    decode(right.target, plain, proposer, reader=proposer)
    forbidden = plain[0].drafts[1][2]
    proposer = right.proposer(forbidden=[forbidden])
    assert decode(right.target, barred, proposer, reader=proposer) == right.expected
    assert barred[0].drafts[1] == plain[0].drafts[1][: plain[0].drafts[1].index(forbidden)]
    assert all(forbidden not in guess for r in barred for guess in r.drafts)
