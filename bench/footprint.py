"""What an idle cluster costs: CPU and memory of each of its processes. Linux only.

    python -m bench.footprint --seconds 20

Serve's replicas of this application ("ours") and all other processes of the same Ray session ("Ray's own").
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def replicas() -> dict[int, str]:
    """pid → name of every Serve replica on this machine."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        match = re.match(r"ray::ServeReplica:[^:]*:(\w+)", command)
        if match:
            found[int(folder.name)] = match[1]
    return found


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_mib(pid: int) -> tuple[float, float]:
    """(proportional, unique) resident memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return sizes["Pss"] / 1024, (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    names = replicas()
    if not names:
        print("no Serve replicas run on this machine")
        return 1
    before = {pid: cpu_s(pid) for pid in names}
    time.sleep(args.seconds)
    total_ratio = 0.0
    print(f"{'process':10} {'% of a core':>12} {'PSS MiB':>9} {'USS MiB':>9}")
    for pid, name in sorted(names.items(), key=lambda item: item[1]):
        ratio = (cpu_s(pid) - before[pid]) / args.seconds
        total_ratio += ratio
        pss, uss = memory_mib(pid)
        print(f"{name:10} {100 * ratio:12.2f} {pss:9.0f} {uss:9.0f}")
    print(f"{'total':10} {100 * total_ratio:12.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
