"""How fast simulated workers are: curves of models on accelerators, derived from published figures.

Every figure names its source. *Sheet*: the vendor's data sheet. *Card*: the model's published configuration.
*Roofline*: work divided by a part of the peak. Which part is reached (`Reached`) was measured on an H100, and
is an assumption for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.types.curves import Curve, Link, ServiceCurves
from cluster.types.media import Modality

BLOCK_SIZE = 64  # tokens, of the workloads; large, for the simulator keeps one key a block


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Which parts of an accelerator's peaks the phases reach, and what a call lasts without any work."""

    prompts: float  # of the operations
    vision: float
    memory: float  # of the bandwidth, while answers are computed
    prompts_s: float
    answers_s: float
    encoder_s: float  # of a tower of 32 layers


# Prompts: between 0.4 and 0.6 of what engines commonly report. Vision: LMSYS's EPD post (2026-01-12): 4
# images of 1080p through the encoder of Qwen2.5-VL-72B take 492 ms on two H20 (148 TFLOP/s each). 42,300
# patches of 2 × 0.68 GFLOP in that time are 0.39 of the peak. A step's own time: of the order that graphs
# and an asynchronous scheduler leave; an encoder's without graphs.
ASSUMED = Reached(prompts=0.5, vision=0.39, memory=0.8, prompts_s=2e-3, answers_s=2e-3, encoder_s=3e-3)

# `bench/gpu/results-2026-11-27.jsonl`, commit 1ca1cc9f, the 7B shape in bfloat16: prompts of 512 and 2,048
# tokens took 12.0 and 42.7 ms; 1, 32 and 64 answers of 2,048 tokens 5.7, 8.1 and 9.8 ms. 16 images of 256
# patches took 14.3 ms in a tower of 12 layers, one 2.4, which is 0.16 of the peak.
ON_H100 = Reached(prompts=0.77, vision=0.16, memory=0.82, prompts_s=2e-3, answers_s=2e-4, encoder_s=4.4e-3)

# Decoding, resizing and patching on one CPU thread; assumed: about 10 ms for a 640 × 640 JPEG of 400 rows.
PREPARE = Curve(2e-3, 2e-5)
PREPARE_THREADS = 8

# Dynamo's simulator moves KV at 64 GB/s by default (mocker-architecture.md); the latency is assumed.
NETWORK = Link(2e-4, 64e9)
LOCAL = Link(0.0, 1e15)  # the same memory


@dataclass(frozen=True)
class Accelerator:
    """`num_devices` of one kind that serve one replica together. Each has an equal part of the weights, be it
    a part of every expert or whole experts."""

    name: str
    peak_flops: float
    bytes_per_s: float
    num_bytes: float
    num_devices: int = 1
    max_step_tokens: int = 8192  # of prefill
    reached: Reached = ASSUMED


# Sheet: H200 SXM, dense bfloat16 and HBM3e. The step: what vLLM takes for large GPUs by default.
H200 = Accelerator("h200", 989e12, 4.8e12, 141e9)
# Sheet: H100 SXM, dense bfloat16 and HBM3.
H100 = Accelerator("h100", 989e12, 3.35e12, 80e9, reached=ON_H100)
# Sheet: A100 SXM 80 GB. The step: vLLM's default for smaller GPUs.
A100 = Accelerator("a100", 312e12, 2.04e12, 80e9, max_step_tokens=2048)
# What dividing a model over devices costs is in none of these.
H100_PAIR = Accelerator("h100x2", 2 * 989e12, 2 * 3.35e12, 2 * 80e9, num_devices=2, reached=ON_H100)
H200_PAIR = Accelerator("h200x2", 2 * 989e12, 2 * 4.8e12, 2 * 141e9, num_devices=2)
H200_QUAD = Accelerator("h200x4", 4 * 989e12, 4 * 4.8e12, 4 * 141e9, num_devices=4)


@dataclass(frozen=True)
class Model:
    """Card figures; weights in bfloat16 but for `num_coded` of them. One vision row is four patches."""

    name: str
    num_parameters: float  # of the language half
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: int
    num_vision_parameters: float
    bytes_per_row: int  # of embeddings
    block_size: int = BLOCK_SIZE
    num_active_parameters: float = 0.0  # that a token computes with, of a model with experts; 0: all
    num_coded: float = 0.0  # of linears and experts, which stay codes where a checkpoint is quantised
    num_in_experts: float = 0.0  # of these
    code_bytes: float = 2.0  # of such a parameter and its part of a scale
    state_bytes: int = 0  # of what layers without KV keep of a sequence

    @property
    def state_blocks(self) -> int:
        """KV blocks for one state."""
        return -(-self.state_bytes // (self.kv_bytes_per_token * self.block_size))

    @property
    def weight_bytes(self) -> float:
        """The language half takes so many bytes of a GPU."""
        return 2 * (self.num_parameters - self.num_coded) + self.code_bytes * self.num_coded

    @property
    def flops_per_token(self) -> float:
        return 2 * (self.num_active_parameters or self.num_parameters)


# Card: 28 layers, 4 KV heads of 128, hidden size 3584 (56 KiB of KV a token, 7 KiB an embedding); encoder of
# 0.68 G parameters.
# Embeddings and head: 152,064 words each.
VL_7B = Model("vl-7b", 7.6e9, 28, 3584, 57_344, 0.68e9, 7168, num_coded=6.525e9)
# Card: 64 layers, 64 heads and 8 KV heads of 128, hidden size 5120, MLP of 25,600; 151,936 words.
VL_32B = Model("vl-32b", 32.8e9, 64, 5120, 262_144, 0.68e9, 10_240, num_coded=31.2e9)
# Card: 48 layers, 32 heads and 4 KV heads of 128, hidden size 2048; 128 experts of 768, of which a token
# chooses 8. Three layers add rows of their own, so an embedding is four rows. Encoder: 27 layers of
# 1152, 4304 between, 0.41 G parameters.
VL_30B_A3B = Model(
    "vl-30b-a3b", 30.5e9, 48, 2048, 98_304, 0.41e9, 16_384, num_active_parameters=3.3e9, num_coded=29.9e9,
    num_in_experts=28.99e9,
)  # fmt: skip
# Card: 94 layers, 4 KV heads of 128, hidden size 4096; experts and encoder as before.
VL_235B_A22B = Model(
    "vl-235b-a22b", 235e9, 94, 4096, 192_512, 0.41e9, 32_768, num_active_parameters=22e9, num_coded=233.8e9,
    num_in_experts=227.1e9,
)  # fmt: skip
# Card of Qwen3-Omni's thinker: the text model of VL_30B_A3B.
OMNI_30B = Model(
    "omni-30b-a3b", 30.5e9, 48, 2048, 98_304, 0.54e9, 16_384, num_active_parameters=3.3e9, num_coded=29.9e9,
    num_in_experts=28.99e9,
)  # fmt: skip
# transformers' default configuration of Qwen3.5: of 32 layers 8 have KV (4 heads of 256), the others a state
# of 32 × 128 × 128 float32 and 4 inputs of a convolution over 8,192 channels. Hidden size 4096.
VL_9B_HYBRID = Model(
    "vl-9b-hybrid", 8.95e9, 8, 4096, 32_768, 0.454e9, 8192, num_coded=6.92e9,
    state_bytes=24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2),
)  # fmt: skip
# transformers' default configuration of Qwen3.5's MoE: of 40 layers 10 have KV (2 heads of 256), the others a
# state as before. Hidden size 2048; 256 experts of 512, of which a token chooses 8.
VL_35B_A3B_HYBRID = Model(
    "vl-35b-a3b-hybrid", 34.66e9, 10, 2048, 20_480, 0.454e9, 4096, num_active_parameters=3.45e9,
    num_coded=33.62e9, num_in_experts=32.21e9, state_bytes=30 * (32 * 128 * 128 * 4 + 8192 * 4 * 2),
)  # fmt: skip

MODELS = {
    model.name: model
    for model in (
        VL_7B, VL_32B, VL_30B_A3B, VL_235B_A22B, OMNI_30B, VL_9B_HYBRID, VL_35B_A3B_HYBRID
    )
}  # fmt: skip
# Bytes of a coded parameter: E4M3 with a scale for 128 × 128; 4 bits with a scale of 32 bits for 16, or of 16
# bits for 128.
WEIGHT_FORMATS = {"bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "nvfp4": 0.5 + 4 / 16, "w4a16": 0.5 + 2 / 128}
ACCELERATORS = {each.name: each for each in (H200, H100, A100, H200_PAIR, H100_PAIR, H200_QUAD)}


def in_format(model: Model, name: str) -> Model:
    """The model from a checkpoint whose linears are quantised so."""
    return replace(model, code_bytes=WEIGHT_FORMATS[name])


def encode_curve(model: Model, accelerator: Accelerator) -> Curve:
    """Roofline: two operations for each parameter and patch. One device, whatever the replica has: LMSYS saw
    no gain from splitting a vision encoder (492, 466 and 524 ms on 2, 4 and 8 GPUs)."""
    reached = accelerator.reached
    flops = reached.vision * accelerator.peak_flops / accelerator.num_devices
    return Curve(reached.encoder_s, 4 * 2 * model.num_vision_parameters / flops)


def prefill_curve(model: Model, accelerator: Accelerator) -> Curve:
    """Roofline: two operations for each parameter and token; attention four for each layer, channel and
    earlier token. Codes of linears are read and plain weights written once a step
    (`cluster.model.cuda.coded_products`); experts are multiplied as they are."""
    reached = accelerator.reached
    flops = reached.prompts * accelerator.peak_flops
    per_pair_s = 4 * model.num_layers * model.hidden_size / flops
    num_unpacked = model.num_coded - model.num_in_experts if model.code_bytes < 2 else 0.0
    unpack_s = (model.code_bytes + 2) * num_unpacked / (reached.memory * accelerator.bytes_per_s)
    return Curve(reached.prompts_s + unpack_s, model.flops_per_token / flops, per_pair_s)


def decode_curve(model: Model, accelerator: Accelerator) -> Curve:
    """Roofline: weights are read once a step, KV once for each sequence and token, a state read and written
    for each sequence; a sequence computes what a prompt token does. All experts are read: 16 sequences that
    choose 8 of 128 miss a third of them, 64 a sixtieth."""
    reached = accelerator.reached
    bytes_per_s = reached.memory * accelerator.bytes_per_s
    per_sequence_s = model.flops_per_token / (reached.prompts * accelerator.peak_flops)
    per_sequence_s += 2 * model.state_bytes / bytes_per_s
    weights_s = model.weight_bytes / bytes_per_s
    return Curve(reached.answers_s + weights_s, per_sequence_s, model.kv_bytes_per_token / bytes_per_s)


Chunks = Sequence[tuple[int, int]]  # of each prompt in a step: (computed tokens, tokens to compute)


def mean_context(chunks: Chunks) -> float:
    """Earlier tokens that a token of these prompts sees."""
    return sum(computed * count for computed, count in chunks) / sum(count for _, count in chunks)


def step_s(curves: ServiceCurves, chunks: Chunks, num_answers: int, context_tokens: float) -> float:
    """The duration of one packed forward over parts of prompts and a token of each answer, which see
    `context_tokens` together. Roofline: the longer of what is computed for all tokens and what is read for
    the answers, for the weights are read once. Measured on a CPU, where the same cores do both, a step of 16
    answers and 16 to 128 tokens of a prompt took 0.82 to 1.05 of the two steps apart (0.5 B, bf16; AMD EPYC,
    AVX-512 BF16, 2 cores); with the curves below and 500 tokens with 32 answers it is 0.8, with fewer
    tokens less."""
    prompts_s = answers_s = 0.0
    if num_answers and curves.decode is not None:
        answers_s = curves.decode.seconds(num_answers, context_tokens / num_answers)
        prompts_s = num_answers * curves.decode.per_unit_s if chunks else 0.0
    if chunks and curves.prefill is not None:
        num_tokens = sum(count for _, count in chunks)
        prompts_s += curves.prefill.seconds(num_tokens, mean_context(chunks))
    return max(prompts_s, answers_s)


def num_kv_blocks(model: Model, accelerator: Accelerator) -> int:
    """What 0.9 of the memory leaves after the weights and 5 GB of activations."""
    left = 0.9 * accelerator.num_bytes - model.weight_bytes - 5e9
    return int(left / (model.kv_bytes_per_token * model.block_size))


def curves(model: Model, accelerator: Accelerator, phases: str, step_tokens: int = 0) -> ServiceCurves:
    """The curves of a worker with the phases "e", "p", "d" or "pd" ("dp": decode, and plain prompts)."""
    if phases == "e":
        return encoder_curves(model, accelerator)
    return ServiceCurves(
        prefill=prefill_curve(model, accelerator) if "p" in phases else None,
        decode=decode_curve(model, accelerator) if "d" in phases else None,
        max_step_units=step_tokens or accelerator.max_step_tokens,
        links={"": NETWORK},
    )


def encoder_curves(model: Model, accelerator: Accelerator, beside: str = "") -> ServiceCurves:
    """The curves of an encoder. `beside`: of which worker, if it does other phases, too."""
    modalities = (Modality.IMAGE, Modality.VIDEO)
    return ServiceCurves(
        encode=dict.fromkeys(modalities, encode_curve(model, accelerator)),
        prepare=dict.fromkeys(modalities, PREPARE),
        max_step_units=4096,
        links={"": NETWORK, **({beside: LOCAL} if beside else {})},
    )
