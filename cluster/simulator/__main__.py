"""The cluster in virtual time. Nothing here measures a real one; `replay` compares with one that was
recorded.

python -m cluster.simulator run   --workload 4-image --layout 1,4,3 --rate 20 --policy joint
python -m cluster.simulator plan  --workload 4-image --slo-ttft-s 2 --slo-tpot-s 0.05 --gpus h200:8 [--svg plan.svg]
python -m cluster.simulator scale --replicas 1000 --requests 1000000
python -m cluster.simulator replay TRACE [--out records.jsonl]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.simulator.hardware import ACCELERATORS, MODELS
from cluster.simulator.layouts import Layout, workers
from cluster.simulator.overheads import measure
from cluster.simulator.plan_report import plan_plot, plan_table
from cluster.simulator.planner import plan
from cluster.simulator.recording import read
from cluster.simulator.replay import NUM_RUNS, replay, table
from cluster.simulator.results import Slo, fields
from cluster.simulator.scale import scale
from cluster.simulator.search import run_once
from cluster.simulator.workload import WORKLOADS
from router.policy import make_policy


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    try:
        return COMMANDS[args.command](args)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="one cluster at one rate")
    run.add_argument("--layout", type=_layout, default=Layout(1, 4, 3), help="encode,prefill,decode workers")
    run.add_argument("--accelerator", choices=ACCELERATORS, default="h200")
    run.add_argument("--rate", type=float, required=True, help="requests a second")
    run.add_argument("--policy", default="joint")
    planner = commands.add_parser("plan", help="how to divide GPUs among the phases")
    planner.add_argument(
        "--gpus", type=_devices, required=True, help=f"NAME:COUNT,… of {','.join(ACCELERATORS)}"
    )
    planner.add_argument("--svg", type=Path)
    again = commands.add_parser(
        "replay", help="a recorded live run (bench.router.live --record-for-simulator)"
    )
    again.add_argument("trace", type=Path)
    again.add_argument("--out", type=Path, help="every compared request, as a line of JSON")
    again.add_argument(
        "--recorded-placements", action="store_true", help="where and when the live door placed requests"
    )
    for command in (run, planner):
        command.add_argument("--workload", choices=WORKLOADS, required=True)
        command.add_argument("--model", choices=MODELS, default="vl-7b")
        command.add_argument("--slo-ttft-s", type=float, default=2.0)
        command.add_argument("--slo-tpot-s", type=float, default=math.inf)
    big = commands.add_parser("scale", help="how long a large cluster takes to simulate")
    big.add_argument("--replicas", type=int, default=1000)
    big.add_argument("--policy", default="joint")
    big.add_argument("--media", action="store_true", help="an image in every prompt; else text alone")
    for command, num_requests in ((run, 3000), (planner, 1500), (big, 1_000_000)):
        command.add_argument("--requests", type=int, default=num_requests)
        command.add_argument("--seed", type=int, default=0)
    return parser


def _run(args: argparse.Namespace) -> int:
    summary = run_once(
        workers(args.layout, MODELS[args.model], ACCELERATORS[args.accelerator]),
        lambda _: make_policy(args.policy),
        MODELS[args.model],
        WORKLOADS[args.workload],
        args.rate,
        args.requests,
        args.seed,
        Slo(args.slo_ttft_s, args.slo_tpot_s),
    )
    print(json.dumps(fields(summary), indent=2))
    return 0


def _plan(args: argparse.Namespace) -> int:
    slo = Slo(args.slo_ttft_s, args.slo_tpot_s)
    plans = plan(WORKLOADS[args.workload], slo, args.gpus, MODELS[args.model], args.requests, args.seed)
    print("\n".join(plan_table(plans)))
    if args.svg:
        args.svg.write_text(plan_plot(plans, f"{args.workload}: requests/s that keep the limits"))
    return 0


def _scale(args: argparse.Namespace) -> int:
    print(json.dumps(scale(args.replicas, args.requests, args.policy, args.media, args.seed), indent=2))
    return 0


def _replay(args: argparse.Namespace) -> int:
    recording = read(args.trace)
    overheads = measure(recording, [block for block in recording.blocks if block.repetition == 0])
    runs = (replay(recording, overheads, seed, args.recorded_placements) for seed in range(NUM_RUNS))
    found = [each for run in runs for each in run if each.is_compared]
    if args.out:
        args.out.write_text("".join(json.dumps(each.fields()) + "\n" for each in found))
    told = ", ".join(f"{name[:-2]} {1e3 * seconds:.2f}" for name, seconds in asdict(overheads).items())
    print(
        f"Overheads in ms, measured on the first repetition: {told}. Compared: the other repetitions, "
        f"simulated {NUM_RUNS} times.\n"
    )
    print("\n".join(table(found)))
    return 0


def _layout(text: str) -> Layout:
    return Layout(*(int(count) for count in text.split(",")))


def _devices(text: str) -> dict[str, int]:
    counts = {name: int(count) for name, count in (pair.split(":") for pair in text.split(","))}
    if unknown := set(counts) - set(ACCELERATORS):
        raise argparse.ArgumentTypeError(f"no such GPUs: {', '.join(sorted(unknown))}")
    return counts


COMMANDS = {"run": _run, "plan": _plan, "scale": _scale, "replay": _replay}

if __name__ == "__main__":
    sys.exit(main())
