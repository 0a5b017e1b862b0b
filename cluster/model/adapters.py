"""LoRA adapters in the language half: linear modules that add, to each row, what the row's adapter adds.

    y = W x + B A x, where B is scaled

Adapters lie in numbered slots. A and B of all slots lie side by side in two matrices of fixed size and place,
so a step with any mix of adapters is two small products for each module, and a row's numbers depend on its
own adapter alone: the columns of the others are multiplied by 0. A step without adapters skips both.

An adapter comes into a slot that no sequence of a step has, on a thread of its own while steps run: `read`
reads and checks it, `write` converts and writes it.

Of a linear that the ranks of a worker divide by its outputs, each rank adds its piece of them; of one that
they divide by its inputs, the products with A are summed over the ranks. Of a linear that
`mixer_shares` divides, a rank has the same rows of B or columns of A as of the weight.

Which slot a row has is a property of the step (`StepAdapters`), set by the model that runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from cluster.config.adapters import AdaptedModule, Adapter, AdapterRoom, content_digest, tensor_names
from cluster.errors import ConfigError
from cluster.model.adapter_staging import AdapterStaging
from cluster.model.layers.codes import CodedLinear
from cluster.model.mixer_shares import piece_of, whole_shape
from cluster.model.rank_linears import SummedLinear
from cluster.model.slot_matrices import SlotMatrices, Update, Updates, UpdateStore
from cluster.model.step_adapters import StepAdapters

logger = logging.getLogger(__name__)

# What may stand before a module of the text model in the names of an adapter: transformers has moved the text
# model within its multimodal models.
_TEXT_PREFIXES = {"model", "language_model", "text_model", "thinker"}


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
    rank has all of A and B, but not of a linear that `mixer_shares` divides: its sizes are a rank's."""

    def __init__(
        self, base: nn.Linear, path: str, step: StepAdapters, device: torch.device, dtype: torch.dtype,
        share: Share,
    ):  # fmt: skip
        """path: in the text model. device, dtype: of the matrices; the weight of `base` may be known packed
        only, and be on the meta device, or be codes."""
        super().__init__()
        self.base, self.path, self.step, self._share = base, path, step, share
        self.in_features, self.out_features = base.in_features, base.out_features
        linears = [(path, 0, base.out_features)]
        self.added = SlotMatrices(
            linears, base.in_features, base.out_features, step, device, dtype, piece_of(base)
        )

    def update(self, slot: int) -> Update | None:
        """Returns what the slot's adapter adds, with zeros up to the largest rank; None: nothing."""
        own = self.added.rows(0, slot)
        update = Update(self.added.down[own], self.added.up[own].T)
        return update if update.a.any() else None

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, inputs] → [..., T, outputs]; both may be this rank's piece."""
        y, slots, added = self.base(x), self.step.slots, self.added
        if slots is None:
            return y
        if x.shape[-1] < self.in_features:
            low = x @ self._share.of(added.down, 1).T
            dist.all_reduce(low)
        else:
            low = x @ added.down.T
        up = added.up if y.shape[-1] == self.out_features else self._share.of(added.up, 1)
        return y + (low * added.mask[slots.view(x.shape[:-1])]) @ up


def merged_updates(linears: Sequence[nn.Module]) -> SlotMatrices | None:
    """What adapters add to one product of several linears, which have one input. None: adapters change none
    of them."""
    ends = torch.tensor([cast(int, linear.out_features) for linear in linears]).cumsum(0).tolist()
    places = [
        (linear, end - linear.out_features, end)
        for linear, end in zip(linears, ends, strict=True)
        if isinstance(linear, AdaptedLinear)
    ]
    if not places:
        return None
    first = places[0][0]
    merged = SlotMatrices(
        [(linear.path, begin, end) for linear, begin, end in places], first.in_features, ends[-1], first.step,
        first.added.down.device, first.added.down.dtype,
    )  # fmt: skip
    for slot in range(1, first.step.num_slots + 1):
        merged.write_slot(slot, updates_of([linear for linear, _, _ in places], slot))
    return merged


def updates_of(linears: Sequence[AdaptedLinear], slot: int) -> Updates:
    """Returns what a slot's adapter adds to these."""
    updates = {linear.path: linear.update(slot) for linear in linears}
    return {path: update for path, update in updates.items() if update is not None}


def without_adapters(linear: nn.Module) -> nn.Module:
    return linear.base if isinstance(linear, AdaptedLinear) else linear


class AdapterSlots:
    """The slots of a text model, and the linears that they may change. Made before modules are replaced; what
    replaces an `AdaptedLinear` keeps what the slots add to it (`UpdateStore`)."""

    def __init__(
        self, text_model: nn.Module, room: AdapterRoom, device: torch.device, dtype: torch.dtype,
        share: Share = WHOLE,
    ):  # fmt: skip
        """Puts `AdaptedLinear` in the place of every linear that has room. Raises ConfigError for an adapter
        of `room` that does not fit the model, or changes what is not a linear of its text model."""
        self.room, self.device, self._dtype = room, device, dtype
        self._staging: AdapterStaging | None = None
        self.step = StepAdapters(room.num_slots, room.rank)
        self.unused: set[str] = set()
        self._text, self._shapes = text_model, _linears_of(text_model)
        self._kinds = {path: type(module).__name__ for path, module in text_model.named_modules()}
        used = {path for adapter in room.adapters for path in self._paths_of(adapter).values()}
        if not room.is_open:
            self._shapes = {path: shape for path, shape in self._shapes.items() if path in used}
        for path in self._shapes if room.num_slots else ():
            base, (parent, _, leaf) = text_model.get_submodule(path), path.rpartition(".")
            adapted = AdaptedLinear(cast(nn.Linear, base), path, self.step, device, dtype, share)
            setattr(text_model.get_submodule(parent), leaf, adapted)
        self.num_bytes = sum(
            buffer.nbytes for module in _adapted_in(text_model) for buffer in module.added.buffers()
        )
        logger.info("%d linear modules have room for %d adapters", len(self._shapes), room.num_slots)

    @torch.inference_mode()
    def write(self, slot: int, updates: Updates) -> None:
        """Makes the slot's adapter this one, for all modules. Blocks. Any thread, one at a time, after the
        modules were replaced, while no sequence of a step has the slot."""
        stores = [module for module in self._text.modules() if isinstance(module, UpdateStore)]
        if self._staging is not None:
            self._staging.write(slot, cast("list[SlotMatrices]", stores), updates)
        else:
            for store in stores:
                store.write_slot(slot, updates)

    def stage_writes(self) -> None:
        """Writes to a GPU, of adapters that come later, are few copies that the steps need not wait for."""
        if self.room.is_open and self.device.type == "cuda":
            modules = (module for module in self._text.modules() if isinstance(module, SlotMatrices))
            largest = max((module.largest for module in modules), default=0)
            self._staging = AdapterStaging(self.device, self._dtype, largest)

    def fill(self) -> None:
        """Random adapters in the first and in the last slot, which add about as much as a linear does: what
        replacements of modules are compared with. Before any module is replaced."""
        generator = torch.Generator().manual_seed(0)
        for slot in {1, self.step.num_slots}:
            for linear in _adapted_in(self._text):
                a = torch.randn(self.step.rank, linear.in_features, generator=generator)
                b = torch.randn(linear.out_features, self.step.rank, generator=generator)
                update = Update(a * linear.in_features**-0.5, 0.2 * b * self.step.rank**-0.5)
                linear.added.write_slot(slot, {linear.path: update})

    def clear(self) -> None:
        for slot in range(1, self.step.num_slots + 1):
            self.write(slot, {})

    def leave_out(self, unused: Sequence[AdaptedLinear]) -> None:
        """These linears have no room any more, for what adapters add to them would be left out."""
        for parent in [*self._text.modules()] if unused else ():
            for name, child in parent.named_children():
                if child in unused:
                    setattr(parent, name, cast(AdaptedLinear, child).base)
        self.unused.update(linear.path for linear in unused)

    def read(self, adapter: Adapter) -> Updates:
        """What the adapter adds; the content is read once, so what is hashed is what is used. Blocks. Any
        thread. Raises ConfigError, which names the adapter."""
        paths = self._paths_of(adapter)
        with _naming(adapter):
            try:
                content = adapter.weights.read_bytes()
                tensors = load(content)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {adapter.weights}: {error}") from error
            if content_digest(adapter.modules, (content,)) != adapter.digest:
                raise ConfigError(f"{adapter.weights} has changed since it was asked for")
            updates = {}
            for name, module in adapter.modules.items():
                a, b = (tensors[tensor].float() for tensor in tensor_names(name))
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise ConfigError(f"{name} has weights that are not finite")
                updates[paths[name]] = Update(a, module.scaling * b)
        return updates

    def _paths_of(self, adapter: Adapter) -> dict[str, str]:
        """Returns the path in the text model of each module that the adapter names by its path in the whole
        model. Raises ConfigError."""
        paths: dict[str, str] = {}
        with _naming(adapter):
            for name, module in adapter.modules.items():
                path = self._path_of(name, module)
                if path in paths.values():
                    raise ConfigError(f"{name} is there twice, under two names")
                paths[name] = path
        return paths

    def _path_of(self, name: str, module: AdaptedModule) -> str:
        parts = name.split(".")
        while parts and parts[0] in _TEXT_PREFIXES:
            parts = parts[1:]
        path = ".".join(parts)
        if not path or (kind := self._kinds.get(path)) is None:
            raise ConfigError(
                f"the language half of this model has no module '{name}'; adapters of encoders, projectors, "
                "embeddings and heads are not served"
            )
        if path in self.unused:
            raise ConfigError(
                f"it changes '{path}', which this model does not call as a linear of every token"
            )
        if (shape := self._shapes.get(path)) is None:
            raise ConfigError(f"'{name}' is a {kind}; only linear modules are adapted")
        if shape != (module.inputs, module.outputs):
            raise ConfigError(
                f"'{name}' maps {module.inputs} to {module.outputs} values, the model's {shape[0]} to "
                f"{shape[1]}: the adapter belongs to another model"
            )
        return path


@contextmanager
def _naming(adapter: Adapter) -> Iterator[None]:
    """Errors inside name the adapter."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"adapter '{adapter.name}': {error.message}", param="adapters") from error


def unused_in(text_model: nn.Module, run: Callable[[], object]) -> list[AdaptedLinear]:
    """Returns the adapted linears that a step of tokens with an adapter does not call with a row for every
    token: what adapters add would be left out. `run`: makes such a step."""
    unused = dict.fromkeys(_adapted_in(text_model))

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        linear = cast(AdaptedLinear, module)
        if linear.step.slots is not None and args[0].shape[:-1].numel() == linear.step.slots.numel():
            unused.pop(linear, None)

    hooks = [module.register_forward_pre_hook(note) for module in unused]
    try:
        run()
    except RuntimeError:
        if not unused:
            raise
    finally:
        for hook in hooks:
            hook.remove()
    return [*unused]


def _adapted_in(text_model: nn.Module) -> list[AdaptedLinear]:
    return [module for module in text_model.modules() if isinstance(module, AdaptedLinear)]


def _linears_of(text_model: nn.Module) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear, by its path."""
    linears = {
        path: cast(nn.Linear, module)
        for path, module in text_model.named_modules()
        if type(module) in (nn.Linear, SummedLinear) or isinstance(module, CodedLinear)
    }
    return {path: whole_shape(linear) for path, linear in linears.items()}
