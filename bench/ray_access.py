"""What is needed to ask Ray's own HTTP servers."""

from __future__ import annotations

from pathlib import Path


def ray_headers(folder: Path) -> dict[str, str]:
    """Headers of an HTTP request to the dashboard or an agent of the cluster in this folder."""
    return {"Authorization": f"Bearer {(folder / 'ray_token').read_text()}"}
