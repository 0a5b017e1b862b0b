"""The hand-over's speed on this machine, and what coded KV does to answers.

    python -m bench.transfer lanes  --out results.jsonl [--agents nixl,collective] [--codecs raw,int8,int4]
                                    [--blocks 16,64,256,1024] [--repeats 15]
    python -m bench.transfer hidden --out results.jsonl --model MODEL [--prompts 256,1024,4096,8192] [--links 1,10,50]
                                    [--repeats 3] [--codec raw]
    python -m bench.transfer accuracy --out results.jsonl [--model deploy/demo_model] [--samples 100] [--seed 20261122]
                                    [--codecs raw,int8,int4] [--prompts short,long] [--tasks TASK …]
    python -m bench.transfer cost [--against CHECKOUT]
    python -m bench.transfer table results.jsonl

`lanes` measures what `bench/transfer/lanes.py` describes, `hidden` what `hidden.py` does, with a model such
as text-0.5b of `python -m bench.engine models`, `accuracy` what `accuracy.py` does. These append to the file.
`cost` prints what `cost.py` describes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bench import DEMO_MODEL, records
from bench.arguments import numbers, parser_of, words
from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs

WORD_CACHE = Path(tempfile.gettempdir()) / "demo_model_cache"


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    lanes = commands.add_parser("lanes")
    lanes.add_argument("--agents", type=words, default="nixl,collective")
    lanes.add_argument("--codecs", type=words, default="raw,int8,int4")
    lanes.add_argument("--blocks", type=numbers, default="16,64,256,1024")
    lanes.add_argument("--repeats", type=int, default=15)
    hidden = commands.add_parser("hidden")
    hidden.add_argument("--model", required=True)
    hidden.add_argument("--prompts", type=numbers, default="256,1024,4096,8192")
    hidden.add_argument("--links", default="1,10,50", help="GB/s")
    hidden.add_argument("--repeats", type=int, default=3)
    hidden.add_argument("--codec", default="raw")
    accuracy = commands.add_parser("accuracy")
    accuracy.add_argument("--model", type=Path, default=DEMO_MODEL)
    accuracy.add_argument("--samples", type=int, default=100, help="of each task")
    accuracy.add_argument("--seed", type=int, default=20261122, help="of the evaluation set")
    accuracy.add_argument("--codecs", type=words, default="raw,int8,int4")
    accuracy.add_argument("--prompts", type=words, default="short,long")
    accuracy.add_argument("--tasks", nargs="+", help="default: all")
    accuracy.add_argument("--cache", type=Path, default=WORD_CACHE, help="spoken words")
    for command in (lanes, hidden, accuracy):
        command.add_argument("--out", type=Path, required=True)
    cost = commands.add_parser("cost")
    cost.add_argument("--against", type=Path, help="a checkout of another version")
    table = commands.add_parser("table")
    table.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    COMMANDS[arguments.command](arguments)


def _lanes(arguments: argparse.Namespace) -> None:
    from bench.transfer.lanes import lanes, measure

    with lanes(arguments.agents, arguments.codecs) as every:
        records.append(arguments.out, measure(every, arguments.blocks, arguments.repeats))


def _cost(arguments: argparse.Namespace) -> None:
    from bench.transfer.cost import report

    report(arguments.against)


def _hidden(arguments: argparse.Namespace) -> None:
    from bench.transfer.hidden import measure

    lengths = arguments.prompts
    num_blocks = 2 * max(lengths) // 16 + 16
    args = ClusterArgs.model_validate(
        {
            "model": arguments.model,
            "dtype": "bfloat16",
            "max_model_len": max(lengths) + 16,
            "prefill": {"kv_blocks": num_blocks, "feature_bytes": 0},
            "decode": {"kv_blocks": num_blocks},
            "door": {"first_token_timeout_s": 300.0},
            "transfer": {"codec": arguments.codec, "wire_tokens": max(lengths), "recompute": "auto"},
        }
    )
    links = [float(link) for link in arguments.links.split(",")]
    resolved = resolve(args, read_environment(), num_cores=len(os.sched_getaffinity(0)))
    records.append(arguments.out, asyncio.run(measure(resolved, lengths, links, arguments.repeats)))


def _accuracy(arguments: argparse.Namespace) -> None:
    from bench.transfer.accuracy import ModelHalves, measure
    from deploy.demo_model.training.evaluate import TASKS
    from deploy.demo_model.training.words import test_words
    from kv_transfer.codecs.quantisation import CODECS

    measured = measure(
        ModelHalves(arguments.model),
        test_words(arguments.seed, arguments.cache),
        arguments.seed,
        arguments.samples,
        _checked(arguments.codecs, ("raw", *CODECS)),
        _checked(arguments.prompts, ("short", "long")),
        _checked(arguments.tasks or list(TASKS), TASKS),
    )
    records.append(arguments.out, measured)


def _table(arguments: argparse.Namespace) -> None:
    from bench.transfer.report import accuracy_table, hidden_table, lane_table

    found = records.read(arguments.files)
    tables = {"lane": lane_table, "hidden": hidden_table, "accuracy": accuracy_table}
    by_kind = {kind: [record for record in found if record["type"] == kind] for kind in tables}
    print("\n\n".join("\n".join(tables[kind](some)) for kind, some in by_kind.items() if some))


def _checked(names: list[Any], known: Collection[str]) -> list[Any]:
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


COMMANDS = {
    "lanes": _lanes,
    "hidden": _hidden,
    "accuracy": _accuracy,
    "cost": _cost,
    "table": _table,
}

if __name__ == "__main__":
    main()
