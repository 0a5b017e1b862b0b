"""What a call depends on besides its request's body. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.text.defaults import GenerationDefaults
from router.api.fields import MAX_PRIORITY
from router.http.limits import Limits
from router.served_models import ServedModels

ANY = Limits(min_priority=-MAX_PRIORITY)  # for calls that no model will serve


@dataclass(frozen=True)
class CallContext:
    """`tenant`: the client, by its credentials."""

    models: ServedModels
    defaults: GenerationDefaults
    tenant: str = ""
    trace_parent: str = ""
    limits: Limits = ANY
