"""Writes what is derived in deploy/chart: the schema of `settings` and of pools, the README's table of
values, and the Grafana boards.

    python -m deploy.generate

A test compares the files with what this module would write (tests/unit/deploy/test_values.py).
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config.settings import ClusterArgs
from deploy.boards import boards

CHART = Path(__file__).parent / "chart"
SCHEMA = CHART / "values.schema.json"
README = CHART / "README.md"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
# Settings that values of the chart decide, by the path in `args`.
DECIDED = (
    "model", "model_id", "device", "roles", "tensor_parallel_size", "side_channel",
    "transfer.net_devices", "door.admission.num_doors",
)  # fmt: skip


def settings_schema() -> dict[str, Any]:
    """JSON schema of `settings`: that of `args` without what the chart decides. References are resolved, so
    that it stands anywhere."""
    whole = ClusterArgs.model_json_schema()
    schema = _resolved(whole, whole["$defs"])
    for path in DECIDED:
        *parents, name = path.split(".")
        place = schema
        for parent in parents:
            place = place["properties"][parent]
        del place["properties"][name]
    return schema


def _resolved(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Without references, titles, descriptions and defaults."""
    if isinstance(node, list):
        return [_resolved(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _resolved(definitions[node["$ref"].rpartition("/")[2]], definitions)
    kept = {key: each for key, each in node.items() if key not in ("$defs", "description", "default")}
    if isinstance(kept.get("title"), str):  # and not a setting of that name
        del kept["title"]
    return {key: _resolved(each, definitions) for key, each in kept.items()}


def schema_text(text: str) -> str:
    """The schema file with its derived definitions. The rest of it is written by hand."""
    schema = json.loads(text)
    defaults = schema["definitions"]["poolDefaults"]
    pool = copy.deepcopy(defaults)
    pool["properties"] = {"enabled": {"type": "boolean"}} | {
        name: {key: each for key, each in value.items() if key != "description"}
        for name, value in defaults["properties"].items()
    }
    schema["definitions"]["pool"] = pool
    schema["definitions"]["settings"] = settings_schema()
    return json.dumps(schema, indent=1) + "\n"


def readme_text(text: str, schema: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    before, _, rest = text.partition(BEGIN)
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    rows += [
        f"| `{name}` | {default} | {meaning} |" for name, default, meaning in _rows(schema, schema, values)
    ]
    return before + BEGIN + "\n".join(rows) + "\n" + END + rest.partition(END)[2]


def _rows(
    node: Mapping[str, Any], schema: Mapping[str, Any], values: Any, prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """A row for each value that has a description."""
    for name, value in node.get("properties", {}).items():
        path = f"{prefix}{name}"
        default = values.get(name) if isinstance(values, dict) else None
        target = schema["definitions"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value
        inner = (
            []
            if path == "settings" or prefix == "pools."
            else list(_rows(target, schema, default, path + "."))
        )
        if "description" in value:
            yield path, "" if inner else _shown(default), value["description"].replace("|", "\\|")
        yield from inner


def _shown(default: Any) -> str:
    if default is None or default in ("", [], {}):
        return "none"
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`" if len(text) <= 80 else "see values.yaml"


def board_text(board: Mapping[str, Any]) -> str:
    """A line for each panel, so that a change shows which one it is."""
    rest = json.dumps({name: value for name, value in board.items() if name != "panels"})
    panels = ",\n".join(json.dumps(panel) for panel in board["panels"])
    return f'{rest[:-1]}, "panels": [\n{panels}\n]}}\n'


def files() -> dict[Path, str]:
    """Every derived file with what it should hold."""
    schema = schema_text(SCHEMA.read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = {SCHEMA: schema, README: readme_text(README.read_text(), json.loads(schema), values)}
    for name, board in boards().items():
        found[CHART / "dashboards" / f"{name}.json"] = board_text(board)
    return found


def main() -> int:
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
