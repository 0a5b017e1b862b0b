"""Tables from the records of all commands. Pure. Ratios are within a repetition; figures are medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import cast

from bench.records import Record
from bench.tables import grouped, head, median, paired_ratio
from deploy.simulator.results import percentile

SYSTEMS = ("cluster", "synchronous")
TIMES = ("video", "all", "text", "alone")  # means of a pair of bursts
MIB = 1 << 20


def tables(records: Sequence[Record]) -> list[str]:
    """Lines of Markdown: a table for every kind of record in the files, and where they were measured."""
    lines = []
    for kind, make in TABLES.items():
        found = [record for record in records if record["type"] == kind]
        if found:
            lines += [f"**{kind}** ({_origins(found)})", "", *make(found), ""]
    return lines


def curve_table(records: Iterable[Record]) -> list[str]:
    cells = grouped(records, "model", "million_parameters", "dtype", "threads", "modality", "batch")
    lines = head(
        "model", "M parameters", "dtype, threads", "modality", "items", "ms a batch", "ms an item", "÷ alone",
        "rows/s", "utilisation",
    )  # fmt: skip
    for key, cell in cells.items():
        model, size, dtype, threads, modality, batch = key
        alone = cells.get((*key[:-1], 1), cell)
        ratio = _ratio(cell, alone, lambda record: record["seconds"] / record["batch"])
        seconds = median(cell, "seconds")
        busy = statistics.median(record["cpu_s"] / record["seconds"] / threads for record in cell)
        lines.append(
            f"| {model} | {size:.0f} | {dtype}, {threads} | {modality} | {batch} | {1e3 * seconds:.1f} | "
            f"{1e3 * seconds / batch:.1f} | {ratio:.2f} | {cell[0]['rows'] / seconds:.0f} | {busy:.0%} |"
        )
    return lines


def tower_table(records: Iterable[Record]) -> list[str]:
    """Encoders against the one without any of our kernels."""
    cells = grouped(records, "model", "dtype", "threads", "modality", "part")
    lines = head("model", "dtype, threads", "modality", "part", "ms", "CPU ms", "CPU ÷ torch")
    for (*rest, part), cell in cells.items():
        model, dtype, threads, modality = rest
        torch_cell = cells.get((*rest, "encode, torch"), cell)
        ratio = f"{_ratio(cell, torch_cell, lambda r: r['cpu_s']):.2f}" if part.startswith("encode") else ""
        lines.append(
            f"| {model} | {dtype}, {threads} | {modality} | {part} | {1e3 * median(cell, 'seconds'):.1f} | "
            f"{1e3 * median(cell, 'cpu_s'):.1f} | {ratio} |"
        )
    return lines


def preparing_table(records: Iterable[Record]) -> list[str]:
    """Items at once by processes: the ratios are of items per second, to the threads of one process."""
    cells = grouped(records, "model", "kind", "processes")
    lines = head(
        "model", "item", "processes", "alone: items/s", "÷ threads", "encoded: items/s", "÷ threads",
        "lag p50, p99 ms",
    )  # fmt: skip
    for (*rest, number), cell in cells.items():
        model, kind = rest
        by_threads, num_items = cells[(*rest, 0)], cell[0]["items"]
        rates = [
            f"{num_items / median(cell, name):.1f} | {_ratio(by_threads, cell, itemgetter(name)):.2f}"
            for name in ("alone_s", "encoded_s")
        ]
        p50, p99 = (1e3 * median(cell, name) for name in ("lag_p50_s", "lag_p99_s"))
        way = number or "0 (threads)"
        lines.append(f"| {model} | {kind} | {way} | {' | '.join(rates)} | {p50:.2f}, {p99:.2f} |")
    return lines


def mixed_table(records: Iterable[Record]) -> list[str]:
    """For each load a row per system, then the cluster divided by the other."""
    lines = head(
        "load", "system", "TTFT ms: video", "mean of all", "text with it", "text without", "with ÷ without",
        "p99, text with it", "alike",
    )  # fmt: skip
    for (model, dtype, load), cell in grouped(records, "model", "dtype", "load").items():
        by_system = {system: [r for r in cell if r["system"] == system] for system in SYSTEMS}
        means = {system: _repetitions(found) for system, found in by_system.items()}
        label = f"{model} in {dtype}, {load}"
        for system, each in means.items():
            video, *others = (f"{1e3 * _middle(each.values(), name):.0f}" for name in (*TIMES, "p99"))
            slowdown = f"{_middle(each.values(), 'slowdown'):.2f}"
            lines.append(
                f"| {label} | {system} | {video} | {' | '.join([*others[:3], slowdown, others[3]])} | |"
            )
        ours, theirs = (means[system] for system in SYSTEMS)
        both = [
            {name: ours[idx][name] / theirs[idx][name] for name in TIMES} for idx in ours if idx in theirs
        ]
        ratios = " | ".join(f"{_middle(both, name):.2f}" for name in TIMES)
        lines.append(f"| {label} | ratio | {ratios} | | | {_num_alike(*by_system.values())} |")
    return lines


def _num_alike(ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """Number of answers that both systems gave alike."""
    others = {(record["burst"], record["repetition"]): record["answers"] for record in theirs}
    pairs = [
        pair
        for record in ours
        for pair in zip(
            record["answers"], others.get((record["burst"], record["repetition"]), ()), strict=False
        )
    ]
    return f"{sum(mine == its for mine, its in pairs)} of {len(pairs)}"


def _middle(found: Iterable[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in found)


def _repetitions(records: Sequence[Record]) -> dict[int, dict[str, float]]:
    """The repetitions of one system: means of each pair of bursts."""
    pairs: dict[int, dict[str, Record]] = {}
    for record in records:
        pairs.setdefault(record["repetition"], {})[record["burst"]] = record
    found = {}
    for repetition, pair in pairs.items():
        if len(pair) == 2:
            with_it, alone = _ttfts(pair["video"]), _ttfts(pair["text"])["text"]
            text, mean_alone = statistics.mean(with_it["text"]), statistics.mean(alone)
            found[repetition] = {
                "video": with_it["video"][0],
                "all": statistics.mean(pair["video"]["ttfts_s"]),
                "text": text,
                "alone": mean_alone,
                "slowdown": text / mean_alone,
                "p99": percentile(with_it["text"], 0.99),
            }
    return found


def _ttfts(record: Record) -> dict[str, list[float]]:
    """Times to first token, by kind of request."""
    found: dict[str, list[float]] = {}
    for kind, ttft_s in zip(record["kinds"], record["ttfts_s"], strict=True):
        found.setdefault(kind, []).append(ttft_s)
    return found


def reuse_table(records: Iterable[Record]) -> list[str]:
    cells = grouped(records, "model", "media", "turn")
    lines = head("model", "media", "turn", "prompt", "from prefix cache", "encoded", "TTFT ms", "cold ÷ it")
    for (model, media, turn), cell in cells.items():
        faster = _ratio(cells[model, media, "cold"], cell, lambda record: record["ttft_s"])
        lines.append(
            f"| {model} | {media} | {turn} | {median(cell, 'prompt_tokens'):.0f} | {_count(cell, 'prefix_tokens')} | "
            f"{_count(cell, 'items_encoded')} | {1e3 * median(cell, 'ttft_s'):.0f} | {faster:.2f} |"
        )
    return lines


def single_table(records: Iterable[Record]) -> list[str]:
    lines = head(
        "requests", "CPU s of each door", "encoded", "answered", "429", "failed", "different answers", "s"
    )
    for record in records:
        doors = " · ".join(f"{each:.1f}" for each in record["door_cpu_s"])
        lines.append(
            f"| {record['requests']} | {doors} | {_count([record], 'items_encoded')} | {_outcome(record)} | "
            f"{record['num_different']} | {record['seconds']:.1f} |"
        )
    return lines


def flood_table(records: Iterable[Record]) -> list[str]:
    lines = head(
        "requests", "answered", "429", "failed", "encoder MiB: idle", "peak", "grown", "budget", "within", "s"
    )
    for record in records:
        grown = record["peak_bytes"] - record["resident_bytes"]
        sizes = (record["resident_bytes"], record["peak_bytes"], grown, record["budget_bytes"])
        lines.append(
            f"| {record['requests']} | {_outcome(record)} | {' | '.join(f'{size / MIB:.0f}' for size in sizes)} | "
            f"{'yes' if grown <= record['budget_bytes'] else 'no'} | {record['seconds']:.1f} |"
        )
    return lines


def merge_table(records: Iterable[Record]) -> list[str]:
    cells = grouped(records, "rows", "hidden_size", "dtype", "threads", "way")
    lines = head("rows", "hidden size", "dtype, threads", "MB", "way", "ms", "÷ copy", "page faults")
    for (*rest, way), cell in cells.items():
        rows, hidden_size, dtype, threads = rest
        ratio = _ratio(cell, cells[(*rest, "copy")], lambda record: record["seconds"])
        lines.append(
            f"| {rows} | {hidden_size} | {dtype}, {threads} | {cell[0]['bytes'] / 1e6:.1f} | {way} | "
            f"{1e3 * median(cell, 'seconds'):.3f} | {ratio:.1f} | {median(cell, 'page_faults'):.0f} |"
        )
    return lines


def burst_table(records: Iterable[Record]) -> list[str]:
    """The ratios are to the first cluster in the same repetition."""
    cells = grouped(records, "model", "side", "images", "texts", "cluster")
    names = ("images_per_s", "image_mean_s", "image_p99_s", "text_p50_s", "text_p99_s")
    lines = head(
        "model", "at once", "cluster", "images/s", "TTFT s: image mean", "p99", "text p50", "p99", "÷ first"
    )
    for (*rest, place), cell in cells.items():
        model, side, images, texts = rest
        ratios = [f"{_ratio(cell, cells[(*rest, 0)], itemgetter(name)):.2f}" for name in names]
        values = " | ".join(f"{median(cell, name):.3g}" for name in names)
        load = f"{images} images of {side}², {texts} texts"
        lines.append(f"| {model} | {load} | {place} | {values} | {', '.join(ratios)} |")
    return lines


def overlap_table(records: Iterable[Record]) -> list[str]:
    """`best` and `sum` are computed from the times of text and image alone in the same repetition."""
    cells = grouped(records, "model", "text_tokens", "case")
    lines = head(
        "model",
        "text tokens",
        "case",
        "TTFT ms",
        "best",
        "sum",
        "÷ best",
        "÷ sum",
        "text alone",
        "image alone",
    )
    for model, length in dict.fromkeys(key[:2] for key in cells):
        text, image = (cells[model, length, case] for case in ("text", "image"))
        for case in ("one", "two"):
            cell = cells[model, length, case]
            bounds = [hidden_bounds(case, a["ttft_s"], b["ttft_s"]) for a, b in zip(text, image, strict=True)]
            ratios = (
                statistics.median(r["ttft_s"] / bound[i] for r, bound in zip(cell, bounds, strict=True))
                for i in range(2)
            )
            times = [
                median(cell, "ttft_s"),
                *(statistics.median(bound[i] for bound in bounds) for i in range(2)),
            ]
            alone = (median(text, "ttft_s"), median(image, "ttft_s"))
            lines.append(
                f"| {model} | {length} | {case} | {' | '.join(f'{1e3 * each:.0f}' for each in times)} | "
                f"{' | '.join(f'{each:.2f}' for each in ratios)} | {' | '.join(f'{1e3 * each:.0f}' for each in alone)} |"
            )
    return lines


def accuracy_table(records: Iterable[Record]) -> list[str]:
    """Images first, then clips: a line for each setting, a column for each task."""
    lines: list[str] = []
    for (media,), cell in grouped(records, "media").items():
        tasks = dict.fromkeys(record["task"] for record in cell)
        samples = median(cell, "samples")
        lines += [
            "",
            *head(f"{media}s, {samples:.0f} a task", "rows an item", "÷ plain", *tasks, "lost, won"),
        ]
        plain = _rows_an_item(record for record in cell if record["setting"] == "plain")
        for (setting,), found in grouped(cell, "setting").items():
            rows = _rows_an_item(found)
            shares = {record["task"]: f"{record['right'] / record['samples']:.1%}" for record in found}
            lost, won = (sum(record[name] for record in found) for name in ("lost", "won"))
            lines.append(
                f"| {setting} | {rows:.1f} | {rows / plain:.2f} | {' | '.join(shares.get(task, '–') for task in tasks)} | "
                f"{lost}, {won} |"
            )
    return lines[1:]


def _rows_an_item(records: Iterable[Record]) -> float:
    counts = [(record["rows"], record["items"]) for record in records]
    return sum(rows for rows, _ in counts) / sum(items for _, items in counts)


def hidden_bounds(case: str, text_s: float, image_s: float) -> tuple[float, float]:
    """Best and worst time to first token: with all possible overlap, and with none. `text_s`: of the whole
    text alone.
    """
    if case == "one":
        return max(text_s, image_s), text_s + image_s
    first = max(text_s / 2, image_s)  # half of the text and the first image are computed
    return max(first + text_s / 2, 2 * image_s), text_s + 2 * image_s


def _origins(records: Sequence[Record]) -> str:
    return "; ".join(dict.fromkeys(f"{r['machine']}, commit {r['commit']}, {r['date']}" for r in records))


def _outcome(record: Record) -> str:
    return " | ".join(str(record[name]) for name in ("num_answered", "num_refused", "num_failed"))


def _count(cell: Sequence[Record], name: str) -> str:
    """Median; a dash if the cluster did not report it."""
    values = [record[name] for record in cell if record[name] is not None]
    return f"{statistics.median(values):.0f}" if values else "–"


def _ratio(cell: Sequence[Record], other: Sequence[Record], value: Callable[[Record], float]) -> float:
    """The median of the repetitions that both have: one at least."""
    return cast(float, paired_ratio(cell, other, value))


TABLES: dict[str, Callable[[Iterable[Record]], list[str]]] = {
    "curve": curve_table,
    "tower": tower_table,
    "preparing": preparing_table,
    "mixed": mixed_table,
    "reuse": reuse_table,
    "single": single_table,
    "flood": flood_table,
    "burst": burst_table,
    "merge": merge_table,
    "overlap": overlap_table,
    "accuracy": accuracy_table,
}
