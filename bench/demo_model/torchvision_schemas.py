"""Let a CUDA-linked torchvision wheel import beside a CPU-only torch, for transformers' processors.

Without CUDA libraries torchvision's compiled part does not load, and its meta registrations then fail on two
unknown operators. The processors use only its pure Python transforms, so declaring the two schemas is enough.
Call `declare` before the first import of torchvision.
"""

import functools
import importlib.util
import sys

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def declare() -> torch.library.Library | None:
    """Declare torchvision's operators on a CPU-only torch; may be repeated."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return None
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library
