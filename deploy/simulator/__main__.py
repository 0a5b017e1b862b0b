"""The cluster in virtual time. Nothing here measures a real one; `bench.router replay` compares with one
that was recorded.

python -m deploy.simulator run   --workload 4-image --layout 1,4,3 --rate 20 --policy joint
python -m deploy.simulator plan  --workload 4-image --slo-ttft-s 2 --slo-tpot-s 0.05 --gpus h200:8
    [--svg plan.svg] [--values FILE] [--config FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.simulator.hardware import ACCELERATORS, MODELS, WEIGHT_FORMATS, Model, in_format
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.plan_report import plan_config, plan_plot, plan_table, plan_values, size_lines
from deploy.simulator.planner import plan
from deploy.simulator.results import Slo, fields
from deploy.simulator.search import run_once
from deploy.simulator.workload import WORKLOADS
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
        prog="python -m deploy.simulator",
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
    planner.add_argument("--values", type=Path, help="a values file of deploy/chart for the best division")
    planner.add_argument("--config", type=Path, help="a Serve configuration for it, on one machine")
    for command in (run, planner):
        command.add_argument("--workload", choices=WORKLOADS, required=True)
        command.add_argument("--model", choices=MODELS, default="vl-7b")
        command.add_argument(
            "--weights", choices=WEIGHT_FORMATS, default="bf16", help="of the checkpoint's linears"
        )
        command.add_argument("--slo-ttft-s", type=float, default=2.0)
        command.add_argument("--slo-tpot-s", type=float, default=math.inf)
    for command, num_requests in ((run, 3000), (planner, None)):
        command.add_argument("--requests", type=int, default=num_requests)
        command.add_argument("--seed", type=int, default=0)
    return parser


def _run(args: argparse.Namespace) -> int:
    model = _model(args)
    summary = run_once(
        workers(args.layout, model, ACCELERATORS[args.accelerator]),
        lambda _: make_policy(args.policy),
        model,
        WORKLOADS[args.workload],
        args.rate,
        args.requests,
        args.seed,
        Slo(args.slo_ttft_s, args.slo_tpot_s),
    )
    print(json.dumps(fields(summary), indent=2))
    return 0


def _plan(args: argparse.Namespace) -> int:
    slo, model = Slo(args.slo_ttft_s, args.slo_tpot_s), _model(args)
    print("\n".join(size_lines(model, args.gpus)), end="\n\n")
    plans = plan(WORKLOADS[args.workload], slo, args.gpus, model, args.requests, args.seed)
    print("\n".join(plan_table(plans)))
    promise = f"99 % of first tokens within {slo.ttft_s:g} s, of times per token within {slo.tpot_s:g} s"
    if args.values:
        args.values.write_text(plan_values(plans[0], promise))
    if args.config:
        args.config.write_text(plan_config(plans[0], promise, model, _command(args)))
    if args.svg:
        args.svg.write_text(plan_plot(plans, f"{args.workload}: requests/s that keep the limits"))
    return 0


def _command(args: argparse.Namespace) -> str:
    gpus = ",".join(f"{name}:{count}" for name, count in args.gpus.items())
    requests = f"--requests {args.requests} " if args.requests else ""
    weights = "" if args.weights == "bf16" else f"--weights {args.weights} "
    return (
        f"python -m deploy.simulator plan --gpus {gpus} --model {args.model} {weights}"
        f"--workload {args.workload} "
        f"--slo-ttft-s {args.slo_ttft_s:g} --slo-tpot-s {args.slo_tpot_s:g} {requests}"
        f"--config {args.config}"
    )


def _model(args: argparse.Namespace) -> Model:
    return in_format(MODELS[args.model], args.weights)


def _layout(text: str) -> Layout:
    counts = [int(count) for count in text.split(",")]
    encode, prefill, decode, language, whole, encode_prefill = counts + [0] * (6 - len(counts))
    return Layout(encode, prefill, decode, language, whole, encode_prefill)


def _devices(text: str) -> dict[str, int]:
    counts = {name: int(count) for name, count in (pair.split(":") for pair in text.split(","))}
    if unknown := set(counts) - set(ACCELERATORS):
        raise argparse.ArgumentTypeError(f"no such GPUs: {', '.join(sorted(unknown))}")
    return counts


COMMANDS = {"run": _run, "plan": _plan}

if __name__ == "__main__":
    sys.exit(main())
