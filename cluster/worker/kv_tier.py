"""Opens the second tier of a worker's KV cache, as `kv_cache` in the settings says.

KV on disk lives longer than the worker. It may be used again by workers that would compute the same bytes, so
the folder's name is a hash over all that decides them: model, layout, libraries, and which files the
checkpoint has, with their sizes and times.
"""

from __future__ import annotations

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from cluster.clock import Clock
from cluster.config.settings import ClusterArgs
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.tier import KvTier
from cluster.kvcache.tier_slots import FileSlots, HostSlots, Slots
from cluster.worker.language import Language

logger = logging.getLogger(__name__)

_CHECKPOINT = ("*.safetensors", "*.bin", "*.json")
_VERSION = 2  # of records and block hashes


def open_tier(args: ClusterArgs, language: Language, blocks: BlockPool, clock: Clock) -> KvTier | None:
    """None: the settings want none, or there is no room for a block. If the disk cannot be used, the log says
    why, and there is no such level."""
    block_bytes, given = language.kv.layout.block_bytes, args.kv_cache
    levels: list[Slots] = []
    if given.host_bytes:
        levels.append(HostSlots(given.host_bytes, block_bytes))
    if given.disk_bytes:
        folder = Path(given.disk_folder).expanduser() / _fingerprint(args, language)
        try:
            levels.append(FileSlots(folder, given.disk_bytes, block_bytes))
        except OSError as error:
            logger.warning("no KV is kept on disk: %s", error)
    levels = [level for level in levels if level.num_slots > 0]
    if not levels:
        return None
    executor = ThreadPoolExecutor(1, "kv-tier", initializer=language.kv.use_own_stream)
    return KvTier(language.kv, lambda block_id: blocks.generations([block_id])[0], levels, executor, clock)


def _fingerprint(args: ClusterArgs, language: Language) -> str:
    files = sorted(file for pattern in _CHECKPOINT for file in Path(args.model).glob(pattern))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = (
        _VERSION, language.model.fingerprint, language.kv.layout.fingerprint, args.block_size,
        args.weight_dtype, args.cpu_kernels, args.gpu_kernels, torch.__version__, transformers.__version__,
        states,
    )  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
