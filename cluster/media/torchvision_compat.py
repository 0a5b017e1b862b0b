"""Makes torchvision importable next to a CPU-only torch.

transformers' video processors import torchvision. PyPI's torchvision is linked against CUDA torch. Next to a
CPU-only torch its extension does not load, and the import fails because the schemas of its two custom
operators are missing ("operator torchvision::nms does not exist"). The transforms that processors use are
plain torch, so defining the schemas is enough.
"""

from __future__ import annotations

import importlib
import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # a Library removes its operators when it is garbage-collected


def ensure_torchvision() -> None:
    """Call it before any processor is loaded. May be repeated. Raises ImportError if torchvision is not
    installed."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _libraries:
            raise
        _forget_half_imported()
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)
        importlib.import_module("torchvision")


def _forget_half_imported() -> None:
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]
