"""`python -m bench.first_steps wrong|kinds|wheel`: prints a Markdown table; exit code 1 if something is not
as promised.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from bench.arguments import parser_of
from bench.first_steps import kinds, wheel, wrong
from bench.tables import head


def print_wrong(folder: Path) -> bool:
    is_right = True
    print(*head("what is wrong", "s", "CPU s", "Ray started", "line"), sep="\n")
    for case, ended, fault in wrong.run_all(folder):
        started = "yes" if ended.has_started_ray else "no"
        line = " / ".join(ended.errors).replace(str(folder), "…").replace("|", "\\|")
        fault_first = f"**{fault}** " if fault else ""
        print(
            f"| {case.name} | {ended.seconds:.1f} | {ended.cpu_seconds:.2f} | {started} | {fault_first}{line} |",
            flush=True,
        )
        is_right = is_right and not fault
    return is_right


def print_kinds(folder: Path) -> bool:
    print(*head("checkpoint", "ready after s", "notes", "answer"), sep="\n")
    for kind, ready, answer in kinds.run_all(folder):
        notes = "; ".join(line for line in ready.progress if "no encode pool" in line)
        print(f"| {kind} | {ready.seconds:.1f} | {notes} | {answer} |", flush=True)
    return True


def print_wheel(folder: Path) -> bool:
    size, ready, answer = wheel.run(folder)
    print(f"wheel of {size / 1e6:.1f} MB, ready after {ready.seconds:.1f} s, answered: {answer}")
    return True


STEPS = {"wrong": print_wrong, "kinds": print_kinds, "wheel": print_wheel}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("step", choices=STEPS)
    step = STEPS[parser.parse_args().step]
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    print(f"load average at the start: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores\n")
    with tempfile.TemporaryDirectory(prefix="first-steps-") as folder:
        return 0 if step(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
