"""Make the demo model from nothing, in one command:

    python -m deploy.demo_model.training.train --out deploy/demo_model

Stage A pretrains the vision and the audio encoder side by side, stages B and C train the whole model and
stages D to L the language model, each with one or two workers of one thread. The result is written in bf16
and measured on fresh samples. All of it follows from the seed.

The same command again goes on with a run that was killed: finished stages are kept, stages B to L go
on from their last checkpoint, stage A begins again.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from deploy.demo_model.training.evaluate import evaluate_folder, write_table
from deploy.demo_model.training.schedule import JOINT
from deploy.demo_model.training.words import training_words

LAST_STAGE = tuple(JOINT)[-1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def run_side_by_side(commands: dict[str, list[str]], work: Path) -> None:
    """Run modules of this package until all have ended; each writes its own log in `work`."""
    processes = {}
    for name, (module, *arguments) in commands.items():
        command = [sys.executable, "-m", f"deploy.demo_model.training.{module}", *arguments]
        with (work / f"{name}.log").open("a") as log:
            processes[name] = subprocess.Popen(command, stdout=log, env={**os.environ, **ENVIRONMENT})
    for name, process in processes.items():
        if process.wait() != 0:
            raise RuntimeError(f"{name} failed with exit code {process.returncode}")
        print(f"{name}: {(work / f'{name}.log').read_text().splitlines()[-1]}", flush=True)


def run_once(name: str, commands: dict[str, list[str]], work: Path) -> None:
    """Run a stage, unless it has ended before."""
    is_done = work / f"{name}.done"
    if not is_done.exists():
        run_side_by_side(commands, work)
        is_done.touch()


def main() -> None:
    """Pretrain, train, write, evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the shipped model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/demo_model_cache"), help="spoken words")
    parser.add_argument(
        "--work", type=Path, help="encoders, logs and checkpoints (default: inside the cache)"
    )
    parser.add_argument("--eval-seed", type=int, default=20261122)
    parser.add_argument(
        "--steps", type=int, default=0, help="a rehearsal: steps of each stage (0: the recipe)"
    )
    arguments = parser.parse_args()
    work = arguments.work or arguments.cache / f"run-{arguments.seed}"
    work.mkdir(parents=True, exist_ok=True)
    training_words(arguments.seed, arguments.cache)
    common = [f"--seed={arguments.seed}", f"--cache={arguments.cache}", f"--steps={arguments.steps}"]
    encoders = {
        which: ["pretrain", which, "--out", str(work / f"{which}.pt"), *common]
        for which in ("vision", "audio")
    }
    run_once("encoders", encoders, work)
    for stage in JOINT:
        out = arguments.out if stage == LAST_STAGE else work / stage
        (work / f"{stage}.meeting").unlink(missing_ok=True)
        paths = ["--work", str(work), "--out", str(out)]
        workers = {
            f"{stage}-{rank}": ["joint", stage, "--rank", str(rank), *paths, *common]
            for rank in range(JOINT[stage].num_workers)
        }
        run_once(stage, workers, work)
    num_samples = 4 if arguments.steps else 400
    table = evaluate_folder(arguments.out, arguments.eval_seed, arguments.cache, num_samples)
    write_table(table, arguments.out / "evaluation.json")


if __name__ == "__main__":
    main()
