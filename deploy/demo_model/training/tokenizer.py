"""The demo model's tokenizer: byte-level BPE with Qwen2's word splitting, trained on text that the project
makes.

The corpus is the task sentences of `data` and plain English from templates; nothing is read from outside.
"""

import json
import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from deploy.demo_model.training import data

VOCABULARY_SIZE = 1024
MODEL_MAX_LENGTH = 4096
END_OF_TEXT, TURN_BEGIN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MEDIA_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SPECIAL_TOKENS = (
    TURN_END,
    END_OF_TEXT,
    "<|IMAGE|>",
    "<|AUDIO|>",
    "<|VIDEO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    TURN_BEGIN,
)

NUM_TASK_ROUNDS = 4000
NUM_ENGLISH_SENTENCES = 6000
SUBJECTS = ("the model", "a server", "my friend", "this picture", "the person", "every request", "our cluster",
            "the answer", "that sound", "a short clip", "somebody", "the question")  # fmt: skip
VERBS = ("sends", "reads", "needs", "writes", "finds", "keeps", "follows", "shows", "makes", "takes", "gives",
         "understands", "wants", "uses", "changes")  # fmt: skip
OBJECTS = ("a message", "the first image", "another word", "some text", "the next token", "a new file", "the video",
           "more memory", "good help", "nothing", "the whole story", "many things", "one small step")  # fmt: skip
ENDINGS = ("before it stops", "when you ask", "with great care", "at the same time", "because it should",
           "for the people who work there", "after a while", "as well", "without any reason", "from the other side",
           "in the morning", "and then it waits", "if there is time", "to the end of the line")  # fmt: skip
OPENERS = ("Please tell me if", "I think that", "You should know that", "We will see how", "Can you say why",
           "It could be that", "They would like it when", "Today", "What happens when", "Thank you,")  # fmt: skip
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program work government number night point home water room mother "
    "area money story fact month right study book business issue side kind head house service friend father power "
    "hour game line end member law car city community name president team minute idea body information back parent "
    "face others level office door health person art war history party result change morning reason research girl "
    "moment teacher force education about above across again against almost alone along already although always "
    "among around because become before begin believe between bring build carry certain continue different during "
    "early enough example explain follow general happen however important include instead interest language large "
    "learn leave listen little matter measure nothing often order other possible present provide question rather "
    "really remember second several should simple since something sometimes special start still suggest support "
    "think though through together toward travel understand until usual various whether without wonder young"
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a tiny assistant. Answer briefly.",
    "Answer in English.",
)


def task_sentences(rng: random.Random) -> Iterator[str]:
    """One round over every kind of question, with its chat frame."""
    shape, colour = rng.choice(data.SHAPES), rng.choice(data.COLOUR_NAMES)
    word = rng.choice(data.WORDS)
    turns = (
        data.image_question(rng, shape, colour, is_early=True),
        data.images_question(rng, [(shape, colour)] * rng.randrange(2, 4)),
        data.video_question(rng, shape, colour, rng.choice(data.DIRECTIONS), is_early=True),
        data.audio_question(rng, [rng.choice(data.WORDS) for _ in range(rng.randrange(1, 4))], is_early=True),
        data.image_audio_question(rng, shape, colour, word),
        data.text_question(rng, is_early=True),
    )
    for turn in turns:
        yield f"user\n{turn.question}"
        yield f"assistant\n{turn.answer}"
        yield f" {turn.answer}"
    yield f"system\n{rng.choice(SYSTEM_PROMPTS)}"


def english_sentence(rng: random.Random) -> str:
    """A grammatical sentence about nothing in particular."""
    core = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(ENDINGS)}"
    if rng.random() < 0.5:
        return f"{rng.choice(OPENERS)} {core}."
    return f"{core[0].upper()}{core[1:]}."


def corpus(seed: int) -> Iterator[str]:
    """All training text of the tokenizer."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(NUM_TASK_ROUNDS):
        yield from task_sentences(rng)
    for _ in range(NUM_ENGLISH_SENTENCES):
        yield english_sentence(rng)
    for word in COMMON_WORDS.split():
        yield from [f" {word}"] * rng.randrange(20, 60)
    for word in data.WORDS:
        yield from [word, f" {word}", word.capitalize()] * 200


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    """Train the merges and add the special tokens behind them, as the last ids of the vocabulary."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(seed), trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        extra_special_tokens=MEDIA_TOKENS,
        model_max_length=MODEL_MAX_LENGTH,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if len(tokenizer) != VOCABULARY_SIZE:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model {VOCABULARY_SIZE}")
    return tokenizer
