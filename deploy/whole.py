"""One worker process with both halves of the model, on one device: an encoder (`encoder_service`) beside a
language engine (`cluster.engine`). What it encodes for its own prompts stays in the process
(`OwnEmbeddings`); it may encode for other workers, and compute prompts whose media others encode."""

from __future__ import annotations

from functools import partial

from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from decode_service.service import decode_worker
from encoder_service.service import Encoder

# It sends the KV of its prompts to the workers that generate the answers.
encode_prefill_worker = partial(LanguageWorker, Role.ENCODE_PREFILL, load_encoder=Encoder.load)
# It generates answers, too.
whole_worker = partial(decode_worker, role=Role.WHOLE, load_encoder=Encoder.load)
