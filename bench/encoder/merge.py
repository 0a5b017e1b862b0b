"""Putting 5,000 embedding rows into a prompt's input embeddings: how prefill does it, beside other ways.

    prefill    `FeatureStore.rows` gathers the rows out of their blocks, `LanguageModel` copies them into the embeddings
    gather     the first half of it
    place      the second half
    one pass   the rows go from their blocks into the embeddings, without a copy in between
    loop       one row after the other, in Python
    copy       a plain copy of as many bytes that lie side by side: no way can be faster

The blocks are scattered: all of the pool's, in random order. The ways take turns within a repetition. No weights: both classes
run as they are on a memory and a hidden size of our choice. Page faults are counted: a copy into fresh memory pays for every page.
"""

from __future__ import annotations

import itertools
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from bench.encoder.records import Record
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from prefill_service.features import FeatureStore

BLOCK_SIZE = 16
OFFSET = 100  # text tokens before the media
KEY = ("request", 0)


class Merge:
    """One item of `num_rows` random rows in a feature store, and embeddings of a prompt that shows it behind OFFSET tokens."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype):
        num_blocks = -(-num_rows // BLOCK_SIZE)
        self._num_rows = num_rows
        self._memory = BlockMemory(feature_layout(hidden_size, BLOCK_SIZE, dtype), num_blocks)
        self._blocks = self._memory.segments[0].normal_()
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._block_ids = pool.allocate(num_blocks)
        random.Random(0).shuffle(self._block_ids)
        for block_id in self._block_ids:  # given again in the order in which they come back
            pool.free([block_id])
        mover = cast(Any, SimpleNamespace(grant=lambda *_: None))
        self._store = FeatureStore(self._memory, pool, mover)
        self._store.reserve(KEY, "media", num_rows, 1.0, lambda _: None)
        self._model = cast(
            LanguageModel,
            SimpleNamespace(device=torch.device("cpu"), dtype=dtype, hidden_size=hidden_size, feature_width=hidden_size),
        )  # fmt: skip
        self.embeds = torch.zeros(OFFSET + num_rows, hidden_size, dtype=dtype)
        self._token_ids = [0] * len(self.embeds)
        self._rows = self.gather()
        self.ways: Mapping[str, Callable[[], object]] = {
            "prefill": self.prefill,
            "gather": self.gather,
            "place": lambda: self.place(self._rows),
            "one pass": self.one_pass,
            "loop": self.loop,
            "copy": lambda: self.embeds[OFFSET:].copy_(self._rows),
        }

    @property
    def expected(self) -> Tensor:
        """The embeddings, merged."""
        text = torch.zeros(OFFSET, self.embeds.shape[1], dtype=self.embeds.dtype)
        return torch.cat([text, self._blocks[self._block_ids].flatten(0, 1)[: self._num_rows]])

    def gather(self) -> Tensor:
        return self._store.rows(KEY, 0, self._num_rows)

    def place(self, rows: Tensor) -> None:
        pieces = (FeatureSlice(OFFSET, rows),)
        chunk = SequenceChunk(self._token_ids, torch.empty(0), 0, (), pieces)
        LanguageModel._place_features(self._model, self.embeds, [chunk])

    def prefill(self) -> None:
        self.place(self.gather())

    def one_pass(self) -> None:
        """Whole blocks at once, then what is left of the last."""
        num_whole = self._num_rows // BLOCK_SIZE
        end = OFFSET + num_whole * BLOCK_SIZE
        whole = self.embeds[OFFSET:end].view(num_whole, BLOCK_SIZE, -1)
        torch.index_select(self._blocks, 0, torch.tensor(self._block_ids[:num_whole]), out=whole)
        if end < len(self.embeds):
            self.embeds[end:] = self._blocks[self._block_ids[num_whole], : len(self.embeds) - end]

    def loop(self) -> None:
        for idx, row in enumerate(self._rows):
            self.embeds[OFFSET + idx] = row


def measure(
    num_rows: int, hidden_sizes: Sequence[int], dtype: torch.dtype, repeats: int, num_threads: int
) -> Iterator[Record]:
    """Changes torch's number of threads."""
    torch.set_num_threads(num_threads)
    for hidden_size in hidden_sizes:
        merge = Merge(num_rows, hidden_size, dtype)
        for run in merge.ways.values():
            run()
        for repetition, (way, run) in itertools.product(range(repeats), merge.ways.items()):
            yield {
                "type": "merge",
                "way": way,
                "rows": num_rows,
                "hidden_size": hidden_size,
                "dtype": str(dtype).removeprefix("torch."),
                "threads": num_threads,
                "repetition": repetition,
                "bytes": merge.embeds[OFFSET:].nbytes,
                **timed(run),
            }


def timed(run: Callable[[], object]) -> Record:
    faults_before, started_at = num_page_faults(), time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - started_at, "page_faults": num_page_faults() - faults_before}


def num_page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
