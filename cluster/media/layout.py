"""Makes an item's layout in a prompt from the output of a processor. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import MediaError
from cluster.media.calls import Processed
from cluster.types.media import MediaGeometry, MediaLayout, Modality


def make_layout(processed: Processed, modality: Modality, row_tokens: Mapping[Modality, str]) -> MediaLayout:
    """row_tokens: the token that the processor writes once for each embedding row. Raises MediaError for an
    item without rows."""
    inputs: list[tuple[Modality, Mapping[str, Any]]] = [(modality, processed.inputs)]
    if processed.sound_inputs is not None:
        inputs.append((Modality.AUDIO, processed.sound_inputs))
    text, runs = cut_runs(processed.text, [row_tokens[kind] for kind, _ in inputs])
    num_rows = [sum(length for part, length in runs if part == i) for i in range(len(inputs))]
    if 0 in num_rows:
        raise MediaError("too small or too short for this model: it has no embedding row")
    geometries = (_geometry(kind, given, rows) for (kind, given), rows in zip(inputs, num_rows, strict=True))
    parts = tuple(zip((kind for kind, _ in inputs), geometries, strict=True))
    return MediaLayout(text, tuple(runs), parts)


def cut_runs(text: str, tokens: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text with every run of one of the tokens shortened to one token, and (index of the token, length)
    of each run."""
    runs: list[tuple[int, int]] = []

    def cut(match: re.Match[str]) -> str:
        part = next(i for i, token in enumerate(tokens) if match.group().startswith(token))
        runs.append((part, len(match.group()) // len(tokens[part])))
        return tokens[part]

    pattern = "|".join(f"(?:{re.escape(token)})+" for token in tokens)
    return re.sub(pattern, cut, text), runs


def _geometry(modality: Modality, inputs: Mapping[str, Any], num_rows: int) -> MediaGeometry:
    """Only processors of models with multimodal positions return the fields that the positions need."""
    grid = inputs.get(f"{modality}_grid_thw")
    seconds = inputs.get("second_per_grid_ts", inputs.get("video_second_per_grid"))
    mask = inputs.get("feature_attention_mask")
    return MediaGeometry(
        num_rows,
        None if grid is None else tuple(grid[0].tolist()),
        None if seconds is None else float(seconds[0]),
        None if mask is None else int(mask.sum()),
    )
