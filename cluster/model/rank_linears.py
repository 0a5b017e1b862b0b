"""Linears and embeddings of a rank as plain modules over its own share of the weights.

transformers keeps a divided weight as a `DTensor` in a module whose `forward` it has replaced. In a call, it
puts the local share in its place. Here the share becomes the weight, and what the ranks owe each other a part
of the module, so that kernels can take the place of such linears (`cluster.model.layers`), and a call is one
product and at most one collective:

    nn.Linear, CodedLinear           divided by outputs; the result is this rank's piece
    SummedLinear, SummedCodedLinear  divided by inputs, which are this rank's piece; products are summed
    GatheredLinear                   the head, divided by outputs, which are gathered
    GatheredCodedLinear              any linear whose plan says so
    SplitLinear, SplitCodedLinear    divided by inputs, of which each rank has all
    SummedEmbedding                  divided by rows; a row is there on one rank, and zero on the others

Those of codes are made while the model is loaded (`coded_linears`), the others afterwards. Modules that
transformers divides in another way stay as it has made them. `in_features` and `out_features` are those of
the whole. Runs on the thread that loads the model.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from cluster.model.collectives import Collectives
from cluster.model.half_files import own_share
from cluster.model.layers.codes import CodedLinear, CodedProduct, Codes
from cluster.model.mixer_shares import keep_piece
from cluster.model.sharding import name_in_plan
from cluster.model.support import head_of


class MeetingLinear(nn.Linear):
    """One whose call has a collective."""

    collectives: Collectives

    def multiply(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, or of the outputs."""
        return F.linear(x, self.weight, self.bias)


class SummedLinear(MeetingLinear):
    """weight [outputs, this rank's inputs]. bias: rank 0's alone, as the sum has it once."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] → [..., outputs]."""
        return self.collectives.sum(self.multiply(x))


class SummedCodedLinear(CodedLinear, SummedLinear):
    """Both: the codes are those of this rank's inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return SummedLinear.forward(self, x)


class GatheredLinear(MeetingLinear):
    """weight [this rank's outputs, inputs], of as many ranks as `torch.chunk` gives some."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return self.collectives.gather(self.multiply(x), self.out_features)


class GatheredCodedLinear(CodedLinear, GatheredLinear):
    """Both: the codes are those of this rank's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return GatheredLinear.forward(self, x)


class SplitLinear(MeetingLinear):
    """weight [outputs, this rank's inputs], bias rank 0's alone. Kernels do not take its place."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        width = -(-self.in_features // self.collectives.num_ranks)
        first = self.collectives.rank * width
        return self.collectives.sum(self.multiply(x[..., first : first + width]))


class SplitCodedLinear(CodedLinear, SplitLinear):
    """Both: the codes are those of this rank's inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return SplitLinear.forward(self, x)


class SummedEmbedding(nn.Module):
    """An embedding of any kind that looks up a row for each token by itself, and may scale it."""

    def __init__(self, embedding: nn.Embedding, collectives: Collectives):
        """embedding: as transformers divides it."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._collectives = collectives
        self._first = collectives.rank * -(-self.num_embeddings // collectives.num_ranks)
        embedding.weight = _parameter(embedding.weight)
        embedding.padding_idx = None  # it may be another rank's, and matters in training only
        del embedding.forward  # that of transformers, which divides: the class's own remains
        self.embedding = embedding

    @property
    def weight(self) -> Tensor:
        """[this rank's rows, embedding_dim]."""
        return self.embedding.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] int64 → [..., embedding_dim]."""
        places = token_ids - self._first
        is_here = (places >= 0) & (places < len(self.weight))
        rows = self.embedding(places.masked_fill(~is_here, 0))
        return self._collectives.sum(rows.masked_fill(~is_here[..., None], 0.0))


# transformers' way, and the dimension of the weight that it divides
_KINDS: dict[str, tuple[type[nn.Linear], int]] = {
    "colwise": (nn.Linear, 0),
    "rowwise": (SummedLinear, 1),
}
_CODED_KINDS: dict[str, type[CodedLinear]] = {
    "colwise": CodedLinear,
    "packed_colwise": CodedLinear,  # rows of each half
    "rowwise": SummedCodedLinear,
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), GatheredCodedLinear),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), SplitCodedLinear),
}
_PLAIN_KINDS = (SummedLinear, GatheredLinear, SplitLinear, nn.Linear)
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")  # all ranks have the same
_GATHERED = ("colwise_gather_output", "colwise_rep")


def coded_kind(linear: nn.Linear, way: str) -> type[CodedLinear] | None:
    """What a rank holds the codes of a linear in. linear: on the meta device. way: in transformers' plan.
    None: transformers divides it in a way that no such linear computes."""
    if isinstance(linear.weight, DTensor):
        return _CODED_KINDS.get(way)
    return None if "forward" in vars(linear) and way not in _WHOLE else CodedLinear


def coded_linear(
    linear: nn.Linear, codes: Codes, product: CodedProduct, kind: type[CodedLinear],
    collectives: Collectives | None,
) -> CodedLinear:  # fmt: skip
    """What takes the place of a linear that was read but for its weight. codes: of this rank."""
    made = kind(codes, None, product, (linear.in_features, linear.out_features))
    if isinstance(made, MeetingLinear):
        made.collectives = cast(Collectives, collectives)
    made.bias = _own_bias(linear, kind, collectives)
    keep_piece(linear, made)
    return made


def without_codes(linear: CodedLinear, dtype: torch.dtype) -> nn.Linear:
    """The same linear with its plain weight."""
    kind = next(each for each in _PLAIN_KINDS if isinstance(linear, each))
    collectives = linear.collectives if isinstance(linear, MeetingLinear) else None
    made = _linear(linear, kind, linear.codes.plain(dtype), linear.bias, collectives)
    keep_piece(linear, made)
    return made


@torch.no_grad()
def settle_linears(model: PreTrainedModel, collectives: Collectives) -> int:
    """Replaces the linears and embeddings of a model that `sharding.read_share` has read; returns how many.
    All ranks call it."""
    plan, head = model.tp_plan, head_of(model)
    settled = {
        path: made
        for path, module in list(model.named_modules())
        if (made := _settled(module, plan.get(name_in_plan(path), ""), module is head, collectives))
        is not None
    }
    for path, made in settled.items():
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)
    return len(settled)


def _settled(module: nn.Module, way: str, is_head: bool, collectives: Collectives) -> nn.Module | None:
    """None: it stays."""
    if isinstance(module, nn.Embedding) and way == "embedding_rowwise" and _is_divided(module.weight, 0):
        return SummedEmbedding(module, collectives).eval()
    if type(module) is not nn.Linear:
        return None
    kind, dim = (GatheredLinear, 0) if is_head and way in _GATHERED else _KINDS.get(way, (None, 0))
    if kind is None or not _is_divided(module.weight, dim):
        return None
    return _linear(module, kind, module.weight, _own_bias(module, kind, collectives), collectives)


def _is_divided(weight: Tensor, dim: int) -> bool:
    if not isinstance(weight, DTensor) or len(weight.placements) != 1:
        return False
    (placement,) = weight.placements
    return type(placement) is Shard and placement.dim % 2 == dim


def _linear(
    linear: nn.Linear, kind: type[nn.Linear], weight: Tensor, bias: nn.Parameter | None,
    collectives: Collectives | None,
) -> nn.Linear:  # fmt: skip
    """linear: of its features."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.in_features, made.out_features = linear.in_features, linear.out_features
    made.weight = _parameter(weight)
    made.register_parameter("bias", bias)
    if isinstance(made, MeetingLinear):
        made.collectives = cast(Collectives, collectives)
    return made.eval()


def _own_bias(
    linear: nn.Linear, kind: type[nn.Linear], collectives: Collectives | None
) -> nn.Parameter | None:
    bias = cast("Tensor | None", linear.bias)
    is_summed = collectives is not None and issubclass(kind, SummedLinear | SplitLinear)
    return None if bias is None or (is_summed and collectives.rank) else _parameter(bias)


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(own_share(weight.detach()).contiguous(), requires_grad=False)
