"""Which class or function makes the worker of each role: import paths, so that each process loads only what
it runs."""

from __future__ import annotations

from cluster.types.members import Role

SERVICES = {
    Role.ENCODE: "encoder_service.service:EncoderService",
    Role.PREFILL: "prefill_service.service:prefill_worker",
    Role.DECODE: "decode_service.service:decode_worker",
    Role.LANGUAGE: "decode_service.service:language_worker",
    Role.ENCODE_PREFILL: "deploy.whole:encode_prefill_worker",
    Role.WHOLE: "deploy.whole:whole_worker",
}
