"""Plans the media of one request: the size of each item, its reduction if needed, and the items for the
encoders.

    measure  lay out every item as the client asked; another process has opened it before
             (`router.prompts.intake`). An item that cannot be used is refused by name, or left out if the
             client prefers an answer without it
    reduce   if all items together need more tokens than there is room for, or if encoders are overloaded:
             `router.prompts.media_budget`
    items    the items for the encoders; a clip with its sound track is two items

Opens no file. Takes milliseconds of arithmetic and of the model's processor, on the door's threads for text.
Thread-safe.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from cluster.errors import ContextLengthError, MediaError, RequestError, UnsupportedError
from cluster.media.fetch import FetchedMedia
from cluster.media.opener import Surveyed
from cluster.media.processor import MediaProcessor
from cluster.media.settings import item_name, naming
from cluster.media.sources import MediaSource
from cluster.media.survey import probe_of
from cluster.types.media import MediaGeometry, MediaItem, MediaLayout, MediaOptions, MediaProbe, Modality
from router.calls import MediaNote, MediaRules
from router.prompts.media_budget import Reduction, ReductionReason, fit

_in_order = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True)
class Content:
    """One item's bytes and their survey."""

    fetched: FetchedMedia
    surveyed: Surveyed


@dataclass(frozen=True, kw_only=True)
class MeasuredItem:
    """One item, laid out with its options."""

    item_idx: int  # among the request's items
    modality: Modality
    content: Content
    options: MediaOptions
    probe: MediaProbe
    sound: MediaProbe | None  # of a clip with its sound track
    layout: MediaLayout
    encoded: MediaGeometry  # before pooling: what an encoder computes for the item
    param: str  # the request field that contained it

    @property
    def num_tokens(self) -> int:
        """Embedding rows, including the sound track's."""
        return _rows(self.layout)

    @property
    def num_encoded_rows(self) -> int:
        """Embedding rows that encoders compute, including the sound track's."""
        return self.encoded.num_tokens + sum(
            geometry.num_tokens for kind, geometry in self.layout.parts if kind is not self.modality
        )

    @property
    def num_sound_tokens(self) -> int:
        """The sound's tokens, which no reduction removes."""
        return sum(geometry.num_tokens for kind, geometry in self.layout.parts if kind is Modality.AUDIO)


class MediaPlanner:
    def __init__(self, processor: MediaProcessor | None, is_held: Callable[[str], bool]):
        """`is_held`: whether an encoder has, or is about to have, the item with a media hash."""
        self._processor = processor
        self._is_held = is_held

    def measure(
        self, sources: Sequence[MediaSource], contents: Sequence[Content | MediaError], rules: MediaRules
    ) -> tuple[list[MeasuredItem], list[MediaNote]]:
        """Lays out the items. Raises MediaError and UnsupportedError. With `omits_bad`, an unusable item
        becomes a note."""
        measured: list[MeasuredItem] = []
        notes: list[MediaNote] = []
        for item_idx, (source, content) in enumerate(zip(sources, contents, strict=True)):
            try:
                if isinstance(content, MediaError):
                    raise content
                measured.append(
                    self._measure_item(item_idx, source.modality, content, source.options, source.param)
                )
            except MediaError as error:
                if not rules.omits_bad:
                    raise
                notes.append(MediaNote(item_idx, source.modality, "error", error=error.message))
        return measured, notes

    def reduce(
        self, measured: Sequence[MeasuredItem], max_tokens: int, rules: MediaRules, reason: ReductionReason
    ) -> tuple[list[MeasuredItem], list[MediaNote]]:
        """Returns the same items in at most `max_tokens`. Raises ContextLengthError if impossible or not
        allowed."""
        total = sum(item.num_tokens for item in measured)
        sizes = [self._encoded_size(item) for item in measured]
        reductions = None
        if not rules.is_exact:
            reductions = fit(
                sizes,
                max_tokens,
                lambda idx, reduction: self._num_tokens_after(
                    measured[idx], self._keep_frame_size(sizes[idx], reduction)
                ),
            )
        if reductions is None:
            raise ContextLengthError(
                f"the media of this request have {total} tokens; there is room for {max(0, max_tokens)}",
                param=_first_beyond(max_tokens, measured, [item.num_tokens for item in measured]),
            )
        reduced = [
            self._reduced(item, self._keep_frame_size(size, reduction))
            for item, size, reduction in zip(measured, sizes, reductions, strict=True)
        ]
        return reduced, [
            _note(after, reason)
            for before, after in zip(measured, reduced, strict=True)
            if after is not before
        ]

    def relieve(
        self, measured: Sequence[MeasuredItem], share: float, tenant: str
    ) -> tuple[list[MeasuredItem], list[MediaNote]]:
        """Reduces the items that encoders must compute to `share` of their tokens, apart from sound, if that
        is possible. Items that encoders already hold stay as they are."""
        new = [item for item in measured if not all(map(self._is_held, self._names(item, tenant)))]
        num_heard = sum(item.num_sound_tokens for item in new)
        wanted = math.ceil((sum(item.num_tokens for item in new) - num_heard) * share)
        try:
            reduced, notes = self.reduce(new, num_heard + wanted, MediaRules(), ReductionReason.LOAD)
        except ContextLengthError:
            return list(measured), []
        by_idx = {item.item_idx: item for item in reduced}
        return [by_idx.get(item.item_idx, item) for item in measured], notes

    def audio_s(self, measured: Sequence[MeasuredItem]) -> float:
        """Returns the seconds of sound in all items, clips with their sound tracks included."""
        if self._processor is None:
            return 0.0
        num_samples = sum((item.sound or item.probe).num_samples for item in measured)
        return num_samples / self._processor.settings.sampling_rate

    def items(self, item: MeasuredItem, tenant: str) -> list[MediaItem]:
        """Returns the encoders' items: one, or two for a clip with its sound track."""
        names = self._names(item, tenant)
        return [
            MediaItem(
                kind,
                item.content.fetched.data,
                name,
                geometry,
                _options_of(item, kind),
                num_encoded_rows=item.encoded.num_tokens if kind is item.modality else geometry.num_tokens,
                item_idx=item.item_idx,
                param=item.param,
            )
            for name, (kind, geometry) in zip(names, item.layout.parts, strict=True)
        ]

    def check_rows(self, measured: Sequence[MeasuredItem], max_picture_rows: int, max_rows: int) -> None:
        """Checks the rows that encoders would compute, before pooling. `max_picture_rows`: rows that attend
        to each other, of an image or of a clip's frames that are encoded together. Raises MediaError and
        RequestError."""
        for item in measured:
            grid = item.encoded.grid_thw
            num_rows = item.encoded.num_tokens // (1 if grid is None else max(1, grid[0]))
            if item.modality is not Modality.AUDIO and num_rows > max_picture_rows:
                name = item_name(item.modality, item.item_idx)
                raise MediaError(
                    f"{name}: an encoder would compute {num_rows} rows for one picture; "
                    f"at most {max_picture_rows} are accepted",
                    param=item.param,
                )
        num_rows = [item.num_encoded_rows for item in measured]
        if sum(num_rows) > max_rows:
            raise RequestError(
                f"encoders would compute {sum(num_rows)} rows for this request; at most {max_rows} are "
                "accepted",
                param=_first_beyond(max_rows, measured, num_rows),
            )

    def processor(self, modality: Modality) -> MediaProcessor:
        if self._processor is None:
            raise UnsupportedError(f"this model takes no {modality} input")
        return self._processor

    def _measure_item(
        self, item_idx: int, modality: Modality, content: Content, options: MediaOptions, param: str
    ) -> MeasuredItem:
        surveyed, sound = content.surveyed, None
        with naming(modality, item_idx, param):
            processor = self.processor(modality)
            known = probe_of(modality, surveyed.survey, processor.settings, options)
            if surveyed.sound is not None:
                sound = probe_of(Modality.AUDIO, surveyed.sound, processor.settings, options)
            layout = processor.layout(known, options, sound, item_idx=item_idx)
            unpooled = msgspec.structs.replace(options, temporal_pooling=1, spatial_pooling=1)
            encoded = processor.layout(known, unpooled, sound, item_idx=item_idx).geometry
        return MeasuredItem(
            item_idx=item_idx,
            modality=modality,
            content=content,
            options=options,
            probe=known,
            sound=sound,
            layout=layout,
            encoded=encoded,
            param=param,
        )

    def _encoded_size(self, item: MeasuredItem) -> MediaProbe:
        """Returns the item in the size that the model sees, where reductions start. The file's size usually
        differs."""
        if item.encoded.grid_thw is None:
            return item.probe
        _, height, width = item.encoded.grid_thw
        side = self.processor(item.modality).patch_side(item.modality)
        return msgspec.structs.replace(item.probe, width=width * side, height=height * side)

    def _keep_frame_size(self, size: MediaProbe, reduction: Reduction) -> Reduction:
        """Keeps the size of frames: if a model bounds the pixels of whole clips, they must not grow when
        other frames are removed."""
        if reduction.max_frames is None or not self.processor(size.modality).bounds_whole_clips:
            return reduction
        return replace(reduction, max_pixels=reduction.max_pixels or size.width * size.height)

    def _num_tokens_after(self, item: MeasuredItem, reduction: Reduction) -> int:
        """Returns the item's tokens after a reduction, without opening the file again."""
        known = item.probe
        if reduction.max_frames is not None:
            num_frames = min(reduction.max_frames, known.num_frames)
            known = msgspec.structs.replace(
                known, num_frames=num_frames, frame_idx=known.frame_idx[:num_frames]
            )
        options = _with_reduction(item.options, replace(reduction, max_frames=None))
        try:
            layout = self.processor(item.modality).layout(known, options, item.sound, item_idx=item.item_idx)
        except UnsupportedError:  # images of this family have a fixed size
            layout = self.processor(item.modality).layout(
                known, item.options, item.sound, item_idx=item.item_idx
            )
        return _rows(layout)

    def _reduced(self, item: MeasuredItem, reduction: Reduction) -> MeasuredItem:
        if reduction == Reduction():
            return item
        try:
            after = self._measured_again(item, _with_reduction(item.options, reduction))
        except UnsupportedError:
            options = _with_reduction(item.options, replace(reduction, max_pixels=None))
            after = self._measured_again(item, options)
        return item if after.layout == item.layout else after

    def _measured_again(self, item: MeasuredItem, options: MediaOptions) -> MeasuredItem:
        return self._measure_item(item.item_idx, item.modality, item.content, options, item.param)

    def _names(self, item: MeasuredItem, tenant: str) -> list[str]:
        fingerprint = self.processor(item.modality).fingerprint
        return [
            media_hash(kind, item.content.fetched.digest, fingerprint, _options_of(item, kind), tenant)
            for kind, _ in item.layout.parts
        ]


def _rows(layout: MediaLayout) -> int:
    return sum(geometry.num_tokens for _, geometry in layout.parts)


def _first_beyond(limit: int, measured: Sequence[MeasuredItem], sizes: Sequence[int]) -> str:
    """Returns the place of the first item with which the sum of the sizes is above the limit."""
    sums = zip(measured, accumulate(sizes), strict=True)
    return next((item.param for item, total in sums if total > limit), measured[-1].param)


def _options_of(item: MeasuredItem, kind: Modality) -> MediaOptions:
    """Returns an item's options. A clip's sound track does not depend on the frames that are chosen."""
    return item.options if kind is item.modality else MediaOptions()


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


def _note(item: MeasuredItem, reason: ReductionReason) -> MediaNote:
    num_frames = item.probe.num_frames if item.modality is Modality.VIDEO else None
    return MediaNote(
        item.item_idx, item.modality, reason, item.num_tokens, num_frames, item.options.max_pixels
    )


def media_hash(
    modality: Modality, digest: bytes, settings_fingerprint: str, options: MediaOptions, tenant: str
) -> str:
    """The key of an item in every cache: hex SHA-256. `digest` is the SHA-256 of the item's bytes. Items of
    different tenants never share a hash."""
    meaning = _in_order.encode((modality, settings_fingerprint, options, tenant))
    return hashlib.sha256(digest + meaning).hexdigest()
