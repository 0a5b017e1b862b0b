"""What the undivided model answers to media that a client wants looked at in its own way. transformers alone,
greedy, fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from bench.workload import Answer, Case, Reference

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class MediaReference(Reference):
    def pooled(
        self, case: Case, num_tokens: int, temporal: int = 1, spatial: int = 1, fps: float = 2.0
    ) -> Answer:
        """`fps`: that the processor is told; it tells time by it, two frames to a patch, whatever the clip's
        own rate. Encoder rows of images and clips averaged by hand over groups of neighbours, then `generate`
        on what is left of them, with the grids that it has then. End tokens end nothing."""
        inputs = self.inputs(case)
        rows: dict[str, Any] = {}
        token_ids = inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            for kind, pixels in PIXELS.items():
                if pixels not in inputs:
                    continue
                grids = inputs[f"{kind}_grid_thw"]
                encoded = getattr(self.model, f"get_{kind}_features")(inputs.pop(pixels), grids)
                factors = (temporal if kind == "video" else 1, spatial, spatial)
                means = [
                    grouped(item, grid, factors)
                    for item, grid in zip(encoded.pooler_output, grids.tolist(), strict=True)
                ]
                pooled: Any = [item for item, _ in means]
                rows[kind] = BaseModelOutputWithPooling(pooler_output=pooled)
                inputs[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid in means])
                row_id = getattr(self.model.config, f"{kind}_token_id")
                token_ids = with_runs(token_ids, row_id, [len(item) for item, _ in means])
            if "video_second_per_grid" in inputs:
                inputs["video_second_per_grid"] = torch.full_like(
                    inputs["video_second_per_grid"], 2.0 / fps * temporal
                )
            inputs["input_ids"] = torch.tensor([token_ids])
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            output = self.model.generate(
                **inputs,
                mm_encoder_outputs=rows,
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=self.model.config.get_text_config().vocab_size,  # none is the last
            )
        generated = output[0, len(token_ids) :].tolist()
        text = self.processor.tokenizer.decode(generated, skip_special_tokens=True)
        return Answer(tuple(generated), text, len(token_ids))


def grouped(
    rows: torch.Tensor, grid: list[int], factors: tuple[int, int, int]
) -> tuple[torch.Tensor, list[int]]:
    """Means of the rows of a grid (patches in time, height, width; 2 x 2 of them are a row), and the grid of
    the means."""
    time, height, width = grid[0], grid[1] // 2, grid[2] // 2
    volume = rows.float().numpy().reshape(time, height, width, -1)
    for axis, factor in enumerate(factors):
        starts = range(0, volume.shape[axis], factor)
        sums = np.add.reduceat(volume, list(starts), axis=axis)
        sizes = [min(factor, volume.shape[axis] - start) for start in starts]
        volume = sums / np.array(sizes, np.float32).reshape([-1 if i == axis else 1 for i in range(4)])
    time, height, width, columns = volume.shape
    return torch.from_numpy(volume.reshape(-1, columns)), [time, 2 * height, 2 * width]


def with_runs(token_ids: list[int], row_id: int, lengths: list[int]) -> list[int]:
    """The prompt with each run of `row_id` in the length given for it."""
    changed: list[int] = []
    left = iter(lengths)
    for before, token_id in zip([None, *token_ids], token_ids, strict=False):
        if token_id != row_id:
            changed.append(token_id)
        elif before != row_id:
            changed += [row_id] * next(left)
    assert next(left, None) is None
    return changed
