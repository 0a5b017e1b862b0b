"""The language half: token ids and embedding rows in, logits out, KV in the caller's block memory.

Wraps transformers' unmodified text backbone and head. Owns the weights. The engine owns the KV and the block
tables and decides what to run. Runs on the engine's thread, one call at a time. Calls block and may
synchronise the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.config.adapters import NO_ADAPTERS, Adapter, AdapterRoom
from cluster.config.checkpoint import length_limit
from cluster.kvcache.memory import BlockMemory
from cluster.model.adapters import unused_in
from cluster.model.attention import PagedBatch, UnknownSizes
from cluster.model.batches import FeatureSlice, SequenceChunk, decode_step, packed_step
from cluster.model.cpu.modules import WeightDtype
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.cuda.draw import to_device
from cluster.model.cuda.step_inputs import StepInputs
from cluster.model.experts import expert_row_bytes
from cluster.model.half_files import CheckRoom
from cluster.model.hidden_rows import HiddenRows
from cluster.model.kv_format import KvCacheDtype, layer_cache
from cluster.model.language_parts import LanguageParts, load_parts, probed_parts
from cluster.model.loading import fingerprint
from cluster.model.positions import RULES, PromptPositions
from cluster.model.probe import LayerShape, window_of_all
from cluster.model.sharding import UNDIVIDED, Sharding
from cluster.model.slot_matrices import Updates
from cluster.model.state_probe import check_states
from cluster.model.state_step import in_step
from cluster.model.states import StateSpan
from cluster.model.step_adapters import StepAdapters
from cluster.model.support import backbone_of, has_windowed_spans, num_deepstack_layers
from cluster.types.request import Prompt

MAX_SCORED_ROWS = 64  # logits of so many tokens of a prompt are in memory at once

__all__ = ["FeatureSlice", "LanguageModel", "PromptPositions", "SequenceChunk"]


class LanguageModel:
    """Attributes are fixed at load, but for `adapter_slots`.

    kv_layout: K and V of every layer that has some of its own, in the format of `kv_format`.
    states: what its mixers keep of sequences (`cluster.model.states`); None: nothing.
    state_blocks: of the KV memory, for one state.
    num_layers: the layers with KV of their own. The last layers of some models attend over the KV of earlier
    ones.
    feature_width: hidden_size * (1 + deep-stack layers).
    position_axes: of the position of a text token.
    sliding_window: the largest window of all layers, in tokens, including the token itself; None if a layer
    has no window.
    adapters: those that it had at first.
    num_adapter_slots: adapters that it has room for at once.
    adapter_slots: slots of the adapters that it has, by digest. `set_adapter` changes them.
    hidden_rows: of the last step's tokens, if they are kept (`keep_rows`).
    inputs: what the text model is given for token ids.
    chunk_cut_spans: a chunk must not end inside a media span, because the span's tokens see each other.
    """

    def __init__(self, parts: LanguageParts):
        model, config = parts.model, parts.model.config
        text_config = config.get_text_config()
        self._model, self._text, self._backend = model, parts.text, parts.attention
        self._base = backbone_of(model)
        weight = parts.embed.weight
        self.inputs = parts.inputs
        self._head, self._post_head, self._decoder = parts.head, parts.post_head, parts.decoder
        self._slots = parts.adapters
        self._adapters = StepAdapters() if parts.adapters is None else parts.adapters.step
        self.adapters: Sequence[Adapter] = () if parts.adapters is None else parts.adapters.room.adapters
        self.num_adapter_slots = self._adapters.num_slots
        self.adapter_slots: dict[str, int] = {}
        self._position_rule = RULES[parts.family.positions]
        self.family: str = config.model_type
        self._windowed_spans = has_windowed_spans(config)
        self.chunk_cut_spans: bool = parts.family.is_media_bidirectional or self._windowed_spans
        self.hidden_size: int = text_config.hidden_size
        self.vocab_size: int = parts.vocab_size
        shapes = parts.probed.shapes
        self._kv_owners = {i: shape.owner for i, shape in enumerate(shapes) if shape.owner is not None}
        self.collectives = parts.collectives
        self.num_layers: int = len(shapes) - len(self._kv_owners)
        self.states = parts.states
        self.state_blocks: int = 0 if parts.states is None else parts.states.layout.num_blocks
        self.feature_width: int = self.hidden_size * (1 + num_deepstack_layers(config))
        self.position_axes = self._position_rule.axes
        limit, longest = length_limit(text_config.to_dict()), text_config.max_position_embeddings
        self.max_model_len: int = longest if limit is None else min(longest, limit.num_tokens)
        self.eos_token_ids: tuple[int, ...] = _eos_token_ids(model)
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.block_size = parts.block_size
        self.weight_bytes, self.scratch_bytes = parts.weight_bytes, parts.scratch_bytes
        self.evictable_bytes = parts.evictable_bytes
        self.fingerprint: str = fingerprint(config, self.dtype)
        self.shapes: Sequence[LayerShape] = shapes
        self.sliding_window: int | None = None if self.states else window_of_all(shapes)
        self.kv_layout = parts.kv_layout
        self.hidden_rows: HiddenRows | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = 16,
        kv_cache_dtype: KvCacheDtype = "auto",
        weight_dtype: WeightDtype = "auto",
        sharding: Sharding = UNDIVIDED,
        weight_cache: WeightCache | None = None,
        adapters: AdapterRoom = NO_ADAPTERS,
        check_room: CheckRoom | None = None,
    ) -> LanguageModel:
        """Reads only the language half of the checkpoint, or this rank's share of it
        (cluster/model/parallel.py). On the CPU a whole half runs on native kernels, if these can be built.
        `weight_dtype` "int8": linears with 8 bit weights, CPU only. `weight_cache`: where packed weights are
        kept and shared. `adapters`: that sequences may have, and room for others. `check_room`: is asked
        before a weight is read, and may refuse. Raises ConfigError for everything that is not supported."""
        parts = load_parts(
            path, dtype=dtype, device=device, block_size=block_size, kv_cache_dtype=kv_cache_dtype,
            weight_dtype=weight_dtype, sharding=sharding, weight_cache=weight_cache, adapters=adapters,
            check_room=check_room,
        )  # fmt: skip
        model = cls(parts)
        if adapters.num_slots:
            model._try_adapters(adapters)
        if model.state_blocks:
            check_states(model)
        return model

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, *, block_size: int = 16, kv_cache_dtype: KvCacheDtype = "auto"
    ) -> LanguageModel:
        """Uses the language half of a model in memory. Afterwards its text backbone runs only through this
        object."""
        language = cls(probed_parts(model.eval(), block_size, kv_cache_dtype))
        if language.state_blocks:
            check_states(language)
        return language

    def positions(self, prompt: Prompt) -> PromptPositions:
        """Positions of every prompt token, from ids and media geometries. CPU only; any thread."""
        return self._position_rule.of_prompt(self._base, prompt)

    @property
    def recorded_tokens(self) -> int:
        return 0

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[SequenceChunk], kv: BlockMemory, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Writes the chunks' KV. Returns [sum of num_logits, vocab_size] float32, chunk after chunk: the
        logits of each chunk's last `num_logits` tokens, each of which predicts the token after it. If
        drafts among them are wrong, the next call starts behind the accepted tokens and overwrites the KV
        of the others. `on_layer(i)` is called when layer i's KV of this forward is written (on CUDA:
        enqueued). Fills in the `scores` of chunks that have some."""
        step = packed_step(chunks, kv, self.block_size, self.device, self.inputs.known_ids)
        step.batch.windowed_spans, step.batch.kv_owners = self._windowed_spans, self._kv_owners
        step.batch.on_layer = on_layer
        embeds, extra = self.inputs.rows(step.token_ids), self.inputs.of_layers(step.token_ids)
        places, deep = self._place_features(embeds, chunks)
        if deep is not None:
            mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=self.device)
            for place in places:
                mask[0, place] = True
            extra = {**extra, "visual_pos_masks": mask, "deepstack_visual_embeds": deep}
        spans = [chunk.states or (StateSpan(len(chunk.token_ids)),) for chunk in chunks]
        with self._adapters.of_step(step.adapters), in_step(self.states, kv, spans):
            return self._run(embeds, step.position_ids, step.batch, step.wanted, extra, chunks).float()

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Sequence[int] | Tensor,
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
        adapters: Sequence[int] = (),
        states: Sequence[StateSpan] = (),
    ) -> Tensor:
        """Computes one token for each of B sequences. token_ids: if a tensor, [B] int64 on the model's
        device, where it is read. context_lens[i]: KV length before this token, which is its index.
        block_tables[i] covers context_lens[i] + 1 tokens. adapters: their slots, or 0; empty: no sequence
        has one. states: of a hybrid model; empty: of new sequences, and nothing is kept. Returns
        [B, vocab_size] float32 logits."""
        is_on_device = isinstance(token_ids, Tensor)
        known = self.inputs.known_on_device(token_ids) if is_on_device else self.inputs.known_ids(token_ids)
        step = decode_step(
            known, context_lens, deltas, block_tables, adapters, kv, self.block_size, self.device
        )
        step.batch.kv_owners = self._kv_owners
        embeds, extra = self.inputs.rows(step.token_ids), self.inputs.of_layers(step.token_ids)
        spans = [(span,) for span in states] or [(StateSpan(1),)] * len(context_lens)
        with self._adapters.of_step(step.adapters), in_step(self.states, kv, spans):
            return self._run(embeds, step.position_ids, step.batch, step.wanted, extra).float()

    def step(
        self, inputs: StepInputs, kv: BlockMemory, embeds: Tensor | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """`forward` or `decode` over tensors at fixed addresses, for a CUDA graph. embeds [T, hidden_size]
        may be overwritten; None: the tokens are looked up. `on_layer(i)` is called when layer i's KV is
        enqueued. Returns [W, vocab_size] logits in any dtype. Reads nothing from the host."""
        if embeds is None:
            embeds = self.inputs.rows(inputs.token_ids)
        unknown: Any = UnknownSizes()
        batch = PagedBatch(
            kv,
            self.block_size,
            slots=inputs.slots.long(),
            query_lens=unknown,
            context_lens=unknown,
            block_tables=unknown,
            context_lens_tensor=inputs.step.contexts,
            bidirectional_spans=unknown,
            kv_owners=self._kv_owners,
            windowed_spans=self._windowed_spans,
            device=inputs.step,
            on_layer=on_layer,
        )
        extra = self.inputs.of_layers(inputs.token_ids)
        adapters = None if inputs.adapters is None else inputs.adapters.long()
        with self._adapters.of_step(adapters), in_step(self.states, kv, recorded=inputs.states):
            return self._run(embeds, inputs.position_ids.long(), batch, inputs.wanted, extra)

    def place_embeds(self, token_ids: Tensor, chunks: Sequence[SequenceChunk], embeds: Tensor) -> None:
        """Writes the embeddings of token_ids [T], and in their places the feature rows of the chunks, into
        embeds [T, hidden_size]. The features have no rows for deep-stack layers."""
        embeds.copy_(self.inputs.rows(token_ids))
        self._place_features(embeds, chunks)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size], as the text model returns it → [n, vocab_size]."""
        logits = self._head(hidden)
        return logits if self._post_head is None else self._post_head(logits)

    def keep_rows(self, rows: HiddenRows) -> None:
        """Every later step keeps rows of its tokens there. Steps then run layer by layer. Call it once,
        before steps are recorded."""
        rows.attach(self._text)
        self.hidden_rows, self._decoder = rows, None

    def can_capture(self, kv: BlockMemory) -> bool:
        """Whether a `step` may be recorded in a CUDA graph."""
        return all(self._backend.can_capture(layer_cache(kv, i)) for i in range(self.num_layers))

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], kv: BlockMemory) -> None:
        """Block targets[i] becomes a copy of block sources[i]. On CUDA: enqueued."""
        kv.copy_blocks(sources, targets)

    def score_bytes(self, num_tokens: int) -> int:
        """The most memory that attention takes for scores in a step with so many tokens of prompts."""
        width = max(max(shape.key[1], shape.value[1]) for shape in self.shapes)
        layers = self._model.config.get_text_config().per_layer_config
        num_heads = max(layer.num_attention_heads for layer in layers)
        return self._backend.score_bytes(num_heads, width, num_tokens, self.max_model_len)

    def expert_bytes(self, num_tokens: int) -> int:
        """The most memory that experts take for rows of a step with so many tokens; 0: there are none."""
        return num_tokens * expert_row_bytes(self._text, self._model.config.get_text_config())

    @property
    def kernels_s(self) -> float | None:
        """How long each thread was in native kernels in the last step, on average. None: not known, as the
        model does not run in one native call."""
        return None if self._decoder is None else self._decoder.kernels_s

    def _run(
        self, embeds: Tensor, position_ids: Tensor, batch: PagedBatch, rows: Tensor,
        extra: Mapping[str, object] = MappingProxyType({}), chunks: Sequence[SequenceChunk] = (),
    ) -> Tensor:  # fmt: skip
        """embeds [T, hidden_size], which may be overwritten; rows [n] → [n, vocab_size] logits of these
        tokens, in any dtype. `extra`: more arguments of the text model. `chunks`: those of the T tokens, if
        they may have scores."""
        if self._decoder is not None and not extra:
            logits = self._decoder.logits(
                embeds[None], self._position_rule.with_axes(position_ids), batch, rows
            )
            self._score(chunks, lambda scored: self._text.norm(embeds[None, scored])[0])
            return logits
        hidden = self._hidden(embeds, position_ids, batch, extra)
        self._score(chunks, lambda scored: hidden[scored])
        if len(rows) == 0:
            return hidden.new_empty(0, self.vocab_size)
        is_all = batch.is_decode and len(rows) == len(hidden)
        return self.logits_of(hidden if is_all else hidden[rows])

    def read_adapter(self, adapter: Adapter) -> Updates:
        """Blocks. Any thread. Raises ConfigError for an adapter that does not fit the model."""
        assert self._slots is not None, "this model has no room for adapters"
        return self._slots.read(adapter)

    def write_adapter(self, slot: int, updates: Updates) -> None:
        """Writes this rank's slot, which no sequence has; steps may run. Blocks. One thread at a time."""
        assert self._slots is not None
        self._slots.write(slot, updates)

    def set_adapter(self, slot: int, digest: str) -> None:
        """Lets sequences have what was written into the slot, under this name; empty: none may."""
        kept = {own: place for own, place in self.adapter_slots.items() if place != slot}
        self.adapter_slots = kept | ({digest: slot} if digest else {})

    def _try_adapters(self, room: AdapterRoom) -> None:
        """One step of a block: linears that the model does not call in it lose their room. Then it gets the
        adapters of `room`. Raises ConfigError if one of these would be left out."""
        assert self._slots is not None
        kv = BlockMemory(self.kv_layout, 1, self.device)
        chunk = SequenceChunk([i % self.vocab_size for i in range(self.block_size)], 0, 0, [0], adapter=1)
        self._slots.leave_out(unused_in(self._text, lambda: self.forward([chunk], kv)))
        self._slots.stage_writes()
        for slot, adapter in enumerate(room.adapters, 1):
            self.write_adapter(slot, self.read_adapter(adapter))
            self.set_adapter(slot, adapter.digest)

    def _score(self, chunks: Sequence[SequenceChunk], hidden: Callable[[Tensor], Tensor]) -> None:
        """`hidden(rows)`: of some of the T tokens, as the head takes it."""
        first = 0
        for chunk in chunks:
            if (scores := chunk.scores) is not None:
                rows = to_device(scores.rows, self.device) + first
                for some in rows.split(MAX_SCORED_ROWS):
                    scores.take(self.logits_of(hidden(some)).float())
            first += len(chunk.token_ids)

    def _hidden(
        self, embeds: Tensor, position_ids: Tensor, batch: PagedBatch, extra: Mapping[str, object]
    ) -> Tensor:
        """embeds [T, hidden_size] → [T, hidden_size]."""
        output = self._text(
            inputs_embeds=embeds[None],
            position_ids=self._position_rule.with_axes(position_ids),
            use_cache=False,
            paged=(batch, self._backend),
            **extra,
        )
        return output.last_hidden_state[0]

    def _place_features(
        self, embeds: Tensor, chunks: Sequence[SequenceChunk]
    ) -> tuple[list[slice], list[Tensor] | None]:
        """Writes the feature rows into `embeds`. Returns their places, in order, and one [rows, hidden_size]
        tensor per deep-stack layer (None: no such layers, or no media in this forward)."""
        places, deep_rows, chunk_start = [], [], 0
        for chunk in chunks:
            for piece in sorted(chunk.features, key=lambda piece: piece.start):
                start = chunk_start + piece.start
                places.append(slice(start, start + len(piece.rows)))
                rows = piece.rows.to(device=self.device, dtype=self.dtype)
                embeds[places[-1]] = rows[:, : self.hidden_size]
                deep_rows.append(rows[:, self.hidden_size :])
            chunk_start += len(chunk.token_ids)
        if not places or self.feature_width == self.hidden_size:
            return places, None
        return places, list(torch.cat(deep_rows).split(self.hidden_size, dim=-1))


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """As in `generate`: from the generation configuration, or else from the text configuration."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
