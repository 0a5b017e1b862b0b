"""The law of the house for quantised checkpoints, over HTTP: the demo model in each format, as E/P/D, answers
text and media as `generate` of the whole model with the plain weights that the format stands for. And what a
weight takes in each format, as the document has it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from bench import DEMO_MODEL
from bench.client import open_session
from bench.equality import check
from bench.in_process import api
from bench.workload import Reference, make_cases
from cluster.config.settings import ClusterArgs
from cluster.config.weight_formats import Header, read_entry
from cluster.model.dequantising import DequantisedSlice
from tests.fakes.slow_params import often
from tests.flow.local_cluster import PATIENT_DOOR, local_cluster
from tests.flow.quantised_folders import Checkpoint, is_linear
from tests.flow.quantised_formats import FORMS, awq, compressed_integers, fp8, gptq, in_form

ROOT = Path(__file__).parents[2]
NUM_REQUESTS = 7  # of every kind
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PUBLISHED = {  # as checkpoints have them
    "fp8 in blocks of 128 × 128": fp8(BLOCKS, ".weight_scale_inv", (128, 128), (0, 0)),
    "compressed-tensors FP8, a scale for a row": FORMS["compressed fp8 by rows"],
    "compressed-tensors, 4 bits in groups of 128": compressed_integers(4, 128),
    "compressed-tensors, 4 bits in groups of 32": compressed_integers(4, 32),
    "AWQ in groups of 128": awq(128),
    "GPTQ, 4 bits in groups of 128": gptq(4, 128, is_symmetric=True),
    "GPTQ, 8 bits in groups of 128": gptq(8, 128, is_symmetric=True),
    "NVFP4": FORMS["NVFP4"],
    "compressed-tensors MXFP4": FORMS["compressed MXFP4"],
}
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8",
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
}  # fmt: skip


def demo_model() -> Checkpoint:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    return Checkpoint(config, tensors, hf.Qwen2_5OmniThinkerForConditionalGeneration)


def is_of_text(name: str) -> bool:
    return is_linear(name) and "visual" not in name and "audio_tower" not in name


def saved(checkpoint: Checkpoint, folder: Path) -> Path:
    """With the demo model's tokenizer, processor and template beside it."""
    shutil.copytree(
        DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "training", "examples")
    )
    return checkpoint.save(folder)


@pytest.mark.parametrize("form", often(FORMS, ["fp8 in blocks that are not filled", "NVFP4"]))
async def test_answers_over_http_equal_generate(form: str, tmp_path: Path) -> None:
    stored, expected = in_form(demo_model(), FORMS[form], is_of_text)
    reference = Reference(saved(expected, tmp_path / "plain"))
    requests = [(case, reference.answer(case, 32)) for case in make_cases(2026, NUM_REQUESTS)]
    args = ClusterArgs.model_validate(
        {
            "model": str(saved(stored, tmp_path / "stored")),
            "model_id": "demo",
            "dtype": "float32",
            "door": PATIENT_DOOR,
        }
    )
    async with local_cluster(args) as cluster, api(cluster.door) as url, open_session(120) as session:
        faults = await asyncio.gather(*(check(session, url, "demo", *request) for request in requests))
    assert faults == [None] * NUM_REQUESTS


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_document_has_the_bytes_of_a_weight(name: str) -> None:
    """In the file, and as codes on a GPU."""
    form, weight = PUBLISHED[name], torch.randn(512, 3584) / 50
    tensors: dict[str, Any] = {f"a{ending}": part for ending, part in form.matrix(weight)[0].items()}
    headers = {key: Header(DTYPES[part.dtype], tuple(part.shape)) for key, part in tensors.items()}
    quantisation = read_entry(form.entry["quant_method"], form.entry, "llama")
    read = DequantisedSlice(quantisation.stored("a", headers)[1], quantisation, tensors, torch.bfloat16)
    in_file = sum(part.nbytes for part in tensors.values()) / weight.numel()
    row = f"| {name} | {in_file:.2f} | {read.codes('a').nbytes / weight.numel():.2f} |"
    assert row in (ROOT / "docs/workers.md").read_text(), row
