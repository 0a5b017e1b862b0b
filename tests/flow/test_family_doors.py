"""The law of the house for every multimodal family, over HTTP: files go in as data URIs, and the tokens are
those of transformers' own processor and `generate` of the undivided model in fp32. What needs no HTTP (heard
clips) enters at the door's prompt builder."""

from __future__ import annotations

import asyncio
import io
import itertools
from dataclasses import dataclass
from typing import Any

import av
import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from bench.trusted_media import decode, probe
from bench.workload import data_uri, png_bytes, wav_bytes
from cluster.config.settings import ClusterArgs
from cluster.ids import new_request_id
from cluster.media.processor import MediaProcessor
from cluster.types.media import MediaProbe, Modality
from cluster.types.request import GenerateRequest, StopParams
from router.api.app import build_api
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ServedModels
from router.door import Door
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.fakes.slow_params import often
from tests.flow.family_folders import FAMILIES, FamilyFolder, save_family
from tests.flow.local_cluster import PATIENT_DOOR, local_cluster
from tests.flow.losses import Loss, StandIns

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
MAX_TOKENS = 6
WHAT = "what is it, and what more can be told of it?"  # so long that the item ends within a full block
FIELDS = {IMAGE: "image_url", VIDEO: "video_url", AUDIO: "audio_url"}
TYPES = {IMAGE: "image/png", VIDEO: "video/mp4", AUDIO: "audio/wav"}
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
# their processors take one sound for a prompt
ONE_SOUND = ("qwen3_asr", "audioflamingo3", "musicflamingo", "glmasr", "omniasr")

# Perception LM's processor stacks the images of a prompt, Aria's counts the crops of the largest for each
EQUAL_TILES = ("perception_lm", "aria")
# transformers pads the sounds of a call to the longest one, and that changes the last rows of shorter ones
EQUAL_SOUNDS = ("qwen3_omni", "qwen3_asr")
# One for each mechanism: positions in several dimensions, deep stacks and sound; frames with their times;
# other dimensions; ids that are read as token 0; marked rows; tiles of images and frames; spans in both
# directions; sound of a fixed length; another tokenizer; states beside KV. The demo model, which `test_law`
# asks, has windows of the encoder; the arithmetic of the others is compared in `test_families`.
OFTEN = (
    "qwen3_omni", "glm4v", "hunyuan_vl", "kimi_k25", "muse_glimmer", "llava_onevision", "gemma4", "qwen2_audio",
    "voxtral", "nemotron_h_omni",
)  # fmt: skip
NEVER_BOTH = ("smolvlm", "glm", "nemotron")  # transformers takes images or clips in a prompt of theirs


def picture(seed: int, width: int, height: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return png_bytes(pixels)


def sound(seed: int, num_samples: int) -> bytes:
    samples = np.random.default_rng(seed).standard_normal(num_samples) * 0.2
    return wav_bytes(np.clip(samples, -1, 1).astype(np.float32))


def clip(seed: int, num_frames: int, width: int, height: int, fps: int = 5, num_samples: int = 0) -> bytes:
    """Noise, with a sound track where it has samples."""
    rng, file = np.random.default_rng(seed), io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        track = container.add_stream("aac", rate=16_000, layout="mono") if num_samples else None
        for _ in range(num_frames):
            pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None:
            samples = (0.2 * rng.standard_normal((1, num_samples))).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16_000, 0
            container.mux(track.encode(frame))
            container.mux(track.encode(None))
    return file.getvalue()


Part = str | tuple[Modality, bytes]


def cases(name: str, modalities: tuple[Modality, ...]) -> list[list[Part]]:
    """Contents of one user message each."""
    found: list[list[Part]] = [["only words"]]
    wide, tall, small = picture(1, 101, 67), picture(2, 30, 75), picture(3, 17, 33)
    if name in EQUAL_TILES:
        tall = picture(2, 17, 33)
    if IMAGE in modalities:
        found += [[(IMAGE, wide), WHAT], ["see", (IMAGE, tall), "and", (IMAGE, small), "same?"]]
    if VIDEO in modalities:
        found += [[(VIDEO, clip(4, 11, 66, 44)), WHAT]]
    if AUDIO in modalities:
        found += [[(AUDIO, sound(5, 23_456)), WHAT]]
        if name in (*ONE_SOUND, "moss_transcribe_diarize"):
            found += [["hear", (AUDIO, sound(6, 70_001)), "this?"]]  # several windows
        if name not in ONE_SOUND:
            length = 9_600 if name in EQUAL_SOUNDS else 31_040
            found += [[(AUDIO, sound(6, 9_600)), "a", (AUDIO, sound(7, length)), "same?"]]
    if len(modalities) > 1 and not name.startswith(NEVER_BOTH):
        files = {IMAGE: small, VIDEO: clip(8, 7, 44, 66), AUDIO: sound(9, 12_345)}
        found += [["all", *((kind, files[kind]) for kind in reversed(modalities)), "say"]]
    return found


@dataclass
class Expected:
    text: str
    num_prompt_tokens: int


class Reference:
    """transformers alone: processor and `generate`."""

    def __init__(self, folder: FamilyFolder, media: MediaProcessor):
        self.folder = folder
        self.settings = media.settings
        self._hears = AUDIO in media.modalities

    def answer(self, content: list[Part]) -> Expected:
        prompt_ids, token_ids = self.tokens(content)
        text = self.folder.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Expected(text, len(prompt_ids))

    def tokens(self, content: list[Part], *, is_heard: bool = False) -> tuple[list[int], list[int]]:
        """Prompt and answer. is_heard: all clips are heard with their sound."""
        inputs = self.inputs(content, is_heard)
        if is_heard:
            inputs["use_audio_in_video"] = True
        model: Any = self.folder.model
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
        num_prompt_tokens = inputs["input_ids"].shape[1]
        return output[:num_prompt_tokens], output[num_prompt_tokens:]

    def inputs(self, content: list[Part], is_heard: bool = False) -> dict[str, Any]:
        processor = self.folder.processor
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0].value}
            for part in content
        ]
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        given: dict[str, Any] = {"images": [], "videos": [], "audio": [], "video_metadata": []}
        slots: list[int | None] = []  # of each sound: the clip it belongs to
        for part in content:
            if isinstance(part, str):
                continue
            modality, data = part
            array = decode(modality, data, self.settings)
            if modality is IMAGE:
                given["images"].append(Image.open(io.BytesIO(data)))
            elif modality is AUDIO:
                given["audio"].append(array)
                slots.append(None)
            else:
                given["videos"].append(array)
                given["video_metadata"].append(metadata(probe(modality, data, self.settings)))
                if is_heard:
                    given["audio"].append(decode(AUDIO, data, self.settings))
                    slots.append(len(given["videos"]) - 1)
        given = {key: value for key, value in given.items() if value}
        if not given:  # GOT-OCR2's processor refuses a text alone
            return dict(processor.tokenizer([text], return_tensors="pt"))
        if self._hears:
            given.setdefault("audio", None)  # Qwen3-ASR's wants to be told
        if "videos" in given:
            given |= {"do_sample_frames": False, "return_metadata": True}
        if is_heard:
            given |= {"load_audio_from_video": True, "audio_from_video_indices": slots}
        inputs = processor(text=[text], return_tensors="pt", **given, **self.folder.call_kwargs)
        inputs.pop("video_metadata", None)
        pixels = inputs.get("pixel_values")
        if pixels is not None and pixels.dtype is torch.bfloat16:  # Llama 4's
            inputs["pixel_values"] = pixels.float()
        return dict(inputs)


def metadata(probed: MediaProbe) -> Any:
    from transformers.video_utils import VideoMetadata

    total, fps = probed.num_source_frames, probed.source_fps
    return VideoMetadata(total, fps=fps, duration=total / fps, frames_indices=list(probed.frame_idx))


def cluster_args(folder: FamilyFolder, max_batch_tokens: int = 48) -> ClusterArgs:
    return ClusterArgs.model_validate(
        {
            "model": str(folder.path),
            "model_id": "tiny",
            "dtype": "float32",
            "block_size": 16,
            "encode": {"cache_bytes": 4 << 20},
            "prefill": {"max_batch_tokens": max_batch_tokens, "kv_blocks": 256, "feature_bytes": 4 << 20},
            "decode": {"kv_blocks": 256},
            "door": PATIENT_DOOR,
        }
    )


def message(content: list[Part]) -> list[dict[str, Any]]:
    texts = [part for part in content if isinstance(part, str)]
    if len(texts) == len(content):
        return [{"role": "user", "content": "".join(texts)}]
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            field = FIELDS[part[0]]
            parts.append({"type": field, field: {"url": data_uri(TYPES[part[0]], part[1])}})
    return [{"role": "user", "content": parts}]


async def ask(client: httpx.AsyncClient, content: list[Part]) -> Expected:
    body = {
        "model": "tiny",
        "messages": message(content),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return Expected(answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"])


@pytest.mark.parametrize("name", often(FAMILIES, OFTEN))
async def test_answers_over_http_equal_generate(name: str, tmp_path) -> None:
    folder = save_family(name, tmp_path)
    media = MediaProcessor.load(folder.path)
    assert media is not None
    contents = cases(name, media.modalities)
    reference = Reference(folder, media)
    expected = [reference.answer(content) for content in contents]
    async with local_cluster(cluster_args(folder)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            # The prefix cache and the encoder cache are warm the second time; then decode computes what is
            # left of prompts whose media it has, of a hybrid only text: decode has the KV of such a prompt,
            # but no snapshot of its state
            for prefills_locally in (False, False, True):
                policy = cluster.let_prefill_locally(lambda _, local=prefills_locally: local)
                answers = await asyncio.gather(*(ask(client, content) for content in contents))
                assert answers == expected
            is_hybrid = any(peer.member.state_blocks for peer in cluster.door.peers)
            assert policy.num_local > (0 if is_hybrid else len(media.modalities))


@pytest.mark.parametrize(
    ("role", "num_replicas"),
    [
        pytest.param("decode", (1, 1, 2), id="decode"),
        pytest.param("prefill", (1, 2, 1), id="prefill"),
        pytest.param("language", (1, 0, 0, 2), id="language", marks=pytest.mark.slow),
        pytest.param("whole", (0, 0, 0, 0, 0, 2), id="whole", marks=pytest.mark.slow),
    ],
)
async def test_a_hybrid_of_media_goes_on_after_a_loss(
    role: str, num_replicas: tuple[int, ...], tmp_path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.lease.receiver.IN_FLIGHT_S", 0.1)  # within one process nothing is
    folder = save_family("qwen3_5", tmp_path)
    media = MediaProcessor.load(folder.path)
    assert media is not None
    contents, reference = cases("qwen3_5", media.modalities), Reference(folder, media)
    expected = [reference.answer(content) for content in contents]
    async with local_cluster(cluster_args(folder), num_replicas) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        loss = Loss(cluster.prefills if role == "prefill" else cluster.decodes, "run", 3, stand_ins)
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            assert await asyncio.gather(*(ask(client, content) for content in contents)) == expected
        assert loss.victim is not None
        assert cluster.door.dispatcher.flow.continuation.num_replays > 0


@pytest.mark.parametrize(
    ("name", "part"), [("kimi_k25", (VIDEO, clip(1, 4, 32, 32))), ("muse_spark", (AUDIO, sound(2, 4_000)))]
)
async def test_what_only_the_processor_takes_is_refused_by_name(name: str, part: Part, tmp_path) -> None:
    async with local_cluster(cluster_args(save_family(name, tmp_path))) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            body = {"model": "tiny", "messages": message([part, WHAT])}
            response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert f"takes no {part[0]} input" in response.json()["error"]["message"]


async def prompt_and_answer(door: Door, content: list[Part], **fields: object) -> tuple[list[int], list[int]]:
    """Below HTTP, where the ids themselves can be seen."""
    body = {"model": "tiny", "messages": message(content), "temperature": 0, **fields}
    call = chat_call(ChatRequest.model_validate(body), CallContext(ServedModels("tiny"), door.defaults))
    prompt = await door.prepare(call, RequestTimeline(0.0))
    request = GenerateRequest(new_request_id(), prompt.prompt, call.sampling, StopParams(MAX_TOKENS))
    (events,) = door.dispatcher.generate(
        ClientRequest(request, prompt.items, prompt.block_hashes, RequestTimeline(0.0))
    )
    answer = [token_id async for event in events for token_id in event.token_ids]
    prompt.release()
    return list(prompt.prompt.token_ids), answer


@pytest.mark.parametrize(
    ("name", "max_batch_tokens"),
    often(
        itertools.product(("qwen2_5_omni", "qwen3_omni"), (16, 1024)),
        (("qwen2_5_omni", 16), ("qwen3_omni", 1024)),
    ),
)
async def test_a_clip_that_is_heard_is_answered_as_by_generate(
    name: str, max_batch_tokens: int, tmp_path
) -> None:
    folder = save_family(name, tmp_path)
    media = MediaProcessor.load(folder.path)
    assert media is not None
    heard = clip(3, 9, 44, 36, num_samples=24_000)
    contents: list[list[Part]] = [
        [(VIDEO, heard), "what is said?"],
        [
            (AUDIO, sound(4, 8_000)),
            (IMAGE, picture(5, 40, 24)),
            "and",
            (VIDEO, heard),
            (VIDEO, clip(6, 5, 32, 32, num_samples=9_600)),
            "?",
        ],
    ]
    reference = Reference(folder, media)
    async with local_cluster(cluster_args(folder, max_batch_tokens)) as cluster:
        for content in contents[: 1 if name == "qwen3_omni" else 2]:
            got = await prompt_and_answer(
                cluster.door, content, mm_processor_kwargs={"use_audio_in_video": True}
            )
            assert got == reference.tokens(content, is_heard=True)
        silent: list[Part] = [(VIDEO, clip(3, 9, 44, 36)), "what is said?"]
        got = await prompt_and_answer(cluster.door, silent, mm_processor_kwargs={"use_audio_in_video": True})
        assert got == reference.tokens(silent), "as without the field"
