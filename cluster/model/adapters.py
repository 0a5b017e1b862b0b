"""LoRA adapters in the language half: linear modules that add, to each row, what the row's adapter adds.

    y = W x + B A x, where B is scaled

A and B of all adapters lie side by side in two matrices, so a step with any mix of adapters is two small
products for each module, and a row's numbers depend on its own adapter alone: the columns of the others are
multiplied by 0. A step without adapters skips both.

Of a linear that the ranks of a worker divide by its outputs, each rank adds its piece of them; of one that
they divide by its inputs, the products with A are summed over the ranks.

Which adapter a row has is a property of the step (`StepAdapters`), set by the model that runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cluster.config.adapters import AdaptedModule, Adapter, tensor_names
from cluster.errors import ConfigError
from cluster.model.layers.codes import CodedLinear

logger = logging.getLogger(__name__)

# What may stand before a module of the text model in the names of an adapter: transformers has moved the text
# model within its multimodal models.
_TEXT_PREFIXES = {"model", "language_model", "text_model", "thinker"}


class StepAdapters:
    """The adapters of one step. slots: [T] int64, of each token the adapter's number from 1 on, or 0; None:
    no token has one."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None

    @contextmanager
    def of_step(self, slots: Tensor | None) -> Iterator[None]:
        """The work inside is a step of tokens with these adapters."""
        self.slots = slots
        try:
            yield
        finally:
            self.slots = None


@dataclass(frozen=True, eq=False)
class Update:
    """What one adapter adds to one module: B A x. a [rank, inputs]; b [outputs, rank], scaled. float32."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Share:
    """A rank's piece of what is divided as `torch.chunk` does."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.num_ranks, dim)[self.rank]


WHOLE = Share()


class AdaptedLinear(nn.Module):
    """A linear with what adapters add to it. `base` may be replaced by a module that computes the same. Every
    rank has all of A and B."""

    def __init__(
        self, base: nn.Linear, updates: Sequence[Update | None], step: StepAdapters, device: torch.device,
        dtype: torch.dtype, share: Share = WHOLE,
    ):  # fmt: skip
        """updates: of each adapter; None: it leaves this module as it is. device, dtype: of the matrices; the
        weight of `base` may be known packed only, and be on the meta device, or be codes."""
        super().__init__()
        self.base = base
        self.step, self._share = step, share
        self.ranks = tuple(0 if update is None else len(update.a) for update in updates)
        self.in_features, self.out_features = base.in_features, base.out_features
        given = [update for update in updates if update is not None]
        down, up = torch.cat([update.a for update in given]).T, torch.cat([update.b for update in given], 1).T
        self.register_buffer("down", down.to(device, dtype).contiguous(), persistent=False)
        self.register_buffer("up", up.to(device, dtype).contiguous(), persistent=False)
        self.register_buffer("mask", _mask(self.ranks).to(device, dtype), persistent=False)

    def update(self, slot: int) -> tuple[Tensor, Tensor]:
        """Returns A [rank, inputs] and the transposed B [rank, outputs] of an adapter that changes it."""
        first = sum(self.ranks[: slot - 1])
        own = slice(first, first + self.ranks[slot - 1])
        return self.down[:, own].T, self.up[own]

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, inputs] → [..., T, outputs]; both may be this rank's piece."""
        y, slots = self.base(x), self.step.slots
        if slots is None:
            return y
        if x.shape[-1] < self.in_features:
            low = x @ self._share.of(self.down, 0)
            dist.all_reduce(low)
        else:
            low = x @ self.down
        up = self.up if y.shape[-1] == self.out_features else self._share.of(self.up, 1)
        return y + (low * self.mask[slots]) @ up


@dataclass(frozen=True)
class MergedUpdates:
    """What adapters add to one product of several linears. down [inputs, ranks], up [ranks, outputs],
    mask [1 + adapters, ranks], where `ranks` are those of all adapters and linears."""

    down: Tensor
    up: Tensor
    mask: Tensor
    step: StepAdapters

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """x [T, inputs]; y [T, outputs] is changed in place. Enqueued."""
        if (slots := self.step.slots) is not None:
            y += ((x @ self.down) * self.mask[slots]) @ self.up


def merged_updates(linears: Sequence[nn.Module]) -> MergedUpdates | None:
    """None: no adapter changes one of these linears, which have one input."""
    adapted = [linear for linear in linears if isinstance(linear, AdaptedLinear)]
    if not adapted:
        return None
    first = adapted[0].up
    ups = [
        linear.up if isinstance(linear, AdaptedLinear) else first.new_empty(0, cast(int, linear.out_features))
        for linear in linears
    ]
    return MergedUpdates(
        torch.cat([linear.down for linear in adapted], 1),
        torch.block_diag(*ups),
        torch.cat([linear.mask for linear in adapted], 1),
        adapted[0].step,
    )


def without_adapters(linear: nn.Module) -> nn.Module:
    return linear.base if isinstance(linear, AdaptedLinear) else linear


def adapt(
    text_model: nn.Module, adapters: Sequence[Adapter], device: torch.device, dtype: torch.dtype,
    share: Share = WHOLE,
) -> StepAdapters:  # fmt: skip
    """Puts `AdaptedLinear` in the place of every linear of the text model that an adapter changes. Slot i + 1
    is adapters[i]. Blocks while the adapters are read. Raises ConfigError for an adapter that does not fit
    the model, or changes what is not a linear of its text model."""
    step = StepAdapters()
    updates: dict[str, list[Update | None]] = {}
    for slot, adapter in enumerate(adapters):
        try:
            own = _read(adapter, text_model)
        except ConfigError as error:
            raise ConfigError(f"adapter '{adapter.name}': {error.message}", param="adapters") from error
        for path, update in own.items():
            updates.setdefault(path, [None] * len(adapters))[slot] = update
    for path, each in updates.items():
        parent, _, leaf = path.rpartition(".")
        base = cast(nn.Linear, text_model.get_submodule(path))
        setattr(text_model.get_submodule(parent), leaf, AdaptedLinear(base, each, step, device, dtype, share))
    logger.info("%d adapters change %d linear modules", len(adapters), len(updates))
    return step


@contextmanager
def all_used(text_model: nn.Module) -> Iterator[None]:
    """Inside, `text_model` runs a step of tokens with an adapter. Raises ConfigError for an adapted module
    that it does not call with a row for every token: what adapters add would be left out."""
    unused = {
        module: name for name, module in text_model.named_modules() if isinstance(module, AdaptedLinear)
    }

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        slots = cast(AdaptedLinear, module).step.slots
        if slots is not None and args[0].shape[-2] == len(slots):
            unused.pop(cast(AdaptedLinear, module), None)

    hooks = [module.register_forward_pre_hook(note) for module in unused]
    try:
        yield
    except RuntimeError:
        if not unused:
            raise
    finally:
        for hook in hooks:
            hook.remove()
    if unused:
        raise ConfigError(
            f"an adapter changes '{min(unused.values())}', which this model does not call as a linear of "
            "every token",
            param="adapters",
        )


def adapter_bytes(text_model: nn.Module) -> int:
    """Memory that the adapters take."""
    buffers = [
        buffer
        for module in text_model.modules()
        if isinstance(module, AdaptedLinear)
        for buffer in module.buffers(recurse=False)
    ]
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _mask(ranks: Sequence[int]) -> Tensor:
    """[1 + adapters, sum of ranks]: for each slot 1 where the products with its own A stand, else 0."""
    return torch.block_diag(torch.zeros(1, 0), *(torch.ones(1, rank) for rank in ranks))


def _read(adapter: Adapter, text_model: nn.Module) -> dict[str, Update]:
    """Returns the updates by the path of the module in the text model."""
    updates: dict[str, Update] = {}
    try:
        with safe_open(adapter.weights, framework="pt") as tensors:
            for name, module in adapter.modules.items():
                path = _path_in(text_model, name, module)
                a, b = (tensors.get_tensor(tensor).float() for tensor in tensor_names(name))
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise ConfigError(f"{name} has weights that are not finite")
                if path in updates:
                    raise ConfigError(f"{name} is there twice, under two names")
                updates[path] = Update(a, module.scaling * b)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {adapter.weights}: {error}") from error
    return updates


def _path_in(text_model: nn.Module, name: str, module: AdaptedModule) -> str:
    """The path in the text model of a module that the adapter names by its path in the whole model."""
    parts = name.split(".")
    while parts and parts[0] in _TEXT_PREFIXES:
        parts = parts[1:]
    path = ".".join(parts)
    try:
        found = text_model.get_submodule(path)
    except AttributeError:
        found = None
    if not path or found is None:
        raise ConfigError(
            f"the language half of this model has no module '{name}'; adapters of encoders, projectors, "
            "embeddings and heads are not served"
        )
    if type(found) not in (nn.Linear, CodedLinear):
        raise ConfigError(f"'{name}' is a {type(found).__name__}; only linear modules are adapted")
    shape = (found.in_features, found.out_features)
    if shape != (module.inputs, module.outputs):
        raise ConfigError(
            f"'{name}' maps {module.inputs} to {module.outputs} values, the model's {shape[0]} to "
            f"{shape[1]}: the adapter belongs to another model"
        )
    return path


def slots_of(adapters: Sequence[Adapter]) -> Mapping[str, int]:
    """Returns the numbers of the adapters by digest."""
    return {adapter.digest: slot for slot, adapter in enumerate(adapters, 1)}
