"""A door's look at the media of one request: what each item is, how closely it is looked at, what stands for it in the prompt.

    look     every item, which a surveyor process has opened (`router.prompts.intake`), is laid out as the client asked; an item that cannot
             be used is refused by name, or left out where the client prefers an answer without it
    reduce   where all together cost more than there is room for, or encoders are behind: `router.prompts.media_budget`
    items    what encoders are sent; a clip that is heard is two items

No file is opened here. Milliseconds of arithmetic and of the model's processor, run on the door's threads for text. Thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from cluster.errors import ContextLengthError, MediaError, RequestError, UnsupportedError
from cluster.media.fetch import FetchedMedia
from cluster.media.hashing import media_hash
from cluster.media.processor import MediaProcessor
from cluster.media.settings import item_name, naming
from cluster.media.sources import MediaSource
from cluster.media.survey import probe_of
from cluster.media.surveyor import Surveyed
from cluster.types.media import MediaGeometry, MediaItem, MediaLayout, MediaOptions, MediaProbe, Modality
from router.calls import MediaNote, MediaRules
from router.prompts.media_budget import Reduction, ReductionReason, fit


@dataclass(frozen=True)
class Content:
    """One item's bytes and what they are."""

    fetched: FetchedMedia
    surveyed: Surveyed


@dataclass(frozen=True)
class MeasuredItem:
    """One item as the client sent it, looked at."""

    item_idx: int  # among the request's items
    modality: Modality
    content: Content
    options: MediaOptions
    probe: MediaProbe
    sound: MediaProbe | None  # of a clip that is heard
    layout: MediaLayout
    encoded: MediaGeometry  # of the item before pooling: what an encoder computes for it

    @property
    def num_tokens(self) -> int:
        """Embedding rows, the sound track's included."""
        return _rows(self.layout)

    @property
    def num_encoded_rows(self) -> int:
        """Those that encoders compute, the sound track's included."""
        return self.encoded.num_tokens + sum(
            geometry.num_tokens for kind, geometry in self.layout.parts if kind is not self.modality
        )

    @property
    def num_sound_tokens(self) -> int:
        """Those of them that no reduction takes away."""
        return sum(geometry.num_tokens for kind, geometry in self.layout.parts if kind is Modality.AUDIO)


class MediaPlanner:
    def __init__(self, processor: MediaProcessor | None, is_held: Callable[[str], bool]):
        """`is_held`: whether an encoder has, or is about to have, an item of that media hash."""
        self._processor = processor
        self._is_held = is_held

    def look(
        self, sources: Sequence[MediaSource], contents: Sequence[Content | MediaError], rules: MediaRules
    ) -> tuple[list[MeasuredItem], list[MediaNote]]:
        """Raises MediaError and UnsupportedError; with `omits_bad`, items that cannot be used are notes instead."""
        looks: list[MeasuredItem] = []
        notes: list[MediaNote] = []
        for item_idx, (source, content) in enumerate(zip(sources, contents, strict=True)):
            try:
                if isinstance(content, MediaError):
                    raise content
                looks.append(self._look_at(item_idx, source.modality, content, source.options))
            except MediaError as error:
                if not rules.omits_bad:
                    raise
                notes.append(MediaNote(item_idx, source.modality, "error", error=error.message))
        return looks, notes

    def reduce(
        self, looks: Sequence[MeasuredItem], max_tokens: int, rules: MediaRules, reason: ReductionReason
    ) -> tuple[list[MeasuredItem], list[MediaNote]]:
        """The same items in at most so many tokens. Raises ContextLengthError when there is no way, or none is wanted."""
        total = sum(look.num_tokens for look in looks)
        seen = [self._as_seen(look) for look in looks]
        reductions = None
        if not rules.is_exact:
            reductions = fit(
                seen,
                max_tokens,
                lambda idx, reduction: self._measure(looks[idx], self._settled(seen[idx], reduction)),
            )
        if reductions is None:
            raise ContextLengthError(
                f"the media of this request have {total} tokens; there is room for {max(0, max_tokens)}",
                param="messages",
            )
        reduced = [
            self._cut(look, self._settled(size, reduction))
            for look, size, reduction in zip(looks, seen, reductions, strict=True)
        ]
        return reduced, [
            _note(after, reason) for before, after in zip(looks, reduced, strict=True) if after is not before
        ]

    def relieve(
        self, looks: Sequence[MeasuredItem], share: float, tenant: str
    ) -> tuple[list[MeasuredItem], list[MediaNote]]:
        """What encoders have to work for in `share` of its tokens, sounds excepted, if that can be done; what they hold costs nothing."""
        new = [look for look in looks if not all(map(self._is_held, self._names(look, tenant)))]
        num_heard = sum(look.num_sound_tokens for look in new)
        wanted = math.ceil((sum(look.num_tokens for look in new) - num_heard) * share)
        try:
            reduced, notes = self.reduce(new, num_heard + wanted, MediaRules(), ReductionReason.LOAD)
        except ContextLengthError:
            return list(looks), []
        by_idx = {look.item_idx: look for look in reduced}
        return [by_idx.get(look.item_idx, look) for look in looks], notes

    def items(self, look: MeasuredItem, tenant: str) -> list[MediaItem]:
        """What encoders make of one look: one item, or two of a clip that is heard."""
        names = self._names(look, tenant)
        return [
            MediaItem(
                kind,
                look.content.fetched.data,
                name,
                geometry,
                _options_of(look, kind),
                num_encoded_rows=look.encoded.num_tokens if kind is look.modality else geometry.num_tokens,
            )
            for name, (kind, geometry) in zip(names, look.layout.parts, strict=True)
        ]

    def check_rows(self, looks: Sequence[MeasuredItem], max_picture_rows: int, max_rows: int) -> None:
        """Of what encoders would compute for the request, whatever is left of it after pooling. `max_picture_rows`: that attend to each
        other, of an image or of a clip's frames that are seen together. Raises MediaError and RequestError."""
        for look in looks:
            grid = look.encoded.grid_thw
            num_rows = look.encoded.num_tokens // (1 if grid is None else max(1, grid[0]))
            if look.modality is not Modality.AUDIO and num_rows > max_picture_rows:
                name = item_name(look.modality, look.item_idx)
                raise MediaError(
                    f"{name}: an encoder would compute {num_rows} rows for one picture; at most {max_picture_rows} are accepted",
                    param="messages",
                )
        total = sum(look.num_encoded_rows for look in looks)
        if total > max_rows:
            raise RequestError(
                f"encoders would compute {total} rows for this request; at most {max_rows} are accepted",
                param="messages",
            )

    def processor(self, modality: Modality) -> MediaProcessor:
        if self._processor is None:
            raise UnsupportedError(f"this model takes no {modality} input", param="messages")
        return self._processor

    def _look_at(
        self, item_idx: int, modality: Modality, content: Content, options: MediaOptions
    ) -> MeasuredItem:
        processor = self.processor(modality)
        surveyed, sound = content.surveyed, None
        with naming(modality, item_idx):
            known = probe_of(modality, surveyed.survey, processor.settings, options)
            if surveyed.sound is not None:
                sound = probe_of(Modality.AUDIO, surveyed.sound, processor.settings, options)
        layout = processor.layout(known, options, sound, item_idx=item_idx)
        encoded = processor.layout(known, _unpooled(options), sound, item_idx=item_idx).geometry
        return MeasuredItem(item_idx, modality, content, options, known, sound, layout, encoded)

    def _as_seen(self, look: MeasuredItem) -> MediaProbe:
        """The size in which the model sees it, which a reduction starts from: seldom that of the file."""
        if look.encoded.grid_thw is None:
            return look.probe
        _, height, width = look.encoded.grid_thw
        side = self.processor(look.modality).patch_side(look.modality)
        return msgspec.structs.replace(look.probe, width=width * side, height=height * side)

    def _settled(self, seen: MediaProbe, reduction: Reduction) -> Reduction:
        """Where a model bounds the pixels of whole clips, the frames that are left must not grow into the room of the others."""
        if reduction.max_frames is None or not self.processor(seen.modality).bounds_whole_clips:
            return reduction
        return replace(reduction, max_pixels=reduction.max_pixels or seen.width * seen.height)

    def _measure(self, look: MeasuredItem, reduction: Reduction) -> int:
        """Without looking at the file again."""
        known = look.probe
        if reduction.max_frames is not None:
            num_frames = min(reduction.max_frames, known.num_frames)
            known = msgspec.structs.replace(
                known, num_frames=num_frames, frame_idx=known.frame_idx[:num_frames]
            )
        options = _with_reduction(look.options, replace(reduction, max_frames=None))
        try:
            layout = self.processor(look.modality).layout(known, options, look.sound, item_idx=look.item_idx)
        except UnsupportedError:  # this family's images have one size
            layout = self.processor(look.modality).layout(
                known, look.options, look.sound, item_idx=look.item_idx
            )
        return _rows(layout)

    def _cut(self, look: MeasuredItem, reduction: Reduction) -> MeasuredItem:
        if reduction == Reduction():
            return look
        try:
            after = self._look_at(
                look.item_idx, look.modality, look.content, _with_reduction(look.options, reduction)
            )
        except UnsupportedError:
            options = _with_reduction(look.options, replace(reduction, max_pixels=None))
            after = self._look_at(look.item_idx, look.modality, look.content, options)
        return look if after.layout == look.layout else after

    def _names(self, look: MeasuredItem, tenant: str) -> list[str]:
        fingerprint = self.processor(look.modality).fingerprint
        return [
            media_hash(kind, look.content.fetched.digest, fingerprint, _options_of(look, kind), tenant)
            for kind, _ in look.layout.parts
        ]


def _rows(layout: MediaLayout) -> int:
    return sum(geometry.num_tokens for _, geometry in layout.parts)


def _unpooled(options: MediaOptions) -> MediaOptions:
    return msgspec.structs.replace(options, temporal_pooling=1, spatial_pooling=1)


def _options_of(look: MeasuredItem, kind: Modality) -> MediaOptions:
    """A clip's sound track is the same whichever frames are looked at."""
    return look.options if kind is look.modality else MediaOptions()


def _with_reduction(options: MediaOptions, reduction: Reduction) -> MediaOptions:
    changes: dict[str, int | None] = {}
    if reduction.max_frames is not None:
        changes["max_frames"] = reduction.max_frames
        changes["min_frames"] = (
            None if options.min_frames is None else min(options.min_frames, reduction.max_frames)
        )
    if reduction.max_pixels is not None:
        changes["max_pixels"] = reduction.max_pixels
        changes["min_pixels"] = (
            None if options.min_pixels is None else min(options.min_pixels, reduction.max_pixels)
        )
    return msgspec.structs.replace(options, **changes)


def _note(look: MeasuredItem, reason: ReductionReason) -> MediaNote:
    num_frames = look.probe.num_frames if look.modality is Modality.VIDEO else None
    return MediaNote(
        look.item_idx, look.modality, reason, look.num_tokens, num_frames, look.options.max_pixels
    )
