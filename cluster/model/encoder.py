"""The encoder half: media tensors in, embedding rows out.

Wraps transformers' unmodified encoders and projectors. Owns the weights and nothing else. Runs on the
engine's thread, one call at a time. Calls block; on a GPU some families' calls return before the device has
computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.errors import ConfigError
from cluster.model.cpu.encoder_patches import optimise_patches
from cluster.model.cpu.encoder_search import optimise_encoder_layers
from cluster.model.cpu.library import load as load_kernels
from cluster.model.cpu.modules import optimise_modules
from cluster.model.cpu.weight_cache import Making, WeightCache, WeightKey, load_through
from cluster.model.cuda.capture import Capture, capture_cuda
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.recorded_calls import RecordedCalls, max_bytes
from cluster.model.cuda.tower_blocks import optimise_tower_blocks
from cluster.model.cuda.uploads import Finish, Uploads
from cluster.model.half_files import CheckRoom
from cluster.model.loading import Half, fingerprint, load_half
from cluster.model.media_calls import CALLS, Splitter
from cluster.model.support import backbone_of, family_of, num_deepstack_layers
from cluster.types.media import Modality


class EncoderModel:
    """feature_width: columns of an embedding row. These are the embedding, then hidden_size columns for every
    deep-stack layer (zeros for a modality without them)."""

    def __init__(self, model: PreTrainedModel):
        config = model.config
        family = family_of(config)
        if not family.modalities:
            raise ConfigError(
                f"model type '{config.model_type}' has no media encoder: it needs no encode pool"
            )
        self.config = config
        self._base = backbone_of(model)
        encoders = family.encoders_of(config.to_dict())
        self._calls = {modality: CALLS[form] for modality, form in encoders.items()}
        self.modalities: tuple[Modality, ...] = tuple(encoders)
        self.feature_width: int = config.get_text_config().hidden_size * (1 + num_deepstack_layers(config))
        self.dtype: torch.dtype = next(model.parameters()).dtype
        # matrices that exist in packed form only are on the meta device
        self.device: torch.device = next(p.device for p in model.parameters() if not p.is_meta)
        self.fingerprint: str = fingerprint(config, self.dtype)
        self.evictable_bytes = 0  # of weights in a mapped file that are not locked in memory
        self._uploads = Uploads(self.device, self.dtype) if self.device.type == "cuda" else None
        self._recorded: RecordedCalls | None = None
        self.weight_bytes: int = sum(p.numel() * p.element_size() for p in model.parameters())

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu",
        weight_cache: WeightCache | None = None, check_room: CheckRoom | None = None,
    ) -> EncoderModel:  # fmt: skip
        """Reads only the encoder half of the checkpoint. On the CPU its blocks (or else their linears, gated
        MLPs and norms) and patch projections run on native kernels, if these can be built; on a GPU its
        blocks are ten launches, other packed attention is one a block, and calls of forms that come again are
        recorded. `weight_cache`:
        where packed weights are kept and shared. `check_room`: is asked before a weight is read, and may
        refuse. Raises ConfigError for models that are not supported."""

        def make(making: Making) -> EncoderModel:
            half = load_half(
                path, Half.ENCODER, dtype=dtype, device=device, mapped=making.mapped, check_room=check_room
            )
            encoder = cls(half)
            encoder.evictable_bytes = making.evictable_bytes
            if encoder.device.type == "cpu":
                if (kernels := making.kernels_for(half)) is not None:
                    optimise_encoder_layers(encoder._base, kernels)
                    optimise_patches(encoder._base, kernels)
                    optimise_modules(encoder._base, kernels)
            else:
                optimise_tower_blocks(encoder._base)
                optimise_packed_attention(encoder._base)
                encoder.record(capture_cuda(is_alone=False))
            return encoder

        native = load_kernels() if torch.device(device).type == "cpu" else None
        return load_through(weight_cache, WeightKey(Path(path), Half.ENCODER, dtype, "auto"), native, make)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> EncoderModel:
        return cls(model.eval())

    def on_block(self, function: Callable[[], None]) -> None:
        """Calls `function` after every block of an encoder, on the thread that encodes."""
        for module in self._base.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    block.register_forward_hook(lambda *_: function())

    def splitter(self, modality: Modality) -> Splitter | None:
        """Splits items of this modality into pieces, each of which `encode` takes as an item; None: items
        cannot be split."""
        return self._calls[modality].splitter

    def upload(self, item: Mapping[str, Tensor], finish: Finish = dict) -> Mapping[str, Tensor]:
        """What `finish` makes of the item, in the memory where `encode` reads it: on a GPU from a copy there.
        Call it on any thread but the engine's. It blocks until that is done, while the device continues to
        compute."""
        return finish(item) if self._uploads is None else self._uploads.copy(item, finish)

    @torch.inference_mode()
    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """One [num_tokens, feature_width] tensor per item, equal up to rounding (1e-5) to encoding the item
        alone.

        items: for each media item the HF processor's tensors, batch dimension included, e.g. `pixel_values`
        [patches, d] + `image_grid_thw` [1, 3], or `input_features` [1, mels, frames] +
        `feature_attention_mask`.
        """
        run = self._run if self._recorded is None else self._recorded.encode
        return run(modality, [self._on_device(item) for item in items])

    def record(self, capture: Capture) -> None:
        """From now on, calls of forms that come again are recorded (`recorded_calls`), and replayed. Call it
        when the modules are in their final form."""
        self._recorded = RecordedCalls(self._run, self.device, capture)

    def record_next(self) -> bool:
        """Records one form that waits for it; False: none does. Blocks. On the engine's thread, between
        calls."""
        return self._recorded is not None and self._recorded.record_next()

    def recorded_bytes(self, row_bytes: int) -> int:
        """Returns the bytes that recorded calls take at most. `row_bytes`: of a call, for one row."""
        return 0 if self._recorded is None else max_bytes(row_bytes)

    def _run(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        outputs = self._calls[modality].run(self._base, items)
        return [self._full_width(rows) for rows in outputs]

    def _on_device(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Floating-point tensors in the model's dtype, as the family's own forward would cast them."""
        if self._uploads is not None:  # the allocator must wait for this stream before it reuses their memory
            stream = torch.cuda.current_stream(self.device)
            for value in item.values():
                if value.is_cuda:
                    value.record_stream(stream)
        return {
            key: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for key, value in item.items()
        }

    def _full_width(self, rows: Tensor) -> Tensor:
        missing = self.feature_width - rows.shape[-1]
        return torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()
