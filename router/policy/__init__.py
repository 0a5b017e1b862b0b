"""Placement: which workers serve a request, and the prediction behind it. Pure; the door and the simulator
drive the same objects.

    views        a request, a placement, a prediction
    cluster      what is known of the workers; made of `pool`, `links`, `index`, `encoder_media`, `pending`,
                 `in_flight`, `calibration`
    estimate     what a placement of one request takes and costs; made of `at_encoders`, `at_prefills`,
                 `at_decodes`
    joint        the placement of least cost, found by `search`
    baselines    policies for comparison
    registry     policies by name or import path

No torch, asyncio, Ray or clock: `now` is an argument.
"""

from __future__ import annotations

from router.policy.calibration import Calibration
from router.policy.cluster import ClusterView
from router.policy.joint import JointPolicy
from router.policy.registry import Policy, make_policy
from router.policy.shared import answers_step_s, free_shares
from router.policy.views import (
    Decision,
    ItemPrediction,
    ItemView,
    Placement,
    Prediction,
    RequestView,
    Worker,
)

__all__ = [
    "Calibration",
    "ClusterView",
    "Decision",
    "ItemPrediction",
    "ItemView",
    "JointPolicy",
    "Placement",
    "Policy",
    "Prediction",
    "RequestView",
    "Worker",
    "answers_step_s",
    "free_shares",
    "make_policy",
]
