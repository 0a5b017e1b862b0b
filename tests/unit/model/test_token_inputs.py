"""Inputs that a text model takes for token ids beside embedding rows."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.token_inputs import TokenInputs
from tests.flow.test_families import memory
from tests.flow.tiny_models import TEXT_FAMILIES


def inputs_of(
    name: str, embed_size: int = 300, replaced: tuple[int, ...] = (), read_as: int = 0
) -> TokenInputs:
    text: Any = TEXT_FAMILIES[name]().model.model
    return TokenInputs(text, nn.Embedding(embed_size, 4), replaced, read_as)


def test_a_family_without_inputs_of_layers_gets_no_arguments() -> None:
    assert inputs_of("llama").of_layers(torch.tensor([5])) == {}


@pytest.mark.parametrize("name", ["gemma3n_layer_inputs", "gemma4_layer_inputs"])
def test_rows_and_inputs_of_layers_are_those_of_the_token_that_is_read(name: str) -> None:
    inputs = inputs_of(name, replaced=(40, 41), read_as=7)
    found, other = (
        cast(torch.Tensor, inputs.of_layers(torch.tensor(ids))["per_layer_inputs"])
        for ids in ([5, 40, 41], [5, 7, 7])
    )
    assert torch.equal(found, other)
    assert found.shape == (1, 3, 4, 8)
    assert torch.equal(inputs.rows(torch.tensor([5, 40])), inputs.rows(torch.tensor([5, 7])))


def test_ids_outside_the_table_are_read_as_the_first_one() -> None:
    inputs = inputs_of("gemma3n_layer_inputs", embed_size=300)
    assert inputs.known_ids([299, 300, 1000]).tolist() == [299, 0, 0]
    assert inputs.known_on_device(torch.tensor([299, 300, 1000])).tolist() == [299, 0, 0]


def test_the_embedding_table_is_never_searched_for_rows() -> None:
    """Neither when the model is probed nor in steps of prompts and answers."""
    case = TEXT_FAMILIES["gemma4_layer_inputs"]()
    text: Any = case.model.model
    with mock.patch.object(text, "get_per_layer_inputs", wraps=text.get_per_layer_inputs) as look_up:
        language = LanguageModel.from_model(case.model, block_size=16)
        kv = memory(language, 4)
        language.forward([SequenceChunk([5, 6, 7], 0, 0, [0])], kv)
        language.decode([8], [3], [0], [[0]], kv)
    assert look_up.call_count >= 4
    assert all(isinstance(call.args[0], torch.Tensor) for call in look_up.call_args_list)
