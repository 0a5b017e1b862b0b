"""What `epdg serve` prints when it is ready: the page, a command to try each modality, metrics and logs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from cluster.config.settings import REPOSITORY
from cluster.types.media import Modality

DEFAULT_URL = "http://127.0.0.1:8000"
EXAMPLES = REPOSITORY / "deploy" / "demo_model" / "examples"
QUESTIONS = {
    Modality.IMAGE: ("Describe the image.", "red_circle.png"),
    Modality.VIDEO: ("Which way does it move?", "moving_right.mp4"),
    Modality.AUDIO: ("What was said?", "seven.wav"),
}


def welcome(url: str, folder: Path, seconds: float, modalities: Collection[Modality]) -> str:
    """`folder`: the cluster's own. `modalities`: that the model takes."""
    tries = [("text", ask_command(url, "Count from 3 to 9."))]
    for modality, (question, name) in QUESTIONS.items():
        if modality in modalities:
            tries.append((modality.value, ask_command(url, question, EXAMPLES / name)))
    lines = [
        ("page", f"{url}/"),
        *tries,
        ("metrics", f"{url}/metrics"),
        ("logs", f"{folder}/serve.log, {folder}/ray/session_latest/logs"),
        ("dashboard", "Ray's; its address follows"),
    ]
    shown = "\n".join(f"    {name:<11}{text}" for name, text in lines)
    return f"ready in {seconds:.1f} s: {url}   (Ctrl-C stops it)\n\n{shown}\n"


def ask_command(url: str, question: str, *files: Path) -> str:
    """The command in the form in which it can be pasted into a shell in this folder."""
    program = _near(Path(sys.executable).parent / "epdg")
    words = [program, "ask", question, *map(_near, files)]
    return shlex.join(words if url == DEFAULT_URL else [*words, "--url", url])


def _near(path: Path) -> str:
    """Relative if it is below the present folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
