"""The law of the house for answers that contain the special tokens of media, which a model may generate like
any others: such a token is text, for plain decode and for a prompt that is resumed after a preemption."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf

from cluster.engine import answers
from cluster.engine.state import LanguageRequest
from cluster.engine.tables import uncut_spans
from cluster.ids import new_request_id
from cluster.kvcache.blocks import BlockPool
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.support import head_of
from cluster.types.request import GenerateRequest, SamplingParams, StopParams
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ServedModels
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.fakes.slow_params import often
from tests.flow.family_folders import FAMILIES, OWN_TOKENS, SPECIAL_TOKENS, FamilyFolder, save_family
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.state_pair import StatePair
from tests.flow.test_families import BLOCK_SIZE, memory
from tests.flow.test_family_doors import Part, Reference, cases, cluster_args, message
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import AE, AS, AUD, IMG, VE, VID, VS, TinyRequest

# Markers before, around and without placeholders; placeholders without markers; ends before beginnings.
FORCED = (VS, IMG, IMG, VE, 7, AS, AUD, AE, VS, VID, VID, VE, IMG, AUD, VID, AE, VE, 9, VS, AS, AS, VS)
NUM_FREE = 6
CUTS = (0, 1, 2, 8, 13, 18, len(FORCED), len(FORCED) + 3)  # tokens before a preemption
# Each way of placing positions and of marking media, and ids that are read as token 0; the others are like
# one of them.
DIFFERENT = (
    "qwen2_5_omni", "glm4v", "hunyuan_vl", "kimi_k25", "muse_glimmer", "gemma3", "qwen3_omni", "qwen2_5_vl",
    "llava_onevision",
)  # fmt: skip
ALWAYS = DIFFERENT[:6]
PREEMPTED = ("qwen2_5_omni",)
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


class Forced(hf.LogitsProcessor):
    """The first tokens that `generate` draws are these."""

    def __init__(self, num_prompt_tokens: int):
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_generated = input_ids.shape[1] - self._num_prompt_tokens
        if num_generated >= len(FORCED):
            return scores
        forced = torch.full_like(scores, float("-inf"))
        forced[:, FORCED[num_generated]] = 0.0
        return forced


def forced_answer(model: hf.PreTrainedModel, request: TinyRequest) -> list[int]:
    ids = torch.tensor([request.token_ids])
    mixin: Any = hf.GenerationMixin
    with torch.no_grad():
        output = mixin.generate(  # Janus' own takes no logits processor
            model,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(FORCED) + NUM_FREE,
            do_sample=False,
            logits_processor=hf.LogitsProcessorList([Forced(ids.shape[1])]),
            **{key: value.clone() for key, value in request.generate_kwargs.items()},
        )
    return output[0, ids.shape[1] :].tolist()


@dataclass
class Halves:
    encoder: EncoderModel
    language: LanguageModel

    def resumed_answer(self, request: TinyRequest, known: list[int]) -> list[int]:
        """All of the answer, of which `known` was generated before a preemption; the rest of `FORCED` is
        forced."""
        whole = GenerateRequest("r", request.prompt, (SamplingParams(),), StopParams(100))
        prompt = whole.resumed("s", (0,), tuple(known)).prompt
        placed = self.language.positions(prompt)
        kv, table = memory(self.language), list(range(0, 200, 3))
        pieces = []
        for item, (modality, tensors) in zip(request.placed, request.items, strict=True):
            rows = self.encoder.encode(modality, [tensors])[0]
            pieces += [
                FeatureSlice(token, rows[row : row + count]) for token, row, count in item.pieces(0, item.end)
            ]
        states = StatePair(self.language, 256)
        chunk = SequenceChunk(
            prompt.token_ids, placed.position_ids, 0, table, tuple(pieces),
            uncut_spans(self.language, prompt), states=states.of(len(prompt.token_ids)),
        )  # fmt: skip
        answer = list(known)
        logits = self.language.forward([chunk], kv)
        while True:
            forced = FORCED[len(answer)] if len(answer) < len(FORCED) else int(logits.argmax())
            answer.append(forced)
            if len(answer) == len(FORCED) + NUM_FREE:
                return answer
            context = len(request.token_ids) + len(answer) - 1
            at = context + placed.delta
            logits = self.language.forward(
                [SequenceChunk([forced], at, context, table, states=states.of(1))], kv
            )


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        *often(itertools.product(MEDIA_FAMILIES, [CUTS[::2]]), [(name, CUTS[::2]) for name in ALWAYS]),
        *often(itertools.product(DIFFERENT, [CUTS[1::2]]), []),
    ],
)
def test_generated_markers_of_media_are_text_as_for_generate(name: str, cuts: tuple[int, ...]) -> None:
    """Decoded one by one, and as the end of a prompt that was preempted after each of some tokens."""
    case = MEDIA_FAMILIES[name]()
    expected = [forced_answer(case.model, request) for request in case.requests]
    encoder = EncoderModel.from_model(case.model)
    halves = Halves(encoder, LanguageModel.from_model(case.model, block_size=BLOCK_SIZE))
    assert any(request.placed for request in case.requests)
    for request, answer in zip(case.requests, expected, strict=True):
        for num_known in cuts:
            assert halves.resumed_answer(request, answer[:num_known]) == answer


# ------------------------------------------------------------------------------------------- preemption in a
# cluster

NUM_TOKENS = 40
LOUDNESS = 6.0
PREEMPTED_AFTER = 9  # tokens of an attempt
NUM_DRAWN = 12  # answers at least, so that they have enough of the special tokens


def special_ids(folder: FamilyFolder) -> list[int]:
    """Of everything that stands for media or around it, in any family."""
    tokens = {*SPECIAL_TOKENS.values(), *(token for own in OWN_TOKENS.values() for token in own.values())}
    ids = folder.processor.tokenizer.convert_tokens_to_ids(sorted(tokens))
    return sorted({token_id for token_id in ids if token_id is not None})


def make_talkative(folder: FamilyFolder) -> None:
    """Most tokens that the model says are special ones. They are loud in the head alone: a token whose
    embedding were as loud would be said again and again."""
    model: Any = folder.model
    output = head_of(model)
    if output.weight is model.get_input_embeddings().weight:
        output.weight = torch.nn.Parameter(output.weight.data.clone())
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    head = output.weight.data
    special = special_ids(folder)
    loudness = head[special].norm(dim=-1, keepdim=True)
    head *= 0.1
    head[special] *= LOUDNESS / (0.1 * loudness)
    folder.model.save_pretrained(folder.path)


async def answer(cluster: LocalCluster, content: list[Part], sampling: SamplingParams) -> list[int]:
    body = {"model": "tiny", "messages": message(content)}
    context = CallContext(ServedModels("tiny"), cluster.door.defaults)
    call = chat_call(ChatRequest.model_validate(body), context)
    prompt = await cluster.door.prepare(call, RequestTimeline(0.0))
    request = GenerateRequest(new_request_id(), prompt.prompt, (sampling,), StopParams(NUM_TOKENS))
    client = ClientRequest(request, prompt.items, prompt.block_hashes, RequestTimeline(0.0))
    (events,) = cluster.door.dispatcher.generate(client)
    got = [token_id async for event in events for token_id in event.token_ids]
    prompt.release()
    return got


def preempt_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt of a request loses its blocks after some tokens: there is none for the next one, and no
    other request is a victim."""
    try_grow, victims = answers.try_grow, []

    def grow(request: LanguageRequest, blocks: BlockPool) -> bool:
        if request.choices[0].num_generated == PREEMPTED_AFTER:
            victims.append(request)
            return False
        return try_grow(request, blocks)

    monkeypatch.setattr(answers, "try_grow", grow)
    monkeypatch.setattr(answers, "blocks_missing", lambda request, size: [request])  # in every step
    monkeypatch.setattr(answers, "choose_victim", lambda running: victims.pop())


def generated(reference: Reference, content: list[Part]) -> list[int]:
    inputs = reference.inputs(content)
    model: Any = reference.folder.model
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", often(FAMILIES, PREEMPTED))
async def test_preempted_answers_full_of_special_tokens_do_not_change(
    name: str, tmp_path, monkeypatch
) -> None:
    folder = save_family(name, tmp_path)
    make_talkative(folder)
    media = MediaProcessor.load(folder.path)
    assert media is not None
    contents = [content for content in cases(name, media.modalities) if not isinstance(content[0], str)]
    contents += cases(name, media.modalities)[-1:]
    reference = Reference(folder, media)
    num_draws = max(3, NUM_DRAWN // len(contents))
    draws = [SamplingParams(temperature=1.0 + seed % 3, seed=seed) for seed in range(num_draws)]
    asked = [(content, SamplingParams()) for content in contents]
    asked += [(content, draw) for content in contents for draw in draws]
    async with local_cluster(cluster_args(folder)) as cluster:
        alone = await asyncio.gather(*(answer(cluster, *one) for one in asked))
        assert cluster.decodes[0].engine.load().totals.num_preempted == 0
    assert alone[: len(contents)] == [generated(reference, content) for content in contents]
    said = {token_id for tokens in alone for token_id in tokens}
    assert len(said.intersection(special_ids(folder))) >= 5

    async with local_cluster(cluster_args(folder)) as cluster:
        engine = cluster.decodes[0].engine
        preempt_often(monkeypatch)
        again = await asyncio.gather(*(answer(cluster, *one) for one in asked))
        assert engine.load().totals.num_preempted == len(asked) * ((NUM_TOKENS - 1) // PREEMPTED_AFTER)
    assert again == alone
