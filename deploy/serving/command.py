"""The command `epdg`: `epdg serve [CONFIG]` runs a cluster on this machine until Ctrl-C, `epdg ask QUESTION
[FILE …]` asks a running one, `epdg key NAME` makes an API key. Every failure is one line on stderr."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.config.environment import read_environment
from cluster.config.keys import key_entry, new_key
from cluster.config.settings import REPOSITORY
from cluster.errors import ConfigError, RequestError
from deploy.serving.ask import ask
from deploy.serving.launch import LocalCluster
from deploy.serving.status import ClusterFailed
from deploy.serving.welcome import DEFAULT_URL, welcome

DEFAULT_CONFIG = REPOSITORY / "deploy" / "cluster.yaml"
DESCRIPTION = (
    "A serving cluster for multimodal language models with separate processes for encode, prefill, decode "
    "and generate."
)
SERVE = """Run a cluster on this machine until Ctrl-C.

Settings, the model folder, memory and the port are checked before anything starts. A failure prints one line
and the path of the logs. EPDG_MODEL names another model: a folder, or an id on the Hugging Face hub
("org/name"), which is downloaded."""
ASK = """Send one question, with files if there are any, to a running server. Prints the answer while it
comes. EPDG_API_KEY is sent as the API key."""

KEY = """Make an API key and print it, once, with the entry for the file that door.access.key_file names. The
file has no key, only hashes. Limits and rights are added to the entry by hand: docs/api.md, Keys."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="epdg", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run a cluster on this machine",
        description=SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "config",
        nargs="?",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="CONFIG",
        help="Serve configuration (default: %(default)s)",
    )
    question = commands.add_parser("ask", help="ask a running server", description=ASK)
    question.add_argument("question", metavar="QUESTION")
    question.add_argument("files", nargs="*", type=Path, metavar="FILE", help="image, video or sound")
    question.add_argument("--url", default=DEFAULT_URL, help="of the server (default: %(default)s)")
    key = commands.add_parser("key", help="make an API key", description=KEY)
    key.add_argument("name", metavar="NAME", help="the tenant: letters, digits, '.', '_' and '-'")
    chosen = parser.parse_args(arguments)
    if chosen.command == "ask":
        return print_answer(chosen.url.rstrip("/"), chosen.question, chosen.files)
    if chosen.command == "key":
        return make_key(chosen.name)
    return run_cluster(chosen.config.resolve())


def make_key(name: str) -> int:
    key = new_key()
    try:
        entry = key_entry(name, key)
    except ConfigError as error:
        _complain(str(error))
        return 1
    _say(f"key (not shown again):\n{key}\n\nentry for the key file:\n{entry.line()}")
    return 0


def print_answer(url: str, question: str, files: Sequence[Path]) -> int:
    """Blocks until the answer is complete; returns 1 after a failure."""
    try:
        for piece in ask(url, question, files, read_environment().api_key):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
        return 130
    except RequestError as error:
        _complain(str(error))
        return 1
    print()
    return 0


def run_cluster(config: Path) -> int:
    """Blocks until SIGINT or SIGTERM and returns 0; returns 1 after a failure."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    started_at = time.monotonic()
    try:
        with LocalCluster(config, say=_say) as cluster:
            _say(f"starting {config.name}; logs in {cluster.folder}")
            try:
                cluster.wait_ready()
                seconds = time.monotonic() - started_at
                _say(welcome(cluster.url, cluster.folder, seconds, cluster.modalities))
                cluster.wait_ended()
            except ClusterFailed as error:  # printed before the rest of the cluster is stopped
                _complain(f"{error} (logs: {cluster.folder})")
                raise
    except KeyboardInterrupt:
        _say("stopped")
        return 0
    except ConfigError as error:
        _complain(str(error))
    except ClusterFailed:
        pass
    return 1


def _complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
