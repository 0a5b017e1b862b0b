"""The bound that instructions set: bytes a second that a launch could read if nothing but the issue of its
instructions took time, on an H100. Every multiprocessor issues four warp-instructions a clock, and its pipes
take fewer of their kinds; the slowest counts. Latencies, waits and the memory are left out, so a kernel reads
less than that. Compiled, not measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

PROCESSORS, CLOCK = 132, 1.7e9  # of an H100
# Warp-instructions a clock and multiprocessor of compute capability 9.0: results a clock as we know them from
# the CUDA programming guide (arithmetic instructions), divided by 32. Of loads, stores and shuffles, those of
# 4 bytes a lane; of `tensor`, products of 16 bits at the rate of `mma` (1,024 multiplications a clock), and
# twice that of `wgmma`.
RATES = {
    "issue": 4.0, "ALU": 2.0, "FMA": 4.0, "IMAD": 2.0, "conversions": 2.0, "functions": 0.5, "LDS": 1.0,
    "LDG": 1.0, "tensor": 1.0,
}  # fmt: skip
CONVERSIONS = r"F2F|F2FP|I2F|I2FP|F2I|I2I|HADD2\.F32"
_PIPES = (
    ("functions", r"MUFU|POPC|FLO|BREV"),
    ("conversions", CONVERSIONS),
    ("FMA", r"FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2"),
    ("IMAD", r"IMAD"),
    ("LDS", r"LDS|LDSM|STS|STSM|SHFL|ATOMS"),
    ("LDG", r"LDG|LDGSTS|STG|LD\b|ST\b|RED|ATOM"),
    ("tensor", r"HMMA|IMMA|QMMA|HGMMA|DMMA"),
    ("ALU", r"LOP3|SHF|PRMT|IADD|VIADD|ISETP|SEL|FSEL|FSETP|LEA|VIMNMX|IMNMX|FMNMX|PLOP3|MOV|SGXT|BMSK|IABS|"
            r"HSETP2|HMNMX2"),
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a launch does. reads: bytes of its matrices. programs: that read some. trips: of the inner loop,
    by one program."""

    reads: int
    programs: int
    trips: int


def clocks(code: list[str]) -> dict[str, float]:
    """Returns how long each pipe of a multiprocessor takes for one warp that runs the code once."""
    found: defaultdict[str, float] = defaultdict(float)
    for text in code:
        name = re.sub(r"^@!?U?P\w+\s+", "", text)
        found["issue"] += 1 / RATES["issue"]
        for pipe, pattern in _PIPES:
            if re.match(rf"(?:{pattern})", name):
                found[pipe] += _weight(pipe, name) / RATES[pipe]
                break
    return found


def _weight(pipe: str, name: str) -> float:
    if pipe == "tensor":
        if shape := re.match(r"HGMMA\.64x(\d+)x16", name):
            return 64 * int(shape[1]) * 16 / 2048 / 4  # one instruction of four warps
        return 2 if re.match(r"HMMA\.16816", name) else 1
    if pipe not in ("LDS", "LDG"):
        return 1
    if matrices := re.search(r"\.M88\.?(\d)?", name):
        return int(matrices[1] or 1)
    width = re.search(r"\.(64|128)\b", name)
    return int(width[1]) / 32 if width else 1


def bound(work: Work, body: list[str], rest: list[str], warps: int) -> str:
    """Returns GB/s, and the pipe that sets them if it is not the issue itself. body: of the inner loop; rest:
    what runs once."""
    inner, outer = clocks(body), clocks(rest)
    total = {pipe: warps * (inner[pipe] * work.trips + outer[pipe]) for pipe in RATES}
    pipe = max(total, key=lambda each: total[each])
    seconds = total[pipe] * work.programs / PROCESSORS / CLOCK
    return f"{work.reads / seconds / 1e9:,.0f}" + ("" if pipe == "issue" else f" ({pipe})")
