"""The chart, its examples, and what Helm makes of it.

Helm is the command, or the package helm-python-sdk, also in `.venv/helm` (`make chart` puts it there).
Without either the tests that render are skipped; `WITHOUT` says why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "deploy" / "chart"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
KUBE_VERSION = "1.34.0"
TIMEOUT_S = 60.0  # a guard against hanging
Objects = list[dict[str, Any]]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

sys.path.append(str(Path(sys.prefix) / "helm"))
HAS_COMMAND = shutil.which("helm") is not None
HAS_PACKAGE = find_spec("helm_python") is not None
WITHOUT = "neither the command helm nor the package helm-python-sdk is installed"
needs_helm = pytest.mark.skipif(not (HAS_COMMAND or HAS_PACKAGE), reason=WITHOUT)
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="the package helm-python-sdk is not installed")
needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="the package kubernetes-validate is not installed"
)


class RenderError(Exception):
    """What Helm says about a chart or values that it refuses."""


def example(name: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())


def render(values: dict[str, Any] | None = None, chart: Path = CHART) -> Objects:
    """The objects of a release `epdg`. Raises RenderError."""
    render_text = _by_command if HAS_COMMAND else _by_package
    return [each for text in render_text(values or {}, chart) for each in yaml.load_all(text, LOADER) if each]


def notes(values: dict[str, Any] | None = None) -> str:
    """What Helm prints after an installation with these values. Only the package says it without a server."""
    (found,) = [text for path, text in _texts(values or {}, CHART).items() if path.endswith("NOTES.txt")]
    return found


def one(objects: Objects, kind: str, name: str | None = None) -> dict[str, Any]:
    """The only object of this kind, or of this kind and name."""
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def pod_templates(ray_service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By group name; the head's is `head`."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def walk(node: Any, visit: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """What `visit` yields for this node and all nodes in it."""
    found = list(visit(node))
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        found += walk(each, visit)
    return found


def _by_package(values: dict[str, Any], chart: Path) -> Iterable[str]:
    return [text for path, text in _texts(values, chart).items() if path.endswith(".yaml")]


def _texts(values: dict[str, Any], chart: Path) -> dict[str, str]:
    """By path, NOTES.txt too."""
    import helm_python

    try:
        loaded = helm_python.Chart.load(chart)  # a chart is changed by its first rendering
        return loaded.render(values, name="epdg", namespace="serving")
    except helm_python.HelmError as error:
        raise RenderError(str(error)) from error


def _by_command(values: dict[str, Any], chart: Path) -> Iterable[str]:
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        command = ["helm", "template", "epdg", str(chart), "--namespace", "serving", "--values", str(file)]
        done = subprocess.run(
            [*command, "--kube-version", KUBE_VERSION],
            capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "HELM_CACHE_HOME": home},
        )  # fmt: skip
    if done.returncode:
        raise RenderError(done.stderr)
    return [done.stdout]
