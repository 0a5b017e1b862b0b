"""Endpoints of OpenAI's API that this server does not have, and what it has in their place. They are refused
with 404, as unknown paths are, but by name. 501, which other servers send, is a status that clients retry.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request

from cluster.errors import RequestError, UnsupportedError

_HAS = (
    "This server generates text: /v1/responses, /v1/chat/completions, /v1/messages, /v1/completions and, "
    "for models that take sound, /v1/audio/transcriptions"
)
_ABSENT = {
    "/v1/embeddings": "embeddings",
    "/v1/score": "scores",
    "/score": "scores",
    "/v1/rerank": "ranking",
    "/rerank": "ranking",
    "/v1/moderations": "moderation",
    "/v1/images/generations": "image generation",
    "/v1/images/edits": "image generation",
    "/v1/audio/speech": "speech generation",
    "/v1/audio/translations": "translation of sound, as no `door.translation_instruction` is set",
}
_STORED = "/v1/responses/{response_id}/input_items"


class AbsentEndpointError(RequestError):
    status = 404
    code = "unsupported_endpoint"


def mount_absent(api: FastAPI) -> None:
    for path in _ABSENT:
        api.add_api_route(path, _refuse, methods=["POST"], include_in_schema=False)
    api.add_api_route(_STORED, _refuse_stored, methods=["GET"], include_in_schema=False)


async def _refuse(request: Request) -> None:
    path = request.url.path
    raise AbsentEndpointError(f"{path} is not served: no {_ABSENT[path]}. {_HAS}")


async def _refuse_stored(request: Request) -> None:
    raise UnsupportedError(
        f"{request.url.path[:200]}: this server stores no inputs; send the whole conversation as `input`",
        param="response_id",
    )
