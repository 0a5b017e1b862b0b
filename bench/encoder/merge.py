"""Putting 5,000 embedding rows into a prompt's input embeddings: how prefill does it, next to other ways.

    prefill    `FeatureStore.rows` gives the rows' places, `LanguageModel` copies them into the embeddings;
               blocks in succession
    scattered  the same; the blocks are all of the pool's, in random order
    loop       one row after the other, in Python
    copy       a plain copy of as many contiguous bytes: the lower bound

The ways alternate within a repetition. No weights: both classes run as they are on a memory and a hidden size
of our choice. Page faults are counted: a copy into fresh memory would pay for every page.
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

from bench.records import Record
from cluster.engine.features import FeatureStore
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk

BLOCK_SIZE = 16
OFFSET = 100  # text tokens before the media
KEY = ("request", 0)


class Merge:
    """One item of `num_rows` random rows in two feature stores, and the embeddings of a prompt that has the
    item after OFFSET text tokens.
    """

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype):
        self._num_rows = num_rows
        self.rows = torch.randn(num_rows, hidden_size).to(dtype)
        self._model = cast(
            LanguageModel,
            SimpleNamespace(device=torch.device("cpu"), dtype=dtype, hidden_size=hidden_size, feature_width=hidden_size),
        )  # fmt: skip
        self.embeds = torch.zeros(OFFSET + num_rows, hidden_size, dtype=dtype)
        self._token_ids = [0] * len(self.embeds)
        successive, scattered = self._store(is_scattered=False), self._store(is_scattered=True)
        self.ways: Mapping[str, Callable[[], object]] = {
            "prefill": lambda: self._merge(successive),
            "scattered": lambda: self._merge(scattered),
            "loop": self._loop,
            "copy": lambda: self.embeds[OFFSET:].copy_(self.rows),
        }

    def _store(self, *, is_scattered: bool) -> FeatureStore:
        """The rows in blocks; the last block is not full."""
        num_blocks = -(-self._num_rows // BLOCK_SIZE)
        memory = BlockMemory(feature_layout(self.rows.shape[1], BLOCK_SIZE, self.rows.dtype), num_blocks)
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        block_ids = pool.allocate(num_blocks)
        if is_scattered:
            random.Random(0).shuffle(block_ids)
        for block_id in block_ids:  # the pool allocates in the order of being freed
            pool.free([block_id])
        padded = torch.zeros(num_blocks * BLOCK_SIZE, self.rows.shape[1], dtype=self.rows.dtype)
        padded[: self._num_rows] = self.rows
        memory.segments[0][block_ids] = padded.view(num_blocks, BLOCK_SIZE, -1)
        store = FeatureStore(memory, pool, cast(Any, SimpleNamespace(grant=lambda *_: None)))
        store.reserve(KEY, "media", self._num_rows, 1.0, lambda _: None)
        return store

    def _merge(self, store: FeatureStore) -> None:
        pieces, start = [], OFFSET
        for rows in store.rows(KEY, 0, self._num_rows):
            pieces.append(FeatureSlice(start, rows))
            start += len(rows)
        chunk = SequenceChunk(self._token_ids, torch.empty(0), 0, (), tuple(pieces))
        LanguageModel._place_features(self._model, self.embeds, [chunk])

    def _loop(self) -> None:
        for idx, row in enumerate(self.rows):
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
