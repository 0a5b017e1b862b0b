"""lm-eval-harness over HTTP and over transformers: the same scores for the same model.

Two tasks of 200 items that need no download: multiple choice, and the log-probability of whole texts. The
harness asks a running cluster (`local-completions`: echo, logprobs, token ids in batches) and the undivided
model in fp32 (`hf`); each log-probability of a choice and of a text is compared. The cluster must run in
float32 (`dtype: float32`). Needs an environment with `lm_eval[api]`, `accelerate` and transformers, which may
be another one than the cluster's. Exit status 1 if the scores differ.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.arguments import parser_of

NUM_ITEMS = 200
TOLERANCE = 1e-4  # of one token
COLOURS, SHAPES = ["red", "green", "blue", "yellow", "white"], ["circle", "square", "triangle", "cross"]
FIELDS = {"dataset_path": "json", "test_split": "test"}
TASKS: list[dict[str, Any]] = [
    {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    {
        "task": "texts",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[gold]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
]


def items() -> Iterator[dict[str, Any]]:
    draw = random.Random(7)
    for i in range(NUM_ITEMS):
        colour, shape, gold = draw.choice(COLOURS), draw.choice(SHAPES), draw.randrange(4)
        choices = draw.sample([other for other in COLOURS if other != colour], 3)
        choices.insert(gold, colour)
        question = (
            f"{i}: größe {draw.randrange(100)}. There is a {colour} {shape}. Which colour has it? It is"
        )
        yield {"question": question, "choices": choices, "gold": gold}


def write_tasks(folder: Path) -> None:
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()))
    for task in TASKS:
        whole = {**FIELDS, "dataset_kwargs": {"data_files": {"test": str(data)}}, **task}
        (folder / f"{task['task']}.yaml").write_text(json.dumps(whole))  # JSON is YAML


def of_transformers(model: str) -> Any:
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    whole = transformers.AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return HFLM(pretrained=whole, tokenizer=tokenizer, backend="causal", device="cpu", batch_size=1)


def scores(lm: Any, folder: Path, **how: Any) -> tuple[dict[str, Any], dict[str, list[list[Any]]]]:
    """The metrics, and what each choice or text of each item was worth."""
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    names = [task["task"] for task in TASKS]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    got = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0, **how)
    samples = {
        name: [sample["filtered_resps"] for sample in sorted(found, key=lambda sample: sample["doc_id"])]
        for name, found in got["samples"].items()
    }
    metrics = {
        name: {metric: value for metric, value in found.items() if isinstance(value, float)}
        for name, found in got["results"].items()
    }
    return metrics, samples


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="deploy/demo_model", help="folder of the model that is served")
    parser.add_argument("--model-id", help="its name at the cluster; default: the folder's name")
    args = parser.parse_args()
    model_id = args.model_id or Path(args.model).resolve().name
    served = (
        f"model={model_id},base_url={args.url}/v1/completions,tokenizer={args.model},"
        "tokenizer_backend=huggingface,num_concurrent=4,max_length=1024"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        wanted, expected = scores(of_transformers(args.model), folder)
        metrics, got = scores("local-completions", folder, model_args=served, batch_size=8)
    choices = list(_pairs(got["choices"], expected["choices"]))
    worst = max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in choices)
    num_flags = sum(str(ours[1]) != str(theirs[1]) for ours, theirs in choices)
    texts = list(zip(got["texts"], expected["texts"], strict=True))
    worst_text = max(abs(_number(ours) - _number(theirs)) for ours, theirs in texts)
    print(f"transformers: {wanted}\nthis cluster: {metrics}")
    print(f"choices: {len(choices)}, largest difference {worst:.1e}, {num_flags} greedy flags differ")
    print(f"texts: {len(texts)}, largest difference {worst_text:.1e} of a whole text")
    is_equal = metrics["choices"] == wanted["choices"] and num_flags == 0
    return 0 if is_equal and worst < TOLERANCE and worst_text < 100 * TOLERANCE else 1


def _pairs(ours: list[Any], theirs: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of (log-probability, whether it is the greedy answer)."""
    for one, other in zip(ours, theirs, strict=True):
        yield from zip(one, other, strict=True)


def _number(found: Any) -> float:
    while isinstance(found, list | tuple):
        found = found[0]
    return float(found)


if __name__ == "__main__":
    sys.exit(main())
