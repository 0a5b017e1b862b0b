"""Every place of the product whose behaviour depends on a GPU is named here, with the test that runs it on a
simulated one, or the reason why none does. How Triton's kernels are launched: test_launches.py.

A place is a function that compares a device with "cuda" or "cpu", takes something from `torch.cuda`, asks for
NCCL, Triton or torch's version of CUDA, knows CUDA's errors, pins memory, or copies without waiting.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.config.settings import REPOSITORY

SERVICES = ("encoder_service", "prefill_service", "decode_service")
PACKAGES = ("cluster", "router", *SERVICES, "kv_transfer", "deploy")
HERE = Path(__file__).parent

REHEARSED = {  # test file: places
    "test_model.py": """
        cluster/model/cuda/capture.py:capture_cuda
        cluster/model/cuda/capture.py:capture_cuda.capture
        cluster/model/cuda/capture.py:refusing_reads
        cluster/model/language_parts.py:make_backend cluster/model/encoder.py:EncoderModel.__init__
        cluster/model/encoder.py:EncoderModel._on_device
        cluster/model/attention_torch.py:_is_on_gpu encoder_service/runner.py:EncoderRunner.encode
    """,
    "test_layer_launches.py": """ cluster/model/cuda/early.py:early
        cluster/model/batches.py:_packed_step cluster/model/cuda/uploads.py:upload_as_they_are """,
    "test_recorded_adapters.py": """
        cluster/model/adapter_staging.py:AdapterStaging.__init__
        cluster/model/adapter_staging.py:AdapterStaging.write
        cluster/model/adapter_staging.py:AdapterStaging._send
        cluster/model/adapters.py:AdapterSlots.stage_writes
    """,
    "test_layer_marks.py": """
        cluster/model/cuda/layer_marks.py:LayerMarks.__init__
        cluster/model/cuda/layer_marks.py:LayerMarks.record
    """,
    "test_recorded_steps.py": """
        cluster/model/cuda/graphs.py:recording_of cluster/model/cuda/graphs.py:_recorded
    """,
    "test_ahead.py": """
        cluster/model/cuda/draw.py:to_device cluster/model/cuda/draw.py:reading
        cluster/model/cuda/draw.py:_sent
        cluster/engine/ahead.py:may_run_ahead """,
    "test_packed_attention.py": "cluster/model/cuda/packed_towers.py:_replace",
    "test_recorded_calls.py": """
        cluster/model/cuda/recorded_calls.py:RecordedCalls._record
        cluster/model/cuda/capture.py:_recording """,
    "test_experts.py": "cluster/model/cuda/experts.py:_replace",
    "test_ranks.py": "cluster/model/cuda/merging.py:merge_shares",
    "test_codes.py": "cluster/model/cuda/coded_choice.py:keep_right_codes",
    "test_layers.py": "cluster/model/layers/trial.py:median_s",
    "test_draws.py": """
        cluster/model/changes.py:Changes.apply
        cluster/model/logprobs.py:RawLogprobs.__init__ cluster/model/sampling.py:_ascending
        cluster/model/sampling.py:_greedy_tokens cluster/model/sampling.py:_likely
        cluster/model/sampling.py:_sample_by_torch
        cluster/model/sampling.py:sample
    """,
    "test_memory.py": """
        cluster/kvcache/memory.py:BlockMemory.__init__ cluster/kvcache/memory.py:BlockMemory.mark
        cluster/kvcache/memory.py:BlockMemory.enqueues
        cluster/kvcache/memory.py:BlockMemory.synchronize
        cluster/kvcache/memory.py:BlockMemory.use_own_stream
        cluster/model/cuda/step_inputs.py:StepBuffers.__init__
        cluster/model/cuda/step_inputs.py:StepBuffers._send
        cluster/model/cuda/moving.py:Staging.__init__ cluster/model/cuda/moving.py:Staging.copy
        cluster/model/cuda/moving.py:move_weights
        cluster/model/cuda/uploads.py:Uploads.__init__ cluster/model/cuda/uploads.py:Uploads.copy
        cluster/model/cuda/uploads.py:Uploads._sent
        kv_transfer/codecs/checksum.py:BlockSums.__init__ kv_transfer/codecs/codec.py:Codec.code
        kv_transfer/codecs/pending.py:upload kv_transfer/codecs/pending.py:download
    """,
    "test_libraries.py": """
        cluster/model/cuda/choice.py:choose cluster/model/cuda/choice.py:_chosen
        cluster/model/cuda/choice.py:_seconds
    """,
    "test_product_choice.py": """
        cluster/model/cuda/product_choice.py:replayed_s cluster/model/cuda/product_choice.py:measure
        cluster/model/cuda/product_choice.py:_measure """,
    "test_transfer.py": """
        kv_transfer/agents/collective_agent.py:CollectiveAgent.connect
        kv_transfer/agents/collective_agent.py:_identity
        kv_transfer/agents/collective_group.py:Channel.__init__
        kv_transfer/agents/collective_group.py:Channel.sever
        kv_transfer/agents/collective_group.py:Channel._synchronize
        kv_transfer/agents/collective_group.py:_make_group
        kv_transfer/agents/in_process.py:InProcessAgent.register
        kv_transfer/agents/nixl_agent.py:NixlAgent.register
        kv_transfer/agents/transport_probe.py:measure """,
    "test_start.py": """
        cluster/config/machine.py:can_run_triton cluster/model/encoder.py:EncoderModel.load
        cluster/model/encoder.py:EncoderModel.load.make
        cluster/model/language_parts.py:_layer_kernels cluster/model/language_parts.py:load_parts
        cluster/model/language_parts.py:load_parts.make
        cluster/model/parallel.py:join_group
        cluster/worker/language.py:load_language
        cluster/worker/language.py:_check_largest_step cluster/worker/language.py:_step_bytes
        cluster/worker/memory_plan.py:available_bytes cluster/worker/memory_plan.py:gpu_bytes
        cluster/worker/memory_plan.py:library_bytes cluster/worker/process.py:hardware_of
        cluster/worker/step_profile.py:measured_step_bytes cluster/worker/step_profile.py:run_largest_step
        encoder_service/service.py:Encoder.__init__ encoder_service/service.py:_step_bytes
        cluster/worker/setup.py:set_up """,
    "../engine/test_mixed_roles.py": "cluster/engine/limits.py:_num_kv_blocks",
    "../serving/test_composition.py": "deploy/app.py:actor_options_of",
    "../serving/test_preflight.py": """
        cluster/config/combinations.py:_check_weights deploy/serving/preflight.py:_check_machine
        deploy/serving/preflight.py:_is_on_gpu
    """,
    "../serving/test_fork_server.py": "deploy/serving/fork_server.py:check_forkable",
    "../kv_transfer/test_nixl_import.py": "kv_transfer/agents/nixl_agent.py:load_nixl",
    "../../faults/test_ended_engines.py": "cluster/lost_device.py:is_device_lost",
    "../../contract/test_transport_probe.py": "cluster/worker/setup.py:check_device_transport",
}
NOT_REHEARSED = {
    "cluster/model/cuda/early_kernels.py:module": "Triton: test_cuda_layer_compile.py",
    "cluster/model/cuda/layer_kernels.py:module": "Triton: test_cuda_layer_kernels.py, test_cuda_layer_compile.py",
    "cluster/model/cuda/product_kernels.py:module": "Triton: test_cuda_layer_kernels.py, likewise",
    "cluster/model/cuda/coded_kernels.py:module": "Triton: test_cuda_coded_products.py, likewise",
    "cluster/model/cuda/attention_kernels.py:module": "Triton: test_cuda_paged_attention.py, likewise",
    "cluster/model/cuda/attention_runs.py:module": "Triton: test_cuda_paged_attention.py, likewise",
    "cluster/model/cuda/paged_attention.py:attend": "Triton: test_cuda_layer_compile.py compiles it for GPUs",
    "cluster/model/cuda/packed_kernels.py:module": "Triton: test_cuda_packed_attention.py, likewise",
    "cluster/model/cuda/tower_kernels.py:module": "Triton: test_cuda_tower_blocks.py, likewise",
    "cluster/model/cuda/draw_kernels.py:module": "Triton: test_cuda_draw.py, likewise",
    "cluster/model/cuda/filter_kernels.py:module": "Triton: test_cuda_draw.py, likewise",
    "cluster/model/cuda/expert_kernels.py:module": "Triton: test_cuda_experts.py, likewise",
    "cluster/model/cuda/adapter_kernels.py:module": "Triton: test_cuda_adapters.py, likewise",
    "cluster/model/cuda/delta_kernels.py:module": "Triton: test_cuda_mixers.py, likewise",
    "cluster/model/cuda/channel_kernels.py:module": "Triton: test_cuda_mixers.py, likewise",
    "cluster/model/cuda/mamba_kernels.py:module": "Triton: test_cuda_mixers.py, likewise",
    "cluster/model/cuda/mixer_kernels.py:module": "Triton: test_cuda_mixers.py, likewise",
    "kv_transfer/codecs/triton_codec.py:module": "Triton: test_triton_codec.py, interpreted and compiled",
    "kv_transfer/codecs/triton_checksum.py:module": "Triton: test_triton_checksum.py, likewise",
    "kv_transfer/agents/collective_agent.py:built_backends": "asks this build of torch",
}


def _is_place(node: ast.AST) -> bool:
    match node:
        case ast.Compare(comparators=[ast.Constant(value="cuda" | "cpu" | "nccl")]):
            return True
        case ast.Compare(left=ast.Constant(value="nccl" | "cpu" | "cuda")):
            return True
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="cuda")):
            return True
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="version"), attr="cuda"):
            return True
        case ast.Attribute(attr="ProcessGroupNCCL" | "is_nccl_available" | "pin_memory" | "AcceleratorError"):
            return True
        case ast.keyword(arg="pin_memory" | "non_blocking"):
            return True
        case ast.Constant(value="triton"):
            return True
        case ast.Import(names=[ast.alias(name=name)]):
            return name.partition(".")[0] == "triton"
    return False


def _places(tree: ast.AST, name: str = "") -> Iterator[str]:
    """Qualified names of the functions and classes that hold a place, innermost."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _places(child, f"{name}.{child.name}".lstrip("."))
            continue
        if _is_place(child):
            yield name or "module"
        yield from _places(child, name)


def found() -> set[str]:
    files = (file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py"))
    return {
        f"{file.relative_to(REPOSITORY)}:{place}"
        for file in files
        if "training" not in file.parts
        for place in _places(ast.parse(file.read_text()))
    }


def named() -> list[str]:
    return [place for places in REHEARSED.values() for place in places.split()]


def test_every_place_for_gpus_is_rehearsed_or_says_why_not() -> None:
    places = [*named(), *NOT_REHEARSED]
    assert found() - set(places) == set(), "rehearse these, and name them here"
    assert set(places) - found() == set(), "these are gone"
    assert len(places) == len(set(places))


def test_the_files_that_are_named_know_the_functions_that_they_run() -> None:
    """By a name of the place, or of what holds it."""
    for file, places in REHEARSED.items():
        text = (HERE / file).read_text()
        assert re.search(r"^def test_", text, re.MULTILINE), file
        for place in places.split():
            module = place.split(":")[0].removesuffix(".py").replace("/", ".")
            package = module.rpartition(".")[0]
            assert module in text or package in text, f"{file} does not import {module}"
