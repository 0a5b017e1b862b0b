"""The process that runs a private cluster: `python -m cluster.serving.driver CONFIG FOLDER`, which `launch`
starts.

It is `serve run CONFIG`, with the fork server in `FOLDER` as the interpreter of Ray's workers. It ends with
SIGINT, like `serve run`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.serving import fork_server


def main(config: str, folder: str) -> None:
    fork_server.import_for_workers(fork_server.EARLY_IMPORTS)
    from ray.serve import scripts

    sys.executable = fork_server.start(Path(folder))  # Ray starts all its Python processes with it
    sys.argv = ["serve", "run", config]
    scripts.cli()


if __name__ == "__main__":
    main(*sys.argv[1:])
