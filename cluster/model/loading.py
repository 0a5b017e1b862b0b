"""Loads one half of a checkpoint with transformers' own `from_pretrained`.

A subclass made at run time drops the other half right after construction. `from_pretrained` constructs on the
meta device, so the dropped modules never take memory. Their tensors are then unexpected and never read.
Renamed keys and merged experts of hub checkpoints work as usual, because transformers finds its conversions
by class and model type.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig

from cluster.config.checkpoint import check_headers, check_weights, weight_files
from cluster.config.families import MEDIA_FAMILIES, ModelFamily, part_of_whole
from cluster.config.machine import available_memory
from cluster.config.weight_formats import Quantisation
from cluster.errors import ConfigError
from cluster.model.coded_loading import CodedLoading, Loaded
from cluster.model.collectives import Collectives
from cluster.model.cpu.weight_source import MappedWeights, StaleWeights
from cluster.model.cuda.coded_choice import keep_right_codes
from cluster.model.cuda.moving import move_weights
from cluster.model.dequantising import check_values, forget_entries, note, plain_tensors, read_pickled_headers
from cluster.model.expert_layout import fit_experts, has_two_layouts, stored_tensors
from cluster.model.failures import LOADING_ERRORS
from cluster.model.half_files import CheckRoom, HalfFiles, own_share, sizes_of, taken_names
from cluster.model.hybrid_plans import complete_plan
from cluster.model.layers.codes import CodedExperts, CodedKernels, CodedLinear
from cluster.model.mixer_shares import MixerShares
from cluster.model.reading import Reading, pieces_of
from cluster.model.sharding import UNDIVIDED, Sharding, read_share
from cluster.model.support import backbone_of, check_class, family_of, may_keep_states, text_of

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_VOLATILE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "_attn_implementation")


class Half(StrEnum):
    ENCODER = "encoder"
    LANGUAGE = "language"


class AbsentHalf(nn.Module):
    """Replaces the other half. Keeps its configuration and has no weights."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self.device = torch.device("cpu")  # Qwen2-Audio's forward reads it even without audio

    def forward(self, *_args: object, **_kwargs: object) -> None:
        raise RuntimeError("this worker does not hold these weights")


def load_half(
    path: str | Path, half: Half, *, dtype: torch.dtype, device: torch.device | str,
    sharding: Sharding = UNDIVIDED, mapped: MappedWeights | None = None, coded: CodedKernels | None = None,
    collectives: Collectives | None = None, check_room: CheckRoom | None = None,
) -> PreTrainedModel:  # fmt: skip
    """transformers' model with only this rank's share of `half` in memory. Blocks while reading. mapped: its
    parameters, which are then not read from the checkpoint; those that exist in packed form only are on the
    meta device. coded: how linears and experts of a quantised text model are computed, which then keep their
    codes; None: they are dequantised. collectives: of a rank whose linears keep their codes. check_room: may
    refuse before a weight is read.

    Raises ConfigError if the folder is not a model, the model type is not supported, the model has no such
    half, a weight file is missing or truncated, a weight is not finite or is quantised in a form that is not
    served, or the model cannot be distributed to the ranks.
    """
    config = read_config(path)
    half_class = _class_of_half(config, half)
    mixers = _mixer_shares(half_class, config, sharding)
    quantisation, files = check_weights(Path(path)).quantisation, weight_files(Path(path))
    if not files:
        check_headers(Path(path), read_pickled_headers(Path(path)))
    forget_entries(config)
    if mapped is not None:
        half_class = _mapped_class(half_class, mapped)
    half_files = HalfFiles(files, quantisation)
    with ExitStack() as opened:
        reading = opened.enter_context(Reading(f"{path}, {half} half"))
        tensors, codes = None, None
        if quantisation is not None:
            tensors = opened.enter_context(plain_tensors(files, quantisation, dtype))
            if mapped is None:
                check_values(tensors)
            if coded is not None:
                codes = CodedLoading(tensors, text_of, coded.product, torch.device(device), collectives)
        elif has_two_layouts(config.model_type) or mixers is not None or (files and sharding.num_ranks > 1):
            tensors = opened.enter_context(stored_tensors(files))
        elif sharding.num_ranks == 1:
            tensors = half_files.mapped()
        begin = partial(_begin, reading, half_files, sharding, codes, check_room)
        half_class = _reading_class(half_class, tensors, begin, mixers)
        read = partial(_read, half_class, path, config, dtype, sharding, mixers)
        model, report = read() if codes is None else codes.load(read)
        if wrong := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
            what = ", ".join(wrong[:5])
            raise ConfigError(f"the checkpoint '{path}' lacks weights of the {half} half: {what}")
        if quantisation is not None:
            note(model, quantisation)
            _log_quantised(model, f"{path}: the {half} half", quantisation, dtype)
        model = model.eval().requires_grad_(False)
        # mapped weights, which only CPUs have, are not the model's parameters yet
        if sharding.num_ranks == 1 and mapped is None and model.device != torch.device(device):
            move_weights(model, torch.device(device))
        model.to(device)
        _check_finite(model, path)
    if coded is not None:
        keep_right_codes(model, dtype, coded.experts, collectives)
    if mapped is not None:
        _register(model)
    return model


def _begin(
    reading: Reading, files: HalfFiles, sharding: Sharding, codes: CodedLoading | None,
    check_room: CheckRoom | None, model: PreTrainedModel, conversions: Sequence[WeightTransform],
) -> None:  # fmt: skip
    """Called with the model on the meta device, before a weight is read."""
    ranges = files.taken(model, conversions)
    num_stored = sum(each.end - each.begin for each in ranges)
    if check_room is not None:
        check_room(sizes_of(model, None if codes is None else num_stored // sharding.num_ranks))
    is_divided = sharding.num_ranks > 1
    rank = dist.get_rank() if is_divided else 0
    reading.begin(pieces_of(ranges, rank=rank, num_ranks=sharding.num_ranks, room=available_memory()))
    if codes is not None:
        codes.take_places(model, conversions)


def _class_of_half(config: PreTrainedConfig, half: Half) -> type[PreTrainedModel]:
    family, model_class = family_of(config), _model_class(config)
    if family.modalities:
        make = _encoder_class if half is Half.ENCODER else _language_class
        return make(model_class, family)
    check_class(model_class)
    if half is Half.ENCODER:
        raise ConfigError(f"model type '{config.model_type}' has no media encoder: it needs no encode pool")
    return model_class


def _log_quantised(model: nn.Module, what: str, quantisation: Quantisation, dtype: torch.dtype) -> None:
    held = sum(own.numel() * own.element_size() for own in map(own_share, model.parameters()))
    logger.info("%s is held dequantised, from %s: %.2f GiB of %s", what, quantisation, held / _GIB, dtype)
    for kind, name in ((CodedLinear, "linears"), (CodedExperts, "products of experts")):
        if coded := [module.codes.nbytes for module in model.modules() if isinstance(module, kind)]:
            held = sum(coded) / _GIB
            logger.info("%s: beside that, %d %s keep their codes: %.2f GiB", what, len(coded), name, held)
    if unused := len(quantisation.unused):
        logger.info("%s: %d scales of activations or KV are not used", what, unused)


def _check_finite(model: PreTrainedModel, path: str | Path) -> None:
    """Weight files have no checksum. This finds only flipped bits that make a weight infinite or NaN. It
    takes one sum per tensor, at the speed of the memory in which the weights lie, and waits once."""
    names, are_finite = [], []
    for name, weight in model.named_parameters():
        own = own_share(weight.detach())
        own = own.float() if own.itemsize == 1 else own  # torch has no sum of 8 bit floats
        if own.is_floating_point() and own.numel():
            names.append(name)
            are_finite.append(own.sum().isfinite())
    flags = torch.stack(are_finite).tolist() if are_finite else []
    if wrong := [name for name, is_finite in zip(names, flags, strict=True) if not is_finite]:
        raise ConfigError(
            f"the checkpoint '{path}' has weights that are not finite: {wrong[0]}", param="model"
        )


def _read(
    half_class: type[PreTrainedModel], path: str | Path, config: PreTrainedConfig, dtype: torch.dtype,
    sharding: Sharding, mixers: MixerShares | None,
) -> Loaded:  # fmt: skip
    if sharding.num_ranks == 1:
        return _read_whole(half_class, path, config, dtype)
    loaded = read_share(half_class, path, config, dtype, sharding, may_copy=mixers is not None)
    if mixers is not None:
        mixers.settle()
    return loaded


def _read_whole(
    half_class: type[PreTrainedModel], path: str | Path, config: PreTrainedConfig, dtype: torch.dtype
) -> Loaded:
    try:
        loaded: Any = half_class.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"transformers cannot load the checkpoint '{path}': {type(error).__name__}: {error}",
            param="model",
        ) from error
    return loaded


def read_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of the part that is served. Raises ConfigError if the folder has none."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' has no model configuration that transformers knows: {error}") from error
    if (served := part_of_whole(config.model_type)) is None:
        return config
    _, whole = served
    part = getattr(config, whole.part_key)
    part.architectures = [whole.part_class]
    return part


def fingerprint(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    """Equal for all workers that may serve together. Depends on model type, configuration and dtype, not on
    the weights."""
    text = json.dumps(_without_volatile(config.to_dict()), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{config.model_type}-{digest}-{str(dtype).removeprefix('torch.')}"


def _without_volatile(value: object) -> object:
    """Drops, at every depth, entries that depend on how the model was loaded and on the version of
    transformers."""
    if isinstance(value, dict):
        return {str(key): _without_volatile(entry) for key, entry in value.items() if key not in _VOLATILE}
    return value


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    name = (config.architectures or [""])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ConfigError(f"model type '{config.model_type}': transformers has no class '{name}'")
    if config.model_type not in MEDIA_FAMILIES and not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ConfigError(f"model type '{config.model_type}': class '{name}' is not a causal language model")
    return model_class


def _encoder_class(model_class: type[PreTrainedModel], family: ModelFamily) -> type[PreTrainedModel]:
    name = _text_part(family)

    class EncoderHalf(model_class):
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object):
            super().__init__(config, *args, **kwargs)
            base = backbone_of(self)
            text = AbsentHalf(getattr(base, name).config)
            setattr(base, name, text)
            self.lm_head = AbsentHalf(text.config)
            self._tied_weights_keys = base._tied_weights_keys = self.all_tied_weights_keys = {}

        def get_output_embeddings(self) -> None:
            """It has none."""

        def tie_weights(self, *_args: object, **_kwargs: object) -> None:
            """Does nothing: the tied pair is in the language half."""

    return _named_like(EncoderHalf, model_class)


def _language_class(model_class: type[PreTrainedModel], family: ModelFamily) -> type[PreTrainedModel]:
    name = _text_part(family)

    class LanguageHalf(model_class):
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object):
            super().__init__(config, *args, **kwargs)
            base = backbone_of(self)
            absent = [child for child, _ in base.named_children() if child != name]
            for child in absent:
                setattr(base, child, AbsentHalf(getattr(getattr(base, child), "config", config)))
            # transformers cannot divide what is absent
            parts = tuple(f"{family.base_module}.{child}".lstrip(".") for child in absent)
            self._tp_plan = {part: way for part, way in self._tp_plan.items() if not part.startswith(parts)}

    return _named_like(LanguageHalf, model_class)


def _text_part(family: ModelFamily) -> str:
    """The name of the base's part that is of the language half."""
    return family.text_module.split(".")[0]


def _mapped_class(half_class: type[PreTrainedModel], mapped: MappedWeights) -> type[PreTrainedModel]:
    """`half_class` with the mapped parameters as plain attributes while transformers loads the rest: it
    neither looks for them in the checkpoint nor initialises them."""

    class MappedHalf(half_class):
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object):
            super().__init__(config, *args, **kwargs)
            for names, tensor in mapped.parameters:
                _put_aside(self, names, tensor)
            for name, (shape, dtype) in mapped.absent.items():
                _put_aside(self, [name], torch.empty(shape, dtype=dtype, device="meta"))
            self._tied_weights_keys = backbone_of(self)._tied_weights_keys = self.all_tied_weights_keys = {}

        def tie_weights(self, *_args: object, **_kwargs: object) -> None:
            """Does nothing: tied weights are one mapped parameter with several names."""

    return _named_like(MappedHalf, half_class)


def _mixer_shares(
    half_class: type[PreTrainedModel], config: PreTrainedConfig, sharding: Sharding
) -> MixerShares | None:
    """None: this is no rank of a model with mixers."""
    if sharding.num_ranks == 1 or not may_keep_states(half_class, config):
        return None
    return MixerShares(dist.get_rank(), sharding.num_ranks)


def _divided_class(half_class: type[PreTrainedModel], mixers: MixerShares) -> type[PreTrainedModel]:
    """`half_class` with a rank's mixers, and with plans for what transformers' own leave whole."""

    class DividedHalf(half_class):
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object):
            super().__init__(config, *args, **kwargs)
            complete_plan(self, text_of(self))
            mixers.divide(self)

        def _expand_parallel_plan(self, plan: dict[str, str]) -> dict[str, str]:
            ways = super()._expand_parallel_plan(plan)
            return {name: ways[name] for name in mixers.outside(ways)}

    return _named_like(DividedHalf, half_class)


def _reading_class(
    half_class: type[PreTrainedModel], tensors: dict[str, Any] | None, begin: Callable[..., None],
    mixers: MixerShares | None,
) -> type[PreTrainedModel]:  # fmt: skip
    """`half_class` that calls `begin` when it is known what will be read. `tensors`: loaded in place of those
    that transformers would take from the weight files; each is read where it is sliced, or touched later.
    Constructed without initial values: on the meta device each would be computed in Python, for nothing."""
    if mixers is not None:
        half_class = _divided_class(half_class, mixers)

    class ReadHalf(half_class):
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object):
            with no_init_weights():
                super().__init__(config, *args, **kwargs)

        @staticmethod
        def _load_pretrained_model(
            model: Any, given: Any, files: Any, how: LoadStateDictConfig, *args: Any
        ) -> Any:
            conversions = fit_experts(model, how.weight_mapping or [], tensors)
            begin(model, conversions)
            if tensors is not None:
                given = tensors
                if mixers is not None:
                    given = mixers.of_rank(tensors, taken_names(model, conversions, tensors))
            how = replace(how, weight_mapping=conversions)
            return half_class._load_pretrained_model(model, given, files, how, *args)

    return _named_like(ReadHalf, half_class)


def _put_aside(model: nn.Module, names: Sequence[str], tensor: torch.Tensor) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter._is_hf_initialized = True
    for name in names:
        path, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(path)
            del module._parameters[leaf]
        except (AttributeError, KeyError) as error:
            raise StaleWeights(f"the model has no parameter {name}") from error
        module.__dict__[leaf] = parameter


def _register(model: nn.Module) -> None:
    """Makes the parameters that were put aside parameters again."""
    for module in model.modules():
        for leaf in [leaf for leaf, value in vars(module).items() if isinstance(value, nn.Parameter)]:
            module.register_parameter(leaf, module.__dict__.pop(leaf))


def _named_like(half_class: Any, model_class: type) -> Any:
    """Copies name and module: transformers looks up conversions and quantizers by them. Tensors that the
    class has no place for are left unread."""
    half_class._keys_to_ignore_on_load_unexpected = [r".*"]
    half_class.__name__ = half_class.__qualname__ = model_class.__name__
    half_class.__module__ = model_class.__module__
    return half_class
