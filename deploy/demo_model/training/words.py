"""Training and test words: no (word, voice, speed, pitch) is in both."""

from pathlib import Path

from deploy.demo_model.training.speech import WordBank, build_word_bank

NUM_TRAINING_CLIPS_PER_WORD = 120
NUM_TEST_CLIPS_PER_WORD = 12


def training_words(seed: int, cache: Path, num_per_word: int = NUM_TRAINING_CLIPS_PER_WORD) -> WordBank:
    """The clips of a training seed."""
    return build_word_bank(seed, num_per_word, cache)


def test_words(seed: int, cache: Path, training_seed: int = 0) -> WordBank:
    """The clips of an evaluation seed, none of them spoken as in training."""
    avoid = frozenset(training_words(training_seed, cache).draws())
    return build_word_bank(10_000 + seed, NUM_TEST_CLIPS_PER_WORD, cache, avoid)
