"""An encoder whose items are preprocessed in processes of their own."""

from __future__ import annotations

import os
import random
import signal

from bench.workload import Reference, make_case
from tests.flow.local_cluster import local_cluster
from tests.flow.test_law import MODEL, cluster_args

MAX_TOKENS = 8


async def test_answers_equal_generate_also_after_the_processes_were_killed():
    args, reference = cluster_args(48), Reference(MODEL)
    args = args.model_copy(update={"encode": args.encode.model_copy(update={"prepare_processes": 2})})
    async with local_cluster(args) as cluster:
        preprocessors = cluster.encoders[0].encoder.preprocessors
        for number, kind in enumerate(("image", "video", "audio", "image", "video")):
            if number == 2:
                assert preprocessors is not None and preprocessors.server.process is not None
                os.kill(preprocessors.server.process.pid, signal.SIGKILL)
            case = make_case(random.Random(number), kind)
            answer = reference.answer(case, MAX_TOKENS)
            assert await cluster.answer(case, MAX_TOKENS) == (answer.text, len(answer.token_ids))
