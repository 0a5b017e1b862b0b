"""Serves the demo model and lets each client ask it; prints a table. `make conformance`.

    python -m tests.conformance.clients --environment build/conformance [--vllm PATH] [--url URL] [NAME …]

Each client is a script with a process of its own: Python ones run in the environment's `bin/python`,
JavaScript ones beside its `node_modules` (left out if there are none). guidellm, schemathesis and `vllm bench
serve` (left out without `--vllm`) are commands. A model whose chat template takes no tools is served with one
that shows them: calls that must come are held to their schema whatever the model knows. Servers are on
loopback and end with this process. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.serving.launch import LocalCluster
from deploy.serving.ports import free_port
from tests.conformance import own_document

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
MODEL = REPOSITORY / "deploy" / "demo_model"
SHOWS_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}"
LIMIT_S = 600.0  # of one client
# Of schemathesis, which asks thousands of times; on two busy cores 600 s were too few
DOCUMENT_LIMIT_S = 2400.0
_IMAGES = {
    "--random-mm-base-items-per-request": "1",
    "--random-mm-limit-mm-per-prompt": '{"image": 1, "video": 0}',
    "--random-mm-bucket-config": "{(256, 256, 1): 1.0}",
}
# Check → backend and endpoint of `vllm bench serve`, and its data
VLLM_CHECKS: dict[str, tuple[str, str, list[str]]] = {
    "completions": ("openai", "/v1/completions", ["--dataset-name", "random"]),
    "text": ("openai-chat", "/v1/chat/completions", ["--dataset-name", "random"]),
    "image": (
        "openai-chat",
        "/v1/chat/completions",
        ["--dataset-name", "random-mm", *(word for option in _IMAGES.items() for word in option)],
    ),
    "responses": ("openai-responses", "/v1/responses", ["--dataset-name", "random"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, help="the command of an environment with vLLM")
    parser.add_argument("--url", help="of a cluster that runs")
    parser.add_argument("names", nargs="*", help="parts of names of scripts and commands; default: all")
    args = parser.parse_args()
    with served(args.url) as (url, folder):
        model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        lines = []
        commands = Path("guidellm"), Path("schemathesis")
        for script in sorted([*HERE.glob("*_client.py"), *HERE.glob("*.mjs"), *commands]):
            if script.stem != "asking" and _is_wanted(script.name, args.names):
                lines += _shown(told(script, args.environment.absolute(), url, model, folder))
        if args.vllm is not None and _is_wanted("vllm", args.names):
            for check in VLLM_CHECKS:
                lines += _shown([vllm_bench(args.vllm, check, url, model, folder)])
    print(table(lines))
    return 1 if any(line["error"] for line in lines) else 0


def _shown(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints what is known so far, for a run that is cut off before its table."""
    for line in lines:
        print(f"{line['client']}: {line['check']}: {'fails' if line['error'] else 'yes'}", flush=True)
    return lines


def _is_wanted(name: str, names: list[str]) -> bool:
    return not names or any(each in name for each in names)


@contextmanager
def served(url: str | None) -> Iterator[tuple[str, Path]]:
    """Of a cluster, and the folder of its model."""
    if url is not None:
        yield url, MODEL
        return
    with tempfile.TemporaryDirectory() as name:
        config = yaml.safe_load((REPOSITORY / "deploy" / "cluster.yaml").read_text())
        config["http_options"]["port"] = free_port()
        path = Path(name) / "cluster.yaml"
        path.write_text(yaml.safe_dump(config))
        with LocalCluster(path, EPDG_MODEL=str(_model(Path(name)))) as local:
            local.wait_ready()
            yield local.url, MODEL


def _model(folder: Path) -> Path:
    template = (MODEL / "chat_template.jinja").read_text()
    if "tools" in template:
        return MODEL
    copied = folder / "demo_model"
    shutil.copytree(MODEL, copied)
    (copied / "chat_template.jinja").write_text(SHOWS_TOOLS + template)
    return copied


def told(script: Path, environment: Path, url: str, model: str, folder: Path) -> list[dict[str, Any]]:
    """The lines of one script; one more if it ended before it had told anything."""
    if script.name == "guidellm":
        return [guidellm(environment, url, model, folder)]
    if script.name == "schemathesis":
        error = own_document.ask(url, own_document.LIMITS, own_document.DRAWN, limit_s=DOCUMENT_LIMIT_S)
        return [{"client": script.name, "version": own_document.VERSION, "check": "document", "error": error}]
    if script.suffix == ".mjs":
        command, cwd = ["node", str(script), url, model], environment
        if not (environment / "node_modules").is_dir():
            return []
    else:
        module = f"tests.conformance.clients.{script.stem}"
        command = [str(environment / "bin" / "python"), "-m", module, url, model, str(folder)]
        cwd = REPOSITORY
    done = _run(command, cwd)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
    if done.returncode and not any(line["error"] for line in lines):
        end = done.stderr.strip().splitlines()
        lines.append({"client": script.stem, "version": "?", "check": "start", "error": "".join(end[-1:])})
    return lines


def guidellm(environment: Path, url: str, model: str, folder: Path) -> dict[str, Any]:
    """A load tool: streamed chats, one after the other; all of them must have been answered."""
    command = environment / "guidellm" / "bin" / "guidellm"
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        done = _run(
            [str(command), "run", "--disable-console", "--profile", "kind=synchronous",
             "--backend", f"kind=openai_http,target={url},model={model}",
             "--tokenizer", f"kind=hf_auto,model={folder}", "--constraint", "kind=max_requests,count=4",
             "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
             "--output", f"kind=json,path={report}"],
            Path(name),
        )  # fmt: skip
        error = "" if done.returncode == 0 else done.stderr.strip()[-600:]
        if not error:
            totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
            error = "" if totals["successful"] >= 4 and not totals["errored"] else f"requests: {totals}"
    version = _run([str(command), "--version"], REPOSITORY).stdout.split()
    return {"client": "guidellm", "version": (version or ["?"])[-1], "check": "load", "error": error}


def vllm_bench(command: Path, check: str, url: str, model: str, folder: Path) -> dict[str, Any]:
    """A load tool: streamed answers of 16 tokens, four requests a second; all of them must have come."""
    backend, endpoint, data = VLLM_CHECKS[check]
    with tempfile.TemporaryDirectory() as name:
        done = _run(
            [str(command), "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", url,
             "--model", model, "--tokenizer", str(folder), *data, "--random-input-len", "64",
             "--random-output-len", "16", "--num-prompts", "8", "--request-rate", "4",
             "--save-result", "--result-dir", name, "--result-filename", "report.json"],
            Path(name),
        )  # fmt: skip
        error = "" if done.returncode == 0 else done.stderr.strip()[-600:]
        if not error:
            report = json.loads((Path(name) / "report.json").read_text())
            counts = {key: report[key] for key in ("completed", "failed", "total_output_tokens")}
            wanted = {"completed": 8, "failed": 0, "total_output_tokens": 8 * 16}
            error = "" if counts == wanted else f"requests: {counts}"
    version = _run([str(command), "--version"], REPOSITORY).stdout.split()
    return {
        "client": "vllm bench serve",
        "version": (version or ["?"])[-1].partition("+")[0],
        "check": check,
        "error": error,
    }


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
    try:
        return subprocess.run(
            command, cwd=cwd, env={**os.environ, **own}, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as expired:
        return subprocess.CompletedProcess(
            command, 124, "", f"nothing within {LIMIT_S:g} s: {expired.stderr}"
        )


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row per client, a column per check."""
    checks = [*dict.fromkeys(line["check"] for line in lines)]
    rows = [["client", "version", *checks], ["---"] * (2 + len(checks))]
    for client, version in dict.fromkeys((line["client"], line["version"]) for line in lines):
        found = {line["check"]: line["error"] for line in lines if line["client"] == client}
        cells = ["" if check not in found else "**fails**" if found[check] else "yes" for check in checks]
        rows.append([client, version, *cells])
    errors = [f"{line['client']}: {line['check']}: {line['error']}" for line in lines if line["error"]]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *errors])


if __name__ == "__main__":
    raise SystemExit(main())
