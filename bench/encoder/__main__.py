"""Measurements of the encoder pool: speed, memory, many clients at once. See README.md.

    python -m bench.encoder models  DIR                                       writes omni-encoders, random weights
    python -m bench.encoder curve   --out R.jsonl --models MODEL …            encoder calls of 1 to 32 items
    python -m bench.encoder tower   --out R.jsonl --models MODEL …            one item, part by part
    python -m bench.encoder decoding --out R.jsonl                            files in processes of their own
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
    python -m bench.encoder table   R.jsonl …;  python -m bench.encoder plot R.jsonl … --out R.svg

`serve` starts a cluster on a free port. If a command follows (mixed … burst, without --url),
it runs that command and then stops the cluster; otherwise it serves until Ctrl-C. All commands but `models`
and `serve` append to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx

from bench import records
from bench.encoder import report
from bench.encoder.serving import num_cores, running, settings
from bench.records import Record
from cluster.errors import ClusterError

DEMO = str(Path(__file__).parents[2] / "deploy" / "demo_model")
DEFAULT_URL = "http://127.0.0.1:8000"
DTYPES = ("float32", "bfloat16")


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it otherwise
    try:
        measured = COMMANDS[args.command](args)
        if measured is not None:
            records.append(args.out, measured)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (RuntimeError, ClusterError, httpx.HTTPError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("models").add_argument("folder", type=Path)
    _add_engine_commands(commands)
    _add_server_commands(commands)
    _add_client_commands(commands)
    commands.add_parser("table").add_argument("files", nargs="+", type=Path)
    plot = commands.add_parser("plot")
    plot.add_argument("files", nargs="+", type=Path)
    plot.add_argument("--out", type=Path, required=True)
    return parser


def _add_engine_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    curve, tower = commands.add_parser("curve"), commands.add_parser("tower")
    for command, frames, sound_s in ((curve, 4, 5.0), (tower, 8, 10.0)):
        command.add_argument("--models", nargs="+", default=[DEMO], help="folders")
        command.add_argument("--modalities", type=_words, default=["image", "video", "audio"])
        command.add_argument("--side", type=int, default=224, help="of images and frames, pixels")
        command.add_argument("--frames", type=int, default=frames)
        command.add_argument("--sound-s", type=float, default=sound_s)
        command.add_argument(
            "--threads", type=int, default=max(1, num_cores() // 2), help="default: an encoder's"
        )
    curve.add_argument("--batches", type=_numbers, default=[1, 2, 4, 8, 16, 32])
    merge = commands.add_parser("merge")
    merge.add_argument("--rows", type=int, default=5000)
    merge.add_argument("--hidden-sizes", type=_numbers, default=[256, 2048, 4096])
    merge.add_argument("--threads", type=int, default=num_cores())
    overlap = commands.add_parser("overlap")
    overlap.add_argument("--model", default=DEMO)
    overlap.add_argument("--prompts", type=_numbers, default=[512, 2048, 3500], help="tokens of text")
    decoding = commands.add_parser("decoding")
    decoding.add_argument("--model", default=DEMO)
    decoding.add_argument("--threads", type=int, default=max(1, num_cores() // 2), help="of the encoder")
    preparing = commands.add_parser("preparing")
    preparing.add_argument("--model", default=DEMO)
    preparing.add_argument("--processes", type=_numbers, default=[0, 1, 2, 4, 8], help="0: threads")
    for command in (curve, tower, merge, decoding):
        command.add_argument("--dtype", choices=DTYPES, default="float32")
    for command in (curve, tower, merge, decoding, preparing, overlap):
        _add_results(command)
    accuracy = commands.add_parser("accuracy")
    accuracy.add_argument("--samples", type=int, default=200, help="of each task")
    _add_output(accuracy)


def _add_server_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve")
    serve.add_argument("--model", default=DEMO)
    serve.add_argument("--dtype", choices=DTYPES, default="float32")
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


def _add_client_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mixed = commands.add_parser("mixed")
    mixed.add_argument("--text-requests", type=int, default=31)
    mixed.add_argument("--text-words", type=int, default=64)
    mixed.add_argument("--threads", type=int, default=num_cores(), help="of the other server")
    reuse = commands.add_parser("reuse")
    reuse.add_argument("--images", type=int, default=4)
    reuse.add_argument("--image-side", type=int, default=448)
    single, flood = commands.add_parser("single"), commands.add_parser("flood")
    flood.add_argument("--side", type=int, default=448)
    for command in (mixed, flood):
        command.add_argument("--model", default=DEMO, help="that the cluster serves")
        command.add_argument(
            "--dtype", choices=DTYPES, default="float32", help="that the cluster computes in"
        )
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


def _curve(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.curve import Sizes, measure
    from cluster.types.media import Modality

    sizes = Sizes(args.side, args.frames, args.sound_s)
    modalities = [Modality(name) for name in args.modalities]
    dtype = getattr(torch, args.dtype)
    for model in args.models:
        path = Path(model).resolve()
        yield from measure(path, dtype, sizes, modalities, args.batches, args.repeats, args.threads)


def _tower(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.curve import Sizes
    from bench.encoder.tower import measure
    from cluster.types.media import Modality

    sizes = Sizes(args.side, args.frames, args.sound_s)
    modalities = [Modality(name) for name in args.modalities]
    dtype = getattr(torch, args.dtype)
    for model in args.models:
        path = Path(model).resolve()
        yield from measure(path, dtype, sizes, modalities, args.repeats, args.threads)


def _decoding(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.decoding import measure

    return measure(Path(args.model).resolve(), getattr(torch, args.dtype), args.repeats, args.threads)


def _preparing(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.preparing import measure

    return measure(Path(args.model).resolve(), args.processes, args.repeats)


def _merge(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.merge import measure

    return measure(args.rows, args.hidden_sizes, getattr(torch, args.dtype), args.repeats, args.threads)


def _overlap(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.overlap import measure

    return asyncio.run(measure(args.model, args.prompts, args.repeats, args.seed))


def _accuracy(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.accuracy import measure

    return measure(Path(DEMO), args.samples, args.seed)


def _serve(args: argparse.Namespace) -> None:
    chosen = {"model": str(Path(args.model).resolve()), "dtype": args.dtype, **settings(args.set)}
    with running(chosen, {"Encode": args.encoders, "Door": args.doors}) as cluster:
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


def _mixed(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.mixed import BurstLoad, measure

    load = BurstLoad(args.text_requests, args.text_words, args.frames, args.frame_side)
    model = str(Path(args.model).resolve())
    return measure(args.url, model, args.dtype, load, args.repeats, args.seed, args.threads)


def _reuse(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.reuse import Media, measure

    media = Media(args.frames, args.frame_side, args.images, args.image_side)
    return measure(args.url, media, args.repeats, args.seed)


def _single(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.crowd import single

    return single(args.url, args.requests, args.frames, args.frame_side, args.repeats, args.seed)


def _flood(args: argparse.Namespace) -> Iterable[Record]:
    import torch

    from bench.encoder.crowd import flood

    dtype = getattr(torch, args.dtype)
    return flood(args.url, args.model, dtype, args.requests, args.side, args.repeats, args.seed)


def _burst(args: argparse.Namespace) -> Iterable[Record]:
    from bench.encoder.crowd import burst

    return burst(args.url or [DEFAULT_URL], args.images, args.texts, args.side, args.repeats, args.seed)


def _table(args: argparse.Namespace) -> None:
    print("\n".join(report.tables(records.read(args.files))))


def _plot(args: argparse.Namespace) -> None:
    args.out.write_text(report.plot(records.read(args.files)))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


COMMANDS = {
    "models": _models, "curve": _curve, "tower": _tower, "decoding": _decoding, "preparing": _preparing, "merge": _merge, "overlap": _overlap, "accuracy": _accuracy, "serve": _serve,
    "synchronous": _synchronous, "mixed": _mixed, "reuse": _reuse, "single": _single,
    "flood": _flood, "burst": _burst, "table": _table, "plot": _plot,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
