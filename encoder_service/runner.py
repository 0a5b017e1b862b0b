"""From file bytes to embedding rows: `prepare` runs on CPU threads, in processes of its own where there are
some, `encode` on the engine's thread (device code). `named`: their errors, as they are sent to doors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.errors import ClusterError, InternalError, OverloadedError
from cluster.lost_device import is_device_lost
from cluster.media.decoders import Decoders
from cluster.media.preprocessors import Preprocessors
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.model.failures import is_out_of_memory
from cluster.types.media import MediaItem, MediaOptions, Modality

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What an encoder call needs of one item."""

    tensors: Mapping[str, torch.Tensor]  # the processor's output, on the device that the model reads
    num_units: int  # equal parts that may be encoded separately, in order; 1: the item is encoded whole

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Piece:
    """Units [start, end) of one item."""

    prepared: Prepared
    options: MediaOptions
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.prepared.num_units

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.is_last


class EncoderRunner:
    def __init__(
        self,
        model: EncoderModel,
        processor: MediaProcessor,
        decoders: Decoders,
        preprocessors: Preprocessors | None = None,
    ):
        """`preprocessors`: None: arrays are preprocessed in this process."""
        self._model = model
        self._processor = processor
        self._decoders = decoders
        self._preprocessors = preprocessors

    def prepare(self, item: MediaItem, is_wanted: Callable[[], bool] = lambda: True) -> Prepared:
        """Thread-safe; blocks. Raises MediaError for bytes that cannot be used, and NotWantedError soon after
        the item is not wanted any more.

        The error does not number the item: requests that share the item know it by different numbers, and
        their doors add them."""
        settings = self._processor.settings
        array = self._decoders.decode(item.modality, item.data, settings, item.options, is_wanted)
        return self.preprocess(item.modality, array, item.options, is_wanted)

    def preprocess(
        self,
        modality: Modality,
        array: np.ndarray,
        options: MediaOptions,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Prepared:
        """`array`: what `cluster.media.decoders` made of a file. Otherwise as `prepare`."""
        if self._preprocessors is None:
            begun = self._processor.begin(modality, array, options)
        else:
            begun = self._preprocessors.begin(modality, array, options, is_wanted)
        cut, num_units = self._model.splitter(modality), 1

        def finish(uploaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            """Looks at the grid as well: elsewhere that would wait for the calls of the model."""
            nonlocal num_units
            finished = self._processor.finish(modality, uploaded)
            num_units = 1 if cut is None else cut.num_units(finished)
            return finished

        tensors = self._model.upload(begun, finish)
        return Prepared(tensors, num_units)

    @torch.inference_mode()
    def encode(self, modality: Modality, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """[num_rows, feature_width] for each piece, pooled as the options of its item say. Consecutive pieces
        of one item give the rows of the whole item, if each piece but the last holds a multiple of the
        temporal pooling. Blocks until they are computed: the time of a call is that of the device, too."""
        items = [self._tensors(modality, piece) for piece in pieces]
        outputs = self._model.encode(modality, items)
        rows = [self._finish(modality, *each) for each in zip(pieces, items, outputs, strict=True)]
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()
        return rows

    def record_next(self) -> bool:
        """Records one form of call that waits for it, if there is one. See `EncoderModel.record_next`."""
        return self._model.record_next()

    def _tensors(self, modality: Modality, piece: Piece) -> Mapping[str, torch.Tensor]:
        cut = self._model.splitter(modality)
        if cut is None or piece.is_whole:
            return piece.prepared.tensors
        return cut.piece(piece.prepared.tensors, piece.start, piece.end)

    def _finish(
        self, modality: Modality, piece: Piece, item: Mapping[str, torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        cut = self._model.splitter(modality)
        if cut is not None and not piece.is_last:
            rows = rows[: len(rows) - cut.num_end_rows]
        return pooled(rows, item, piece.options)


def pooled(rows: torch.Tensor, item: Mapping[str, torch.Tensor], options: MediaOptions) -> torch.Tensor:
    """`rows`, pooled as the options say. Items without a grid of patches are returned unchanged."""
    grid = next((value for key, value in item.items() if key.endswith("grid_thw")), None)
    if grid is None or (options.temporal_pooling == 1 and options.spatial_pooling == 1):
        return rows
    t, h, w = (int(size) for size in grid[0])
    merge = math.isqrt(t * h * w // len(rows))  # patches are merged in squares
    if t * (h // merge) * (w // merge) != len(rows):
        raise InternalError(f"{len(rows)} embedding rows do not fit a grid of {t} x {h} x {w} patches")
    return pool_rows(rows, (t, h // merge, w // merge), options.temporal_pooling, options.spatial_pooling)


def pool_rows(rows: torch.Tensor, grid: tuple[int, int, int], temporal: int, spatial: int) -> torch.Tensor:
    """[t * h * w, d] rows of a grid (t, h, w) → one row for each group of `temporal` × `spatial` × `spatial`
    neighbours: their mean, computed in float32. Groups at the far edges are smaller."""
    t, h, w = grid
    volume = rows.float().view(t, h, w, -1).permute(3, 0, 1, 2)
    size = (min(temporal, t), min(spatial, h), min(spatial, w))
    means = torch.nn.functional.avg_pool3d(volume, size, size, ceil_mode=True, count_include_pad=False)
    return means.flatten(1).T.to(rows.dtype).contiguous()


def named(error: BaseException) -> ClusterError:
    """The error that is sent to doors. Details of unexpected errors are in the log. Raises the error again if
    the device is lost: the encoder must be replaced."""
    if isinstance(error, ClusterError):
        return error
    if is_out_of_memory(error):
        return OverloadedError("the encoder ran out of memory", retry_after_s=1.0)
    if is_device_lost(error):
        raise error
    logger.error("encoding failed", exc_info=error)
    return InternalError("the item could not be encoded; see the encoder's log")
