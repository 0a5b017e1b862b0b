"""The probe that a lossy codec has to pass before a model is served over it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel
from cluster.worker import codec_probe
from cluster.worker.codec_probe import CodecError, check_codec, codec_error
from kv_transfer.codecs.quantisation import CodecName
from kv_transfer.codecs.wire_memory import Wire
from tests.flow.tiny_models import TEXT_FAMILIES


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.from_model(TEXT_FAMILIES["llama"]().model, block_size=16)


def probe(model: LanguageModel, codec: CodecName) -> CodecError:
    kv = BlockMemory(model.kv_layout, 20)
    return codec_error(model, kv, Wire(kv, codec, 64))


def test_int4_changes_more_than_int8_and_int8_something(model):
    int8, int4 = probe(model, "int8"), probe(model, "int4")
    assert 0 < int8.divergence < int4.divergence
    assert int4.agreement <= int8.agreement <= 1


def test_what_the_codec_does_not_change_is_no_error(model, monkeypatch):
    done = SimpleNamespace(value=lambda: None)
    monkeypatch.setattr(Wire, "decode", lambda *_: done)
    assert probe(model, "int8") == CodecError(1.0, 0.0)


def test_a_model_that_suffers_is_refused_with_the_figures(model, monkeypatch):
    kv = BlockMemory(model.kv_layout, 20)
    wire = Wire(kv, "int4", 64)
    monkeypatch.setattr(codec_probe, "MAX_DIVERGENCE", codec_error(model, kv, wire).divergence / 2)
    with pytest.raises(ConfigError, match=r"int4 changes this model's answers too much: .*% .* nats"):
        check_codec(model, kv, wire)


@pytest.mark.parametrize(
    ("agreement", "divergence", "is_small"), [(1, 0.02, False), (0.9, 0, False), (1, 0, True)]
)
def test_both_figures_count(agreement, divergence, is_small):
    assert CodecError(agreement, divergence).is_small is is_small


def test_a_cache_too_small_for_the_probe_is_refused(model):
    kv = BlockMemory(model.kv_layout, 19)
    with pytest.raises(ConfigError, match="320 tokens"):
        codec_error(model, kv, Wire(kv, "int4", 64))
