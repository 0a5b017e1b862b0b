"""Tables from the records of `lanes`, `hidden` and `accuracy`. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from bench.records import Record
from bench.tables import grouped, head, median, paired_ratio

HIDDEN_MODES = ("pipelined", "after prefill", "recomputed")


def lane_table(records: Iterable[Record]) -> list[str]:
    cells = grouped(records, "num_blocks", "agent", "codec")
    lines = head("blocks of 16 KiB", "agent", "codec", "MB", "ms", "GB/s of raw KV", "÷ memcpy")
    for (count, agent, codec), cell in cells.items():
        took_s = median(cell, "seconds")
        ratio = paired_ratio(cell, cells[count, "memcpy", "raw"], itemgetter("seconds"))
        lines.append(
            f"| {count} | {agent} | {codec} | {cell[0]['bytes'] / 1e6:.2f} | {1e3 * took_s:.2f} | "
            f"{cell[0]['raw_bytes'] / took_s / 1e9:.2f} | {ratio:.2f} |"
        )
    return lines


def hidden_table(records: Iterable[Record]) -> list[str]:
    cells = grouped(records, "prompt_tokens", "link_gb_per_s", "mode")
    lines = head(
        "prompt", "link GB/s", "KV MB", "shows ms: pipelined · after", "hidden",
        "TTFT ms: pipelined · after · recomputed", "second token ms: the same", "recomputed: KV sent",
    )  # fmt: skip
    for length, link in dict.fromkeys(key[:2] for key in cells):
        pipelined, late, recomputed = (cells[length, link, mode] for mode in HIDDEN_MODES)
        shows = [median(each, "shows_s") for each in (pipelined, late)]
        share = statistics.median(
            1 - a["shows_s"] / b["shows_s"] for a, b in zip(pipelined, late, strict=True)
        )
        sent = median(recomputed, "bytes") / median(pipelined, "bytes")
        times = (
            " · ".join(f"{1e3 * median(cell, name):.0f}" for cell in (pipelined, late, recomputed))
            for name in ("ttft_s", "second_token_s")
        )
        lines.append(
            f"| {length} | {link:g} | {pipelined[0]['bytes'] / 1e6:.1f} | {1e3 * shows[0]:.1f} · {1e3 * shows[1]:.1f} | "
            f"{share:.0%} | {' | '.join(times)} | {sent:.0%} |"
        )
    return lines


def accuracy_table(records: Iterable[Record]) -> list[str]:
    """A row for each kind of prompts and task, and one for all tasks; figures of several codecs in the order
    of the header.
    """
    found = list(records)
    codecs = list(dict.fromkeys(record["codec"] for record in found))
    coded = [codec for codec in codecs if codec != "raw"]
    names = " · ".join(coded)
    lines = head(
        "prompts", "task", "prompt tokens", "coded: prompts · tokens", f"right of all: {' · '.join(codecs)}",
        f"lost, won: {names}", "positions", f"same token (others): {names}", f"same answer: {names}",
    )  # fmt: skip
    for prompts in dict.fromkeys(record["prompts"] for record in found):
        chosen = [record for record in found if record["prompts"] == prompts]
        tasks = list(dict.fromkeys(record["task"] for record in chosen))
        for name, members in [*((task, [task]) for task in tasks), ("all", tasks)]:
            sums = {
                codec: _sums(r for r in chosen if r["codec"] == codec and r["task"] in members)
                for codec in codecs
            }
            lines.append(f"| {prompts} | {name} | {_accuracy_cells(sums, coded)} |")
    return lines


def _accuracy_cells(sums: dict[str, Counter[str]], coded: Sequence[str]) -> str:
    """`sums`: by codec, with raw among them."""
    raw, others = sums["raw"], [sums[codec] for codec in coded]
    most = max(others, key=lambda one: one["coded_tokens"], default=raw)
    right = [str(one["right"]) for one in sums.values()]
    return " | ".join([
        f"{raw['prompt_tokens'] / raw['samples']:.0f}",
        f"{most['coded_prompts'] / raw['samples']:.0%} · {most['coded_tokens'] / raw['prompt_tokens']:.0%}",
        f"{' · '.join(right)} of {raw['samples']}",
        " · ".join(f"{one['lost']}, {one['won']}" for one in others),
        str(raw["positions"]),
        " · ".join(
            f"{one['same_top'] / raw['positions']:.2%} ({raw['positions'] - one['same_top']})" for one in others
        ),
        " · ".join(f"{one['same_answers'] / raw['samples']:.2%}" for one in others),
    ])  # fmt: skip


def _sums(records: Iterable[Record]) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in records:
        total.update({name: value for name, value in record.items() if isinstance(value, int)})
    return total
