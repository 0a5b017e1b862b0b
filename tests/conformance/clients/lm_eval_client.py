"""lm-eval-harness: log-probabilities of given choices (echo, token ids in batches) and free answers. That its
scores equal those over transformers is `bench.harness`'s affair."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from bench.harness import write_tasks
from tests.conformance.clients.asking import API, MODEL, equal, run

FOLDER = sys.argv[3]  # of the model: the harness makes token ids itself


def scores(task: str) -> Any:
    how = f"model={MODEL},base_url={API}/completions,tokenizer={FOLDER},tokenizer_backend=huggingface"
    with tempfile.TemporaryDirectory() as name:
        write_tasks(Path(name))
        tasks = TaskManager(include_path=name, include_defaults=False)
        found = lm_eval.simple_evaluate(
            "local-completions", model_args=f"{how},num_concurrent=2,max_length=1024", tasks=[task],
            task_manager=tasks, bootstrap_iters=0, batch_size=4, limit=12,
        )  # fmt: skip
    return found["results"][task]


async def log_probabilities() -> None:
    # the harness has an event loop of its own
    equal(0 <= (await asyncio.to_thread(scores, "choices"))["acc,none"] <= 1, True)
    equal((await asyncio.to_thread(scores, "texts"))["word_perplexity,none"] > 1, True)


if __name__ == "__main__":
    run("lm_eval", log_probabilities)
