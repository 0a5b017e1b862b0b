"""Measurements of the encoder pool: speed, memory, many clients at once. See README.md.

    python -m bench.encoder models  DIR                                       writes omni-encoders, random weights
    python -m bench.encoder curve   --out R.jsonl --models MODEL …            encoder calls of 1 to 32 items
    python -m bench.encoder tower   --out R.jsonl --models MODEL …            one item, part by part
    python -m bench.encoder preparing --out R.jsonl                           items at once, by processes
    python -m bench.encoder merge   --out R.jsonl                             rows into a prompt's embeddings
    python -m bench.encoder overlap --out R.jsonl                             what a slow encoder hides
    python -m bench.encoder accuracy --out R.jsonl                            answers with fewer pixels, frames or rows
    python -m bench.encoder serve   --model MODEL [--doors 2] [--set NAME=VALUE …] [COMMAND …]
    python -m bench.encoder mixed   --out R.jsonl --url URL --model MODEL     beside a server that encodes in its step
    python -m bench.encoder reuse   --out R.jsonl --url URL                   later turns about the same media
    python -m bench.encoder single  --out R.jsonl --url URL                   one new video for 200 clients
    python -m bench.encoder flood   --out R.jsonl --url URL --model MODEL     200 images for one encoder
    python -m bench.encoder burst   --out R.jsonl --url URL …                 64 images and 16 texts
    python -m bench.encoder table   R.jsonl …

`serve` starts a cluster on a free port. If a command follows (mixed … burst, without --url),
it runs that command and then stops the cluster; otherwise it serves until Ctrl-C. All commands but `models`
and `serve` append to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx

from bench import DEMO_MODEL, records
from bench.arguments import (
    DEFAULT_URL,
    DTYPES,
    add_dtype,
    add_model,
    end_on_signals,
    numbers,
    parser_of,
    words,
)
from bench.clusters import configuration, running, settings
from bench.encoder import report
from bench.records import Record
from cluster.errors import ClusterError

Commands = argparse._SubParsersAction


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    end_on_signals()
    try:
        measured = COMMANDS[args.command](args)
        if measured is not None:
            records.append(args.out, measured)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (RuntimeError, LookupError, ClusterError, httpx.HTTPError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("models").add_argument("folder", type=Path)
    _add_engine_commands(commands)
    _add_server_commands(commands)
    _add_client_commands(commands)
    commands.add_parser("table").add_argument("files", nargs="+", type=Path)
    return parser


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _add_engine_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    curve, tower = commands.add_parser("curve"), commands.add_parser("tower")
    for command, frames, sound_s in ((curve, 4, 5.0), (tower, 8, 10.0)):
        command.add_argument("--models", nargs="+", default=[str(DEMO_MODEL)], help="folders")
        command.add_argument("--modalities", type=words, default=["image", "video", "audio"])
        command.add_argument("--side", type=int, default=224, help="of images and frames, pixels")
        command.add_argument("--frames", type=int, default=frames)
        command.add_argument("--sound-s", type=float, default=sound_s)
        threads = max(1, _num_cores() // 2)
        command.add_argument("--threads", type=int, default=threads, help="default: an encoder's")
        add_dtype(command, "float32")
    curve.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32])
    merge = commands.add_parser("merge")
    merge.add_argument("--rows", type=int, default=5000)
    merge.add_argument("--hidden-sizes", type=numbers, default=[256, 2048, 4096])
    merge.add_argument("--threads", type=int, default=_num_cores())
    add_dtype(merge, "float32")
    overlap, preparing = commands.add_parser("overlap"), commands.add_parser("preparing")
    overlap.add_argument("--prompts", type=numbers, default=[512, 2048, 3500], help="tokens of text")
    preparing.add_argument("--processes", type=numbers, default=[0, 1, 2, 4, 8], help="0: threads")
    for command in (overlap, preparing):
        add_model(command)
    for command in (curve, tower, merge, preparing, overlap):
        _add_results(command)
    accuracy = commands.add_parser("accuracy")
    accuracy.add_argument("--samples", type=int, default=200, help="of each task")
    _add_output(accuracy)


def _add_server_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve")
    add_model(serve)
    add_dtype(serve, "float32")
    serve.add_argument("--encoders", type=int, default=1)
    serve.add_argument("--doors", type=int, default=1)
    serve.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the cluster"
    )
    serve.add_argument("then", nargs=argparse.REMAINDER, metavar="COMMAND …")
    synchronous = commands.add_parser("synchronous")  # `mixed` starts it
    synchronous.add_argument("--model", required=True)
    synchronous.add_argument("--dtype", choices=DTYPES, required=True)
    synchronous.add_argument("--port", type=int, required=True)
    synchronous.add_argument("--threads", type=int, required=True)


def _add_client_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    mixed = commands.add_parser("mixed")
    mixed.add_argument("--text-requests", type=int, default=31)
    mixed.add_argument("--text-words", type=int, default=64)
    mixed.add_argument("--threads", type=int, default=_num_cores(), help="of the other server")
    reuse = commands.add_parser("reuse")
    reuse.add_argument("--images", type=int, default=4)
    reuse.add_argument("--image-side", type=int, default=448)
    single, flood = commands.add_parser("single"), commands.add_parser("flood")
    flood.add_argument("--side", type=int, default=448)
    for command in (mixed, flood):
        add_model(command, "that the cluster serves")
        add_dtype(command, "float32", "that the cluster computes in")
    for command in (mixed, reuse, single):
        command.add_argument("--frames", type=int, default=16, help="of a video, two a second")
        command.add_argument("--frame-side", type=int, default=224)
    for command in (single, flood):
        command.add_argument("--requests", type=int, default=200)
    burst = commands.add_parser("burst")
    burst.add_argument("--images", type=int, default=64)
    burst.add_argument("--texts", type=int, default=16)
    burst.add_argument("--side", type=int, default=224)
    burst.add_argument("--url", action="append", help="several times: in turn")
    _add_results(burst)
    for command in (mixed, reuse, single, flood):
        command.add_argument("--url", default=DEFAULT_URL)
        _add_results(command)


def _add_results(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    parser.add_argument("--repeats", type=int, default=5)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    parser.add_argument("--seed", type=int, default=0, help="of texts and media")


def _models(args: argparse.Namespace) -> None:
    from bench.encoder.models import write_model

    print(write_model(args.folder))


def _encoder_alone(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder import curve, tower
    from cluster.types.media import Modality

    sizes = curve.Sizes(args.side, args.frames, args.sound_s)
    asked = (getattr(torch, args.dtype), sizes, [Modality(name) for name in args.modalities])
    for model in args.models:
        path = Path(model).resolve()
        if args.command == "curve":
            yield from curve.measure(path, *asked, args.batches, args.repeats, args.threads)
        else:
            yield from tower.measure(path, *asked, args.repeats, args.threads)


def _preparing(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.preparing import measure

    return measure(Path(args.model).resolve(), args.processes, args.repeats)


def _overlap(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.overlap import measure

    return asyncio.run(measure(args.model, args.prompts, args.repeats, args.seed))


def _accuracy(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.accuracy import measure

    return measure(DEMO_MODEL, args.samples, args.seed)


def _serve(args: argparse.Namespace) -> None:
    if args.then:
        make_parser().parse_args(args.then)  # what is wrong with it is said before a cluster starts
    chosen = {"model": str(Path(args.model).resolve()), "dtype": args.dtype, **settings(args.set)}
    with running(configuration(chosen, {"Encode": args.encoders, "Door": args.doors})) as cluster:
        print(f"{cluster.url}   (Ctrl-C stops it)", flush=True)
        if args.then:
            sys.exit(main([*args.then, "--url", cluster.url]))
        while not cluster.has_ended():
            time.sleep(0.5)
        raise RuntimeError(f"the cluster has ended:\n{cluster.log_end()}")


def _synchronous(args: argparse.Namespace) -> None:
    import torch

    from bench.encoder.synchronous import serve
    from cluster.config.environment import read_environment
    from cluster.config.resolution import resolve
    from cluster.config.settings import ClusterArgs

    given = ClusterArgs.model_validate({"model": args.model, "dtype": args.dtype})
    resolved = resolve(given, read_environment(), num_cores=args.threads)
    serve(resolved, getattr(torch, args.dtype), args.port, args.threads)


def _merge(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.merge import measure

    dtype = getattr(torch, args.dtype)
    return measure(args.rows, args.hidden_sizes, dtype, args.repeats, args.threads)


def _mixed(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.mixed import BurstLoad, measure

    load = BurstLoad(args.text_requests, args.text_words, args.frames, args.frame_side)
    model = str(Path(args.model).resolve())
    return measure(args.url, model, args.dtype, load, args.repeats, args.seed, args.threads)


def _reuse(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.reuse import Media, measure

    media = Media(args.frames, args.frame_side, args.images, args.image_side)
    return measure(args.url, media, args.repeats, args.seed)


def _crowd(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.crowd import burst, flood, single

    if args.command == "burst":
        return burst(args.url or [DEFAULT_URL], args.images, args.texts, args.side, args.repeats, args.seed)
    if args.command == "single":
        return single(args.url, args.requests, args.frames, args.frame_side, args.repeats, args.seed)
    dtype = getattr(torch, args.dtype)
    return flood(args.url, args.model, dtype, args.requests, args.side, args.repeats, args.seed)


def _table(args: argparse.Namespace) -> None:
    print("\n".join(report.tables(records.read(args.files))))


COMMANDS = {
    "models": _models,
    "curve": _encoder_alone,
    "tower": _encoder_alone,
    "preparing": _preparing,
    "overlap": _overlap,
    "accuracy": _accuracy,
    "serve": _serve,
    "synchronous": _synchronous,
    "mixed": _mixed,
    "reuse": _reuse,
    "single": _crowd,
    "flood": _crowd,
    "burst": _crowd,
    "merge": _merge,
    "table": _table,
}

if __name__ == "__main__":
    sys.exit(main())
