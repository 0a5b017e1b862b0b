"""Models named by their id on the Hugging Face hub ("org/name") instead of a folder.

`download` uses huggingface_hub, which shows progress, resumes interrupted downloads and keeps files in the
user's cache. The launcher calls it before anything starts; the started processes see the local folder only.
"""

from __future__ import annotations

import re
from pathlib import Path

from cluster.config.checkpoint import check_configuration
from cluster.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NOT_WANTED = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.tflite", "original/*",
)  # fmt: skip
_CONFIGURATION = ("config.json", "hf_quant_config.json", "adapter_config.json")
CONTACT_TIMEOUT_S = 5.0


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None


def download(model_id: str, *, is_offline: bool, endpoint: str | None = None) -> Path:
    """The folder of this model in the cache. Unless `is_offline`, missing files are downloaded first, and the
    weights only if the configuration does not refuse them. Blocks meanwhile. Raises ConfigError. `endpoint`:
    another hub than the environment's."""
    if not is_offline:
        check_configuration(_snapshot(model_id, False, endpoint, allow_patterns=list(_CONFIGURATION)))
    folder = _snapshot(model_id, is_offline, endpoint, ignore_patterns=list(NOT_WANTED))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the hub's model '{model_id}' has no config.json", param="model")
    return folder


def _snapshot(
    model_id: str,
    is_offline: bool,
    endpoint: str | None,
    *,
    allow_patterns: list[str] | None = None,
    ignore_patterns: list[str] | None = None,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(
            snapshot_download(
                model_id,
                local_files_only=is_offline,
                endpoint=endpoint,
                etag_timeout=CONTACT_TIMEOUT_S,
                allow_patterns=allow_patterns,
                ignore_patterns=ignore_patterns,
            )
        )
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"no folder '{model_id}', and the hub has no such model, or does not show it to this user",
            param="model",
        ) from error
    except Exception as error:  # the exceptions of its HTTP client change with its version
        reason = "HF_HUB_OFFLINE is set" if is_offline else f"the hub cannot be reached: {_first_line(error)}"
        raise ConfigError(
            f"no folder '{model_id}', the hub's cache on this machine has no complete copy, and {reason}",
            param="model",
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
