"""Spoken words from espeak-ng, through the library inside the `espeakng-loader` wheel; one process, one
thread.

`speak` synthesizes one word with one voice. A `WordBank` is a fixed list of such clips drawn from a seed and
kept on disk, so that training and evaluation never synthesize twice; `make_clip` strings words of a bank
together. Samples are float32 in [-1, 1] at 16 kHz.
"""

import ctypes
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploy.demo_model.training.data import WORDS

SAMPLE_RATE = 16_000
LANGUAGES = ("en-us", "en", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029")
VARIANTS = ("", "+m1", "+m2", "+m3", "+m4", "+m5", "+m6", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5")
SILENCE_LEVEL = 0.01

AUDIO_OUTPUT_RETRIEVAL = 1
POSITION_CHARACTER = 1
CHARS_UTF8 = 1
PARAMETER_RATE = 1
PARAMETER_PITCH = 3
SynthesisCallback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


@dataclass(frozen=True)
class Voice:
    """How a word is spoken: espeak-ng's voice name, words per minute, pitch (0 to 99)."""

    name: str
    speed: int
    pitch: int


@dataclass(frozen=True)
class Spoken:
    """One word of a bank with its samples (float16, trimmed to the sound)."""

    word: str
    voice: Voice
    samples: np.ndarray


class Synthesizer:
    """The process's one espeak-ng instance."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data_path = espeakng_loader.get_data_path().encode()
        self._sample_rate = self._library.espeak_Initialize(AUDIO_OUTPUT_RETRIEVAL, 0, data_path, 0)
        if self._sample_rate <= 0:
            raise RuntimeError("espeak-ng did not start")
        self._chunks: list[np.ndarray] = []
        self._callback = SynthesisCallback(self._collect)
        self._library.espeak_SetSynthCallback(self._callback)

    def _collect(
        self, samples: "ctypes._Pointer[ctypes.c_short]", num_samples: int, _events: int | None
    ) -> int:
        if samples and num_samples > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, shape=(num_samples,)).copy())
        return 0

    def speak(self, text: str, voice: Voice) -> np.ndarray:
        """Blocks until the text is spoken; float32 at 16 kHz."""
        self._chunks.clear()
        if self._library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice.name}")
        self._library.espeak_SetParameter(PARAMETER_RATE, voice.speed, 0)
        self._library.espeak_SetParameter(PARAMETER_PITCH, voice.pitch, 0)
        encoded = text.encode()
        self._library.espeak_Synth(
            encoded, len(encoded) + 1, 0, POSITION_CHARACTER, 0, CHARS_UTF8, None, None
        )
        self._library.espeak_Synchronize()
        sound = np.concatenate(self._chunks).astype(np.float32) / 32768
        return resample(sound, self._sample_rate, SAMPLE_RATE)


@functools.cache
def synthesizer() -> Synthesizer:
    """espeak-ng keeps its state in globals: one instance for each process."""
    return Synthesizer()


def resample(sound: np.ndarray, from_rate: int, to_rate: int) -> np.ndarray:
    """Band-limited resampling to a lower rate by cutting the spectrum."""
    length = int(len(sound) * to_rate / from_rate)
    spectrum = np.fft.rfft(sound)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(sound))).astype(np.float32)


def trim(sound: np.ndarray) -> np.ndarray:
    """Returns the sound without the silence at both ends."""
    loud = np.nonzero(np.abs(sound) > SILENCE_LEVEL)[0]
    return sound[loud[0] : loud[-1] + 1] if len(loud) else sound


def draw_voice(rng: random.Random) -> Voice:
    """One of 91 voices at a speed and pitch."""
    return Voice(rng.choice(LANGUAGES) + rng.choice(VARIANTS), rng.randrange(120, 220), rng.randrange(25, 80))


class WordBank:
    """Clips of every word, in the order of `WORDS`, `num_per_word` each."""

    def __init__(self, clips: Sequence[Spoken]) -> None:
        self._clips = tuple(clips)
        self._by_word: dict[str, list[Spoken]] = {}
        for clip in clips:
            self._by_word.setdefault(clip.word, []).append(clip)

    def __len__(self) -> int:
        return len(self._clips)

    def draws(self) -> set[tuple[str, Voice]]:
        """The draw of each clip, so that another bank can avoid it."""
        return {(clip.word, clip.voice) for clip in self._clips}

    def draw(self, rng: random.Random, word: str | None = None) -> Spoken:
        """A clip of a word; each word is equally likely."""
        return rng.choice(self._by_word[word or rng.choice(WORDS)])


def build_word_bank(
    seed: int, num_per_word: int, cache: Path, avoid: frozenset[tuple[str, Voice]] = frozenset()
) -> WordBank:
    """The bank of a seed, from disk when an earlier run made it; draws in `avoid` are drawn again."""
    rng = random.Random(f"words {seed}")
    wanted: list[tuple[str, Voice]] = []
    for word in WORDS:
        for _ in range(num_per_word):
            voice = draw_voice(rng)
            while (word, voice) in avoid:
                voice = draw_voice(rng)
            wanted.append((word, voice))
    path = cache / f"words-{seed}-{num_per_word}.npz"
    if not path.exists():
        sounds = [trim(synthesizer().speak(word, voice)).astype(np.float16) for word, voice in wanted]
        cache.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(sound) for sound in sounds])
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, lengths=lengths, samples=np.concatenate(sounds))
        partial.replace(path)
    with np.load(path) as stored:
        sounds = np.split(stored["samples"], np.cumsum(stored["lengths"])[:-1])
    return WordBank([Spoken(word, voice, sound) for (word, voice), sound in zip(wanted, sounds, strict=True)])


@dataclass(frozen=True)
class SpokenClip:
    """Words strung together: samples (float32), the words, and each word's [begin, end) in samples."""

    samples: np.ndarray
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


def silence(rng: random.Random, shortest_s: float, longest_s: float) -> np.ndarray:
    """Zeros of a random length."""
    return np.zeros(int(rng.uniform(shortest_s, longest_s) * SAMPLE_RATE), np.float32)


def make_clip(rng: random.Random, bank: WordBank, num_words: int, wanted: Sequence[str] = ()) -> SpokenClip:
    """The wanted words, or random ones, with pauses of 50 to 200 ms: no noise, full volume."""
    parts, words, spans = [silence(rng, 0.02, 0.2)], [], []
    position = len(parts[0])
    for word in wanted or [None] * num_words:
        spoken = bank.draw(rng, word)
        pause = silence(rng, 0.05, 0.2)
        parts += [spoken.samples.astype(np.float32), pause]
        words.append(spoken.word)
        spans.append((position, position + len(spoken.samples)))
        position += len(spoken.samples) + len(pause)
    return SpokenClip(np.concatenate(parts), tuple(words), tuple(spans))


def disturb(rng: random.Random, clip: SpokenClip) -> SpokenClip:
    """The clip at another volume and mostly with noise."""
    samples = clip.samples * rng.uniform(0.4, 1.2)
    if rng.random() < 0.7:
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(samples), np.float32)
        samples = samples + noise * np.float32(10 ** rng.uniform(-4, -2.2))
    return SpokenClip(samples.astype(np.float32), clip.words, clip.spans)
