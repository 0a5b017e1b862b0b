"""Command lines: what those of all commands have in common."""

from __future__ import annotations

import argparse
import signal
import sys

from bench import DEMO_MODEL

DTYPES = ("float32", "bfloat16")
DEFAULT_URL = "http://127.0.0.1:8000"


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """`doc`: of the module; it is the help, as it is written."""
    spec = sys.modules["__main__"].__spec__
    prog = None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=form)


def add_model(parser: argparse.ArgumentParser, text: str = "folder of the model") -> None:
    parser.add_argument("--model", default=str(DEMO_MODEL), help=text)


def add_dtype(parser: argparse.ArgumentParser, default: str, text: str | None = None) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default=default, help=text)


def numbers(text: str) -> list[int]:
    """Returns [1, 4] for "1,4"."""
    return [int(part) for part in text.split(",") if part]


def words(text: str) -> list[str]:
    return text.split(",")


def end_on_signals() -> None:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, after the cleaning up of `asyncio.run`; also in a shell's
    background job, which starts deaf to the first."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
