"""What depends on the machine in a cluster's settings: the model's absolute path (after a download, if a hub
id names it) and thread counts. Everything below the composition root sees resolved values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.config import hub
from cluster.config.checkpoint import check_no_adapter
from cluster.config.environment import Environment
from cluster.config.settings import REPOSITORY, AccessArgs, ClusterArgs
from cluster.errors import ConfigError


def resolve(args: ClusterArgs, environment: Environment, *, num_cores: int) -> ClusterArgs:
    """Explicit arguments win over the environment, and the environment over defaults. Raises ConfigError."""
    given = args.model if "model" in args.model_fields_set else environment.model or args.model
    model = _find(given, environment)
    model_id = args.model_id or (model.name if _is_folder(given) else given)
    pools = {
        name: pool.model_copy(update={"threads": pool.threads or len(pool.cores) or num_cores})
        for name, pool in args.pools.items()
    }
    if args.decode.speculation.method in ("draft", "eagle3"):
        draft = _find(args.decode.speculation.model, environment)
        speculation = args.decode.speculation.model_copy(update={"model": str(draft)})
        pools["decode"] = pools["decode"].model_copy(update={"speculation": speculation})
    door = args.door.model_copy(update={"access": _with_absolute_path(args.door.access)})
    adapters = _adapters(args.adapters, model_id)
    root = _folder(args.adapters_folder, "adapters_folder") if args.adapters_folder else ""
    named = {"model": str(model), "model_id": model_id, "adapters": adapters, "adapters_folder": root}
    return args.model_copy(update={**named, "door": door, **pools})


def _adapters(folders: Mapping[str, str], model_id: str) -> dict[str, str]:
    """Returns absolute paths. Raises ConfigError."""
    found = {}
    for name, folder in folders.items():
        if name == model_id:
            raise ConfigError(f"adapter '{name}' has the name of the model itself", param="adapters")
        found[name] = _folder(folder, "adapters", f"adapter '{name}': ")
    return found


def _folder(folder: str, param: str, of: str = "") -> str:
    """Returns an absolute path. Raises ConfigError."""
    path = next((path for path in _candidates(folder) if path.is_dir()), None)
    if path is None:
        raise ConfigError(f"{of}there is no folder '{folder}'", param=param)
    return str(path.resolve())


def _with_absolute_path(access: AccessArgs) -> AccessArgs:
    if not access.key_file:
        return access
    return access.model_copy(update={"key_file": str(Path(access.key_file).expanduser().absolute())})


def _find(model: str, environment: Environment) -> Path:
    """A local folder wins over a model of the hub with the same name."""
    for candidate in _candidates(model):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    if _is_folder(model):
        found = next(candidate for candidate in _candidates(model) if candidate.is_dir())
        check_no_adapter(found)
        raise ConfigError(f"{found} is no model folder: it has no config.json", param="model")
    if hub.is_hub_id(model):
        return hub.download(model, is_offline=environment.is_hub_offline)
    tried = " and ".join(dict.fromkeys(str(candidate) for candidate in _candidates(model)))
    raise ConfigError(f"no model folder '{model}': there is no {tried}", param="model")


def _is_folder(model: str) -> bool:
    return any(candidate.is_dir() for candidate in _candidates(model))


def _candidates(model: str) -> list[Path]:
    path = Path(model).expanduser()
    return [path] if path.is_absolute() else [Path.cwd() / path, REPOSITORY / path]
