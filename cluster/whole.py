"""One worker process with both halves of the model, on one device: an encoder (`encoder_service`) beside a
language engine (`cluster.engine`). What it encodes for its own prompts stays in the process
(`OwnEmbeddings`); it may encode for other workers, and compute prompts whose media others encode."""

from __future__ import annotations

from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from decode_service.service import DecodeService
from encoder_service.service import Encoder


class EncodePrefillService(LanguageWorker):
    """Sends the KV of its prompts to the workers that generate the answers."""

    role = Role.ENCODE_PREFILL
    load_encoder = Encoder.load


class WholeService(DecodeService):
    """Generates answers, too."""

    role = Role.WHOLE
    load_encoder = Encoder.load
