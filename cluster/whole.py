"""One worker process with both halves of the model, on one device: an encoder (`encoder_service`) beside a
language engine (`cluster.engine`). What it encodes for its own prompts stays in the process
(`OwnEmbeddings`); it may encode for other workers, and compute prompts whose media others encode."""

from __future__ import annotations

from cluster.config.settings import ClusterArgs
from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from cluster.worker.process import LEASE_MARGIN_S
from decode_service.service import DecodeService
from encoder_service.service import Encoder


class EncodePrefillService(LanguageWorker):
    """Sends the KV of its prompts to the workers that generate the answers."""

    def __init__(self, args: ClusterArgs, replica_id: str, *, lease_margin_s: float = LEASE_MARGIN_S):
        super().__init__(args, replica_id, Role.ENCODE_PREFILL, lease_margin_s, Encoder.load)


class WholeService(DecodeService):
    """Generates answers, too."""

    role = Role.WHOLE

    def __init__(self, args: ClusterArgs, replica_id: str, *, lease_margin_s: float = LEASE_MARGIN_S):
        super().__init__(args, replica_id, lease_margin_s=lease_margin_s, load_encoder=Encoder.load)
