"""Pictures of the Grafana boards and of Ray's dashboard, from a cluster under load. Grafana takes no part:
Prometheus is asked the queries of deploy/chart/dashboards, and this package draws the answers.

    python -m bench.boards                    writes board-NAME.webp and ray-NAME.webp into docs/images
    python -m bench.boards CONFIG --out DIR   of another cluster: the overview and the boards of its roles

Starts the cluster at a free port, and Prometheus next to it. Sends dialogues: first few at once, then
more than the cluster can answer in time, then few again; and kills a decode worker on the way, if there is
one. Needs the programs prometheus and chromium.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from PIL import Image

from bench import REPOSITORY, clusters
from bench.arguments import parser_of
from bench.boards import ray_dashboard
from bench.boards.chart import Span
from bench.boards.page import WIDTH, html, queries
from bench.boards.prometheus import over, prometheus
from bench.chromium import Chromium
from bench.client import TimedAnswer, open_session, post
from bench.metrics import model_id
from bench.processes import Processes, send_signal
from bench.workload import make_cases
from cluster.config.settings import ClusterArgs
from deploy.boards import boards
from deploy.serving.launch import LocalCluster

CONFIG = Path(__file__).parent / "cluster.yaml"
SCRAPE_S = 5
RATE_INTERVAL = f"{4 * SCRAPE_S}s"  # Grafana's $__rate_interval, where a step is as long as a scrape
LOAD = ((60.0, 4), (90.0, 24), (60.0, 160), (90.0, 8))  # (seconds, dialogues at once)
KILL_AFTER_S = 110.0
LOOK_AFTER_S = 75.0  # at Ray's dashboard
NUM_CASES = 1000  # that dialogues begin with; some come again
MAX_TOKENS = (32, 192)
TIMEOUT_S = 120.0
FOLLOW_UP = "Are you sure?"
REFUSED_S = 2.0  # a client's pause after a refusal
NOTE = "drawn by python -m bench.boards from Prometheus' answers"


async def load(url: str) -> Counter[str]:
    """How many requests had which outcome."""
    outcomes: Counter[str] = Counter()
    cases, rng = make_cases(1, NUM_CASES), random.Random(1)
    model = await asyncio.to_thread(model_id, url)
    async with open_session(TIMEOUT_S, keeps_connections=True) as session:

        async def ask(messages: list[dict[str, Any]]) -> str | None:
            tokens, answer = rng.randint(*MAX_TOKENS), TimedAnswer("")
            body = {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
            await post(session, url, json.dumps(body).encode(), answer)
            outcomes[f"status {answer.status}"] += 1
            if not answer.failure:
                return answer.text
            await asyncio.sleep(REFUSED_S)
            return None

        async def dialogues(until: float) -> None:
            while time.monotonic() < until:
                messages = rng.choice(cases).messages
                if (text := await ask(messages)) is not None:
                    said = {"role": "assistant", "content": text}
                    await ask([*messages, said, {"role": "user", "content": FOLLOW_UP}])

        for seconds, num_clients in LOAD:
            until = time.monotonic() + seconds
            await asyncio.gather(*(dialogues(until) for _ in range(num_clients)))
    return outcomes


async def kill_one(cluster: LocalCluster) -> None:
    await asyncio.sleep(KILL_AFTER_S)
    send_signal(Processes(cluster.folder).of("decode")[:1], signal.SIGKILL)


async def run(cluster: LocalCluster) -> dict[str, bytes]:
    """The load, and during it pictures of Ray's dashboard, by name."""
    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(load(cluster.url))
        tasks.create_task(kill_one(cluster))
        await asyncio.sleep(LOOK_AFTER_S)
        pictures = await ray_dashboard.pictures(cluster)
    print(f"outcomes of the requests: {dict(loading.result())}")
    return pictures


def pages(client: httpx.Client, names: Mapping[str, Any], span: Span) -> dict[str, str]:
    """The boards with these names, by name, as HTML."""
    model = client.get("/api/v1/label/model_name/values").json()["data"][0]
    found = {}
    for name, board in names.items():
        answers = {key: over(client, query, span) for key, query in queries(board, model, RATE_INTERVAL)}
        found[name] = html(board, answers, span, model, NOTE)
        for key, answer in answers.items():
            if not answer:
                print(f"{board['title']}: no data: {key}")
    return found


async def photograph(pages: Mapping[str, str], folder: Path) -> dict[str, bytes]:
    """Each page as a whole, as PNG."""
    found = {}
    async with Chromium() as browser, browser.tab(WIDTH, 800) as tab:
        for name, page in pages.items():
            file = folder / f"{name}.html"
            file.write_text(page)
            await tab.look(WIDTH, 1)
            await tab.open(file.as_uri())
            await tab.look(WIDTH, await tab.value("document.documentElement.scrollHeight"))
            found[name] = await tab.screenshot()
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG, metavar="CONFIG")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images")
    arguments = parser.parse_args()
    (application,) = yaml.safe_load(arguments.config.read_text())["applications"]
    roles = [role.value.replace("_", "-") for role in ClusterArgs.model_validate(application["args"]).roles]
    shown = {name: board for name, board in boards().items() if name in ("overview", *roles)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            clusters.running(clusters.configuration(base=arguments.config)) as cluster,
            prometheus(cluster, folder, SCRAPE_S) as client,
        ):
            start = time.time()
            pictures = asyncio.run(run(cluster))
            drawn = pages(client, shown, Span(start, time.time(), SCRAPE_S))
        for each, png in asyncio.run(photograph(drawn, folder)).items():
            pictures[f"board-{each}"] = png
    for each, png in pictures.items():
        Image.open(io.BytesIO(png)).convert("RGB").save(
            arguments.out / f"{each}.webp", lossless=True, method=6
        )


if __name__ == "__main__":
    main()
