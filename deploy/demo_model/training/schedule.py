"""The recipe's numbers and the optimizer: step-based, so that a run is the same on any machine."""

import dataclasses
import math
from dataclasses import dataclass

import torch

WEIGHT_DECAY = 0.05
BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then a cosine down to `final_ratio` of it.

    The cosine takes `num_cosine_steps`; a run with fewer steps ends while the rate is still high. 0: all
    steps. Before it the rate stays at its peak for `num_flat_steps`. `has_muon`: Muon trains the matrices
    inside layers and AdamW the rest, instead of AdamW alone. `num_workers`: processes that share a step.
    `start_share`: of the weights before the stage in the mean with those behind it, which is the result.
    `mean_decay`: of a moving mean of the weights over steps, which is the result; 0: that of the last step.
    `has_bf16`: products in bf16 (autocast), which is slower than float32 where there is no matrix unit.
    """

    num_steps: int
    num_warmup_steps: int
    peak: float
    final_ratio: float = 0.02
    num_cosine_steps: int = 0
    num_flat_steps: int = 0
    has_muon: bool = False
    num_workers: int = 2
    start_share: float = 0.0
    mean_decay: float = 0.0
    has_bf16: bool = True

    def with_steps(self, num_steps: int) -> "Schedule":
        """The same schedule stretched to another length."""
        flat = self.num_flat_steps * num_steps // self.num_steps
        return dataclasses.replace(self, num_steps=num_steps, num_flat_steps=flat)


PRETRAINING = {
    "vision": Schedule(num_steps=1600, num_warmup_steps=100, peak=2e-3),
    "audio": Schedule(num_steps=2200, num_warmup_steps=100, peak=2e-3),
}
JOINT = {
    "learn": Schedule(num_steps=600, num_warmup_steps=100, peak=1e-3, num_cosine_steps=1200),
    "refine": Schedule(num_steps=800, num_warmup_steps=30, peak=1e-3),
    "converse": Schedule(num_steps=1300, num_warmup_steps=50, peak=1e-3, num_flat_steps=750),
    "practise": Schedule(num_steps=1900, num_warmup_steps=50, peak=7e-4, num_flat_steps=1100, has_muon=True),
    "polish": Schedule(num_steps=900, num_warmup_steps=30, peak=6e-4, num_flat_steps=450, has_muon=True),
    "broaden": Schedule(num_steps=900, num_warmup_steps=30, peak=5e-4, num_flat_steps=400, has_muon=True),
    "vary": Schedule(
        num_steps=700,
        num_warmup_steps=30,
        peak=5e-4,
        num_flat_steps=240,
        has_muon=True,
        num_workers=1,
        start_share=0.5,
    ),
    "widen": Schedule(
        num_steps=640,
        num_warmup_steps=30,
        peak=5e-4,
        num_flat_steps=280,
        has_muon=True,
        num_workers=1,
        start_share=0.25,
        mean_decay=0.995,
    ),
    "extend": Schedule(
        num_steps=800,
        num_warmup_steps=30,
        peak=5e-4,
        num_flat_steps=350,
        has_muon=True,
        num_workers=1,
        start_share=0.25,
        mean_decay=0.995,
    ),
    "gather": Schedule(
        num_steps=1000,
        num_warmup_steps=30,
        peak=5e-4,
        num_flat_steps=550,
        has_muon=True,
        mean_decay=0.995,
        has_bf16=False,
    ),
    "decline": Schedule(
        num_steps=400,
        num_warmup_steps=30,
        peak=3e-4,
        num_flat_steps=150,
        has_muon=True,
        mean_decay=0.99,
        has_bf16=False,
    ),
}
ENCODER_SCALE = 0.2


def learning_rate(schedule: Schedule, step: int) -> float:
    """The rate of a step, counted from 0."""
    warmup = min(1.0, (step + 1) / schedule.num_warmup_steps)
    flat = schedule.num_flat_steps
    falling = max(0, step - flat) / ((schedule.num_cosine_steps or schedule.num_steps) - flat)
    cosine = 0.5 * (1 + math.cos(math.pi * falling))
    return schedule.peak * warmup * (schedule.final_ratio + (1 - schedule.final_ratio) * cosine)


def make_optimizers(
    parameters: dict[str, torch.nn.Parameter], schedule: Schedule, slow_prefixes: tuple[str, ...]
) -> list[torch.optim.Optimizer]:
    """Vectors have no decay; parameters under a slow prefix learn at `ENCODER_SCALE` of the rate.

    Muon (Jordan et al., 2024) with updates scaled to AdamW's (Liu et al., 2025, "Muon is scalable").
    """
    by_muon = {
        name: parameter
        for name, parameter in parameters.items()
        if schedule.has_muon and parameter.ndim == 2 and ".layers." in name
    }
    rest = {name: parameter for name, parameter in parameters.items() if name not in by_muon}
    optimizers: list[torch.optim.Optimizer] = [_adamw(rest, schedule, slow_prefixes)]
    if by_muon:
        group = {"params": list(by_muon.values()), "scale": 1.0}
        optimizers.append(
            torch.optim.Muon(
                [group], lr=schedule.peak, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


def _adamw(
    parameters: dict[str, torch.nn.Parameter], schedule: Schedule, slow_prefixes: tuple[str, ...]
) -> torch.optim.AdamW:
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter.ndim >= 2, name.startswith(slow_prefixes)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": members,
                "weight_decay": WEIGHT_DECAY if is_matrix else 0.0,
                "scale": ENCODER_SCALE if is_slow else 1.0,
            }
            for (is_matrix, is_slow), members in groups.items()
        ],
        lr=schedule.peak,
        betas=BETAS,
        fused=True,
    )
