"""CUDA graphs of encoder calls, by their exact form.

A form is the modality, names, shapes and dtypes of the inputs, and the numbers of the integer ones, which
decide windows, masks and positions. A form runs unrecorded at first. Once it has come twice it waits for its
recording (`record_next`), which the encoder does when it has nothing else to do, or at the latest when the
form comes for the `MAX_PLAIN_CALLS + 1`-th time. From then on its inputs are copied into the recorded ones,
one launch, and its rows out of the recorded ones, another.

A recording makes two runs of blank inputs, one to find the constants of the form (`constants`) and one with
them, before it records a third. What cannot be recorded is remembered, named in the log, and served as
before: inputs or calls that are large, as the device is busy long enough for those, and calls that read what
they compute. A recording that fails is tried once more, after further calls of the form: what the first one
has compiled, loaded or remembered is there then. `MAX_FORMS` are kept, and at most `MAX_BYTES` of inputs,
outputs and constants; the least recently used goes first. All share one pool of memory, which grows to what
the largest call needs. So only one call may run at a time: one thread, one stream.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cluster.model.cuda.capture import Capture, Replay
from cluster.model.cuda.constants import Constants, NotRecordableError
from cluster.model.cuda.graphs import GRAPH_BYTES
from cluster.types.media import Modality

logger = logging.getLogger(__name__)

MAX_FORMS = 16
MAX_BYTES = 256 << 20  # of inputs, outputs and constants of all recorded calls
MAX_ROWS = 1024  # of a recorded call; more take the device as long as they take Python
MAX_INTEGERS = 1 << 14  # of a form
MAX_PLAIN_CALLS = 8  # of a form that can be recorded, if the encoder is never idle
MAX_KNOWN_FORMS = 256

Item = Mapping[str, Tensor]
Run = Callable[[Modality, Sequence[Item]], list[Tensor]]  # rows of each item


def max_bytes(row_bytes: int) -> int:
    """Returns the bytes that recorded calls take at most. `row_bytes`: of a call, for one row."""
    return MAX_BYTES + MAX_ROWS * row_bytes + MAX_FORMS * GRAPH_BYTES


@dataclass(frozen=True)
class InputForm:
    modality: Modality
    # name, shape and dtype of the tensors of each item
    tensors: tuple[tuple[tuple[str, tuple[int, ...], torch.dtype], ...], ...]
    integers: tuple[int, ...]  # of all integer tensors, in order

    @classmethod
    def of(cls, modality: Modality, items: Sequence[Item]) -> InputForm | None:
        """None: it has too many integers. Waits for the device, once, if these are there."""
        tensors = tuple(
            tuple((name, tuple(item[name].shape), item[name].dtype) for name in item) for item in items
        )
        found = [item[name].flatten() for item in items for name in item if _is_integer(item[name])]
        if sum(map(len, found)) > MAX_INTEGERS:
            return None
        integers = torch.cat([each.long() for each in found]).tolist() if found else ()
        return cls(modality, tensors, tuple(integers))

    def blank(self, device: torch.device) -> list[dict[str, Tensor]]:
        """Items of this form: with its integers, and zeros."""
        integers = iter(self.integers)
        items: list[dict[str, Tensor]] = []
        for tensors in self.tensors:
            item = {}
            for name, shape, dtype in tensors:
                item[name] = torch.zeros(shape, dtype=dtype)
                if _is_integer(item[name]):
                    flat = [next(integers) for _ in range(item[name].numel())]
                    item[name] = torch.tensor(flat, dtype=torch.int64).to(dtype).reshape(shape)
            items.append({name: tensor.to(device) for name, tensor in item.items()})
        return items


@dataclass(frozen=True)
class _Recorded:
    replay: Replay  # gives the rows of all items
    inputs: Sequence[Tensor]  # that it reads, without the integers
    lengths: Sequence[int]  # rows of each item
    constants: Constants  # whose memory it reads
    num_bytes: int

    def __call__(self, items: Sequence[Item]) -> list[Tensor]:
        torch._foreach_copy_(list(self.inputs), _pixels(items))
        return list(self.replay().clone().split(list(self.lengths)))


class _WatchedCall:
    """A form's blank call and its constants."""

    def __init__(self, run: Run, form: InputForm, device: torch.device):
        """Raises NotRecordableError, and what `run` raises."""
        self._run, self._modality = run, form.modality
        self._items = form.blank(device)
        inputs = [each for item in self._items for each in item.values()]
        self._constants = Constants(filter(_is_integer, inputs), device)
        self._lengths: list[int] = []
        rows = self._constants.watch(self._rows)
        if len(rows) > MAX_ROWS:
            raise NotRecordableError(f"it has more than {MAX_ROWS} rows")
        self._num_bytes = sum(each.nbytes for each in [*inputs, rows]) + self._constants.num_bytes
        if self._num_bytes > MAX_BYTES:
            raise NotRecordableError(f"its inputs, rows and constants take more than {MAX_BYTES >> 20} MiB")

    def recorded(self, capture: Capture) -> _Recorded:
        replay = capture(partial(self._constants.take_over, self._rows))
        return _Recorded(replay, _pixels(self._items), self._lengths, self._constants, self._num_bytes)

    def _rows(self) -> Tensor:
        rows = self._run(self._modality, self._items)
        self._lengths[:] = map(len, rows)
        return torch.cat(rows)


class RecordedCalls:
    """Encoder calls by `run`, replayed where they are recorded. Used on the engine's thread only."""

    def __init__(self, run: Run, device: torch.device, capture: Capture):
        """`run`: enqueues work on the current stream; the same kernels for the same form. `capture`: may run
        while other threads use the device."""
        self._run = run
        self._device = device
        self._capture = capture
        self._recorded: OrderedDict[InputForm, _Recorded] = OrderedDict()  # least recently used first
        # of forms that are not recorded, likewise
        self._num_calls: OrderedDict[InputForm, int] = OrderedDict()
        self._failed: set[InputForm] = set()  # once
        self._refused: set[InputForm] = set()
        self._waiting: dict[InputForm, None] = {}  # in order
        self._reasons: set[str] = set()  # that the log has named

    @torch.inference_mode()
    def encode(self, modality: Modality, items: Sequence[Item]) -> list[Tensor]:
        """`items`: on the device, in the dtypes that `run` takes. The rows of each item, equal to `run`'s."""
        form = InputForm.of(modality, items)
        if form is None:
            self._say(modality, f"it has more than {MAX_INTEGERS} integers")
            return self._run(modality, items)
        if form not in self._recorded:
            self._count(form)
        if (recorded := self._recorded.get(form)) is None:
            return self._run(modality, items)
        self._recorded.move_to_end(form)
        return recorded(items)

    def record_next(self) -> bool:
        """Records one form that waits for it; False: none does. Blocks, for about four calls of the form.
        Raises what torch raises if the device is lost."""
        if not self._waiting:
            return False
        self._record(next(iter(self._waiting)))
        return True

    def _count(self, form: InputForm) -> None:
        if form in self._refused:
            return
        num_calls = self._num_calls[form] = self._num_calls.pop(form, 0) + 1
        if len(self._num_calls) > MAX_KNOWN_FORMS:
            self._forget(next(iter(self._num_calls)))
        if num_calls > MAX_PLAIN_CALLS:
            self._record(form)
        elif num_calls > 1:
            self._waiting[form] = None

    @torch.inference_mode()
    def _record(self, form: InputForm) -> None:
        """The model's code may raise anything in an unusual run."""
        self._forget(form)
        try:
            call = _WatchedCall(self._run, form, self._device)
        except Exception as error:
            return self._refuse(form, f"{error}" if isinstance(error, NotRecordableError) else repr(error))
        try:
            self._recorded[form] = call.recorded(self._capture)
        except Exception as error:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # raises if the device itself is broken
            if form in self._failed:
                self._refuse(form, f"{error!r}, twice")
            else:
                logger.info(
                    "an encoder call of %s failed in its recording", form.modality.value, exc_info=error
                )
                _add(self._failed, form)
        self._evict()

    def _evict(self) -> None:
        while (
            len(self._recorded) > MAX_FORMS
            or sum(each.num_bytes for each in self._recorded.values()) > MAX_BYTES
        ):
            self._recorded.popitem(last=False)

    def _forget(self, form: InputForm) -> None:
        self._num_calls.pop(form, None)
        self._waiting.pop(form, None)

    def _refuse(self, form: InputForm, reason: str) -> None:
        _add(self._refused, form)
        self._say(form.modality, reason)

    def _say(self, modality: Modality, reason: str) -> None:
        if reason not in self._reasons:
            logger.info("an encoder call of %s is not recorded: %s", modality.value, reason)
            self._reasons.add(reason)


def _add(forms: set[InputForm], form: InputForm) -> None:
    if len(forms) >= MAX_KNOWN_FORMS:
        forms.clear()
    forms.add(form)


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()


def _pixels(items: Sequence[Item]) -> list[Tensor]:
    return [item[name] for item in items for name in item if not _is_integer(item[name])]
