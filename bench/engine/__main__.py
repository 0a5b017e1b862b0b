"""The commands: models, run, table, cpu, agree. See README.md."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import yaml

from bench.arguments import DTYPES, end_on_signals, numbers, parser_of, words
from bench.engine import report
from bench.engine.isa import ISAS, NATIVE
from bench.engine.models import CONFIGS, USUAL_MODELS, VISION_MODEL, write_models
from bench.engine.rows import ROWS, USUAL_ROWS
from bench.engine.run import run
from bench.engine.servers import OURS, PEERS, ROLES, Setup
from bench.engine.special import SPECIALS

NAMES = [*(row.name for row in ROWS), *SPECIALS]


def main() -> int:
    args = make_parser().parse_args()
    end_on_signals()
    try:
        return args.do(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    models = commands.add_parser("models", help="write the random-weight models")
    models.add_argument("folder", type=Path)
    models.add_argument("--names", type=words, default=[*USUAL_MODELS], help=f"of {','.join(CONFIGS)}")
    models.set_defaults(do=_models)
    runner = commands.add_parser("run", help="measure")
    _add_setup(runner)
    runner.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    usual = [*(row.name for row in USUAL_ROWS), *SPECIALS]
    runner.add_argument("--rows", type=words, default=usual, help=f"of {','.join(NAMES)}")
    runner.add_argument("--concurrency", type=numbers, default=[1, 4, 16])
    runner.add_argument("--repeat", type=int, default=3)
    runner.add_argument("--without-ours", action="store_true", help="peers only")
    runner.set_defaults(do=_run)
    agree = commands.add_parser("agree", help="do the servers answer like transformers in float32?")
    _add_setup(agree)
    agree.add_argument("--model", choices=[*CONFIGS], default=VISION_MODEL)
    agree.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the servers")
    agree.set_defaults(do=_agree)
    table = commands.add_parser("table", help="results as Markdown")
    table.add_argument("results", type=Path, nargs="+")
    table.set_defaults(do=_table)
    cpu = commands.add_parser("cpu", help="CPU seconds per 1,000 generated tokens, by role, as Markdown")
    cpu.add_argument("results", type=Path, nargs="+")
    cpu.set_defaults(do=_cpu)
    return parser


def _add_setup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, required=True, help="what `models` wrote; GGUF files beside them")
    parser.add_argument("--peers", type=_peers, default={}, help=",".join(f"{name}=PATH" for name in PEERS))
    parser.add_argument("--isa", choices=ISAS, default=NATIVE, help="what all servers may use of the CPU")
    parser.add_argument("--work", type=Path, help="logs and configuration files; default: a new folder")
    parser.add_argument("--cores", type=numbers, default=sorted(os.sched_getaffinity(0)))
    parser.add_argument(
        "--threads", type=numbers, help="our encode, prefill and decode; default, or 0: the pool's own"
    )
    parser.add_argument("--roles", type=words, default=list(ROLES), help="of our workers, one of each")
    parser.add_argument(
        "--settings",
        type=yaml.safe_load,
        default={},
        help="of our cluster: {scheduling: {prompt_pause_s: 0.01}}",
    )
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")


def _setup(args: argparse.Namespace) -> Setup:
    work = args.work or Path(tempfile.mkdtemp(prefix="bench-engine-"))
    print(f"logs: {work}", flush=True)
    encode, prefill, decode = args.threads or (0, 0, 0)
    return Setup(
        models=args.dir.resolve(),
        work=work.resolve(),
        cores=tuple(args.cores),
        port=args.port,
        peers=args.peers,
        threads=(encode, prefill, decode),
        dtype=getattr(args, "dtype", "bfloat16"),
        isa=args.isa,
        roles=tuple(args.roles),
        settings=args.settings,
    )


def _models(args: argparse.Namespace) -> int:
    if unknown := sorted(set(args.names).difference(CONFIGS)):
        raise SystemExit(f"no such models: {', '.join(unknown)}; known are {', '.join(CONFIGS)}")
    print(*write_models(args.folder, args.names), sep="\n")
    return 0


def _run(args: argparse.Namespace) -> int:
    if unknown := sorted(set(args.rows).difference(NAMES)):
        raise SystemExit(f"no such rows: {', '.join(unknown)}; known are {', '.join(NAMES)}")
    servers = [*([] if args.without_ours else [OURS]), *args.peers]
    if not servers:
        raise SystemExit("nothing to measure")
    run(
        _setup(args),
        args.out,
        names=args.rows,
        servers=servers,
        concurrencies=args.concurrency,
        repeat=args.repeat,
        seed=args.seed,
    )
    print(report.table(report.read([args.out])))
    return 0


def _agree(args: argparse.Namespace) -> int:
    from bench.engine.agree import agree

    return agree(_setup(args), args.model, [OURS, *args.peers], args.seed)


def _table(args: argparse.Namespace) -> int:
    print(report.table(report.read(args.results)))
    return 0


def _cpu(args: argparse.Namespace) -> int:
    print(report.cpu_table(report.read(args.results)))
    return 0


def _peers(text: str) -> dict[str, Path]:
    pairs = dict(pair.split("=", 1) for pair in text.split(","))
    if not set(pairs) <= set(PEERS):
        raise argparse.ArgumentTypeError(f"peers are {', '.join(PEERS)}")
    return {name: Path(command).absolute() for name, command in pairs.items()}


if __name__ == "__main__":
    sys.exit(main())
