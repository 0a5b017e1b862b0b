"""A run's records as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.chaos.recovery import STAGES
from bench.records import Record
from bench.tables import head, row

HEAD = (
    *("fault", "sent", "right", "wrong", "lost: open", "lost: later", "refused"),
    *("pause s", "TTFT s", "front away s"),
    *(f"{stage} s" for stage in STAGES),
    *("held", "processes"),
)


def tables(records: Sequence[Record]) -> str:
    """One table for each cluster, then every loss and every wrong answer."""
    lines: list[str] = []
    for cluster in dict.fromkeys(record["cluster"] for record in records):
        own = [record for record in records if record["cluster"] == cluster]
        lines += [
            f"\n{cluster}, {own[0]['concurrency']} requests at once\n",
            *head(*HEAD),
        ]
        lines += [row(_cells(record)) for record in own]
        lines += ["", *_details(own)]
    return "\n".join(lines)


def _cells(record: Record) -> list[str]:
    changed = ", ".join(f"{kind} {number:+}" for kind, number in record["processes"].items())
    return [
        record["fault"],
        *(str(record[name]) for name in ("sent", "right", "wrong", "lost_open", "lost_later", "refused")),
        f"{record['pause_s']:.2f}",
        f"{record['ttft_s']:.2f}",
        f"{record['front_away_s']:.1f}",
        *("" if (at := record["stages"].get(stage)) is None else f"{at:.1f}" for stage in STAGES),
        str(len(record["held"])),
        changed or "the same",
    ]


def _details(records: Sequence[Record]) -> list[str]:
    lines = []
    for record in records:
        losses = Counter(f"{loss['when']}: {loss['why']}" for loss in record["losses"])
        lines += [f"* {record['fault']}: {number} × {why}" for why, number in losses.most_common()]
        lines += [f"* {record['fault']}: WRONG {each}" for each in record["wrong_answers"]]
        lines += [f"* {record['fault']}: held {name} {value}" for name, value in record["held"].items()]
        lines += [f"* {record['fault']}: {note}" for note in record["notes"]]
    return lines
