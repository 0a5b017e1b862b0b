"""What drafts cost on a hybrid model: steps with and without them, and the drafts of an MTP layer.

    python -m bench.hybrid_drafts [--hidden 1024] [--layers 8] [--rounds 7] [--drafts 4]

The random model of `bench.hybrids`, with a random MTP layer. In a row all steps have as many right drafts, so
each computes as many tokens again, and gives one token more than that. Steps without drafts and with them
alternate. Drafts of prompt lookup cost nothing beside the step. Figures: docs/measured.md.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from bench.arguments import parser_of
from bench.hybrids import CONTEXT, Steps, make
from bench.rounds import in_turns
from bench.tables import table
from cluster.engine.head_drafts import HeadProposer
from cluster.engine.speculation import KnownTokens
from cluster.model.draft_head import load_mtp
from cluster.model.hidden_rows import HiddenRows
from cluster.model.language import LanguageModel
from cluster.types.request import SamplingParams

COUNTS = (1, 4, 8)


@dataclass
class Answer:
    """One that a head drafts for."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


class Heads:
    """A head, and answers that it has drafted for."""

    def __init__(self, proposer: HeadProposer, num_answers: int):
        self._proposer = proposer
        self._answers = [Answer(f"{num_answers}/{i}", [5] * CONTEXT) for i in range(num_answers)]
        self.draft(0, 1)

    def draft(self, num_right: int, num_drafts: int) -> torch.Tensor:
        """A step has given each answer the right drafts and a token."""
        known = []
        for i, answer in enumerate(self._answers):
            first = len(answer.token_ids) - 1
            answer.token_ids += [5] * (1 + num_right)
            known.append(KnownTokens(answer, (), first, i * (1 + num_right), 1 + num_right, is_prompt=False))
        self._proposer.take(known)
        drafts = self._proposer.propose(self._answers, [num_drafts] * len(self._answers))
        assert all(len(each) == num_drafts for each in drafts)
        return torch.tensor(drafts)


def add_layer(folder: Path) -> None:
    """A random MTP layer, as large as the last one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    start, norm = f"model.layers.{last}.", tensors["model.norm.weight"]
    own = {
        "mtp.layers.0." + name.removeprefix(start): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(start)
    }
    norms = ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
    own |= {f"{name}.weight": norm.clone() for name in norms}
    own["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm), dtype=norm.dtype) / len(norm) ** 0.5
    save_file(tensors | own, file, {"format": "pt"})


def loaded(hidden: int, layers: int) -> tuple[LanguageModel, HeadProposer]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(hidden, layers, folder)
        add_layer(folder)
        model = LanguageModel.load(folder, dtype=torch.bfloat16)
        head = load_mtp(folder, model)
    rows = HiddenRows(256, model.hidden_size, model.dtype, model.device)
    model.keep_rows(rows)
    return model, HeadProposer(head, rows, 1024)


def medians(steps: Steps, heads: Heads, num_right: int, num_drafts: int, rounds: int) -> list[float]:
    """Seconds of a step without drafts, of one with drafts, and of the head's drafts."""
    works = (
        steps.answers,
        partial(steps.drafted, num_right, num_drafts),
        partial(heads.draft, num_right, num_drafts),
    )
    return [median(each) for each in in_turns(works, rounds=rounds)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drafts", type=int, default=4)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    model, proposer = loaded(arguments.hidden, arguments.layers)
    num_drafts, rows = arguments.drafts, []
    for count in COUNTS:
        steps, heads = Steps(model, count), Heads(proposer, count)
        for num_right in (0, num_drafts // 2, num_drafts):
            plain_s, drafted_s, mtp_s = medians(steps, heads, num_right, num_drafts, arguments.rounds)
            a_token = (plain_s, drafted_s / (1 + num_right), (drafted_s + mtp_s) / (1 + num_right))
            times = (plain_s, drafted_s, mtp_s, *a_token)
            rows.append((f"{count}", f"{num_right}", *(f"{1e3 * each:.1f}" for each in times)))
    head = ("answers", "right drafts", "step, ms", "with drafts", "of the layer")
    print("\n".join(table((*head, "a token, ms", "with lookup", "with the layer"), rows)))


if __name__ == "__main__":
    main()
