"""The names by which clients ask for the model of this cluster and for its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.errors import ModelNotFoundError


@dataclass(frozen=True)
class ServedModels:
    """What clients may give as `model`: the model, or one of its adapters, as `name` or `model:name`.

    adapters: digests by name."""

    model_id: str
    adapters: Mapping[str, str] = field(default_factory=dict)

    def adapter_of(self, name: str) -> str:
        """Returns the digest of the adapter that a client names; of the model itself: "". Raises
        ModelNotFoundError."""
        if name == self.model_id:
            return ""
        adapter = self.adapters.get(name) or self.adapters.get(name.removeprefix(f"{self.model_id}:"))
        if adapter is None:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist", param="model")
        return adapter
