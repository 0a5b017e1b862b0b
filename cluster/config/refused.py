"""Multimodal model types of transformers that are known and not served, with the cause that a refusal names.
Static, as `families` is. docs/media.md shows the same table.
"""

from __future__ import annotations

from collections.abc import Mapping

_CAUSES: Mapping[str, tuple[str, ...]] = {
    "the processor numbers the images of a prompt, so the text of one depends on the others": (
        "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    ),
    "no record says how the encoder beside this hybrid text model is called": (
        "nemo_speechlm",
    ),
    "the folder is for NVIDIA's own code: what transformers' class NemotronH_Omni_Reasoning_V3 loads of it "
    "and saves is served": (
        "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3",
    ),
    "attention chooses tokens by an index, or is sparse": (
        "dots3_note", "mistral_large4", "minimax_m3_vl", "unlimited_ocr", "hy_v4_vl", "qwen4_exp",
        "glm5_next",
    ),
    "attention adds biases by distance, and short convolutions around it keep states": (
        "inkling2", "inkling2_loop", "inkling_mm_model",
    ),
    "encoder and decoder, or language layers look at media by cross-attention": (
        "florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder", "mllama",
        "idefics", "evolla", "blip",
    ),
    "each layer takes inputs of its own beside embedding rows": (
        "granite4_vision",
    ),
    "weights are chosen by what stands in the prompt (adapters, experts for media)": (
        "granite_speech", "granite_speech_plus", "phi4_multimodal", "ernie4_5_vl_moe",
    ),
    "an image becomes token ids, not rows": ("chameleon", "emu3", "apertus1p5"),
    "the number of rows depends on the pixels, so a header does not say it": ("video_llama_3",),
    "the whole prompt, or all its images together, are seen in both directions, or text is not generated "
    "token by token": ("paligemma", "git", "diffusion_gemma", "pi0", "shieldgemma2", "molmo2"),
    "sound is a stream beside the text": ("voxtral_realtime", "kyutai_speech_to_text"),
    "the feature extractor needs torchaudio, which is not among the requirements": ("fun_asr_nano",),
    "the class has no backbone `model`, by which halves are loaded": (
        "blip-2", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5",
    ),
    "the processor rewrites the text around an image": ("idefics2", "fuyu"),
    "the processor leaves it to the template how many rows an image has": ("pp_chart2table",),
    "the processor takes no tensors without content": ("video_llava",),
    "markers around an image take their embeddings from the encoder": ("ovis2", "gemma3n"),
    "transformers masks its images in one way for one kind of cache and in another for the others": (
        "gemma4_unified",
    ),
    "the encoder adds random numbers": ("vibevoice_asr",),
}  # fmt: skip
REFUSED: Mapping[str, str] = {name: cause for cause, names in _CAUSES.items() for name in names}
