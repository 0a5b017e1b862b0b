"""Pictures of Ray's dashboard, of a cluster that `epdg serve` or `LocalCluster` runs. It starts after the
applications and asks for the token in the cluster's folder.
"""

from __future__ import annotations

import asyncio

from bench.chromium import HANG_S, Chromium
from bench.ray_access import ray_headers
from deploy.serving.launch import LocalCluster

# Picture → page, a JavaScript expression that is true when it shows what it should, size in pixels
PAGES = {
    "ray-serve": ("#/serve", "document.body.innerText.includes('Decode')", (1440, 900)),
    "ray-actors": ("#/actors", "document.body.innerText.includes('ServeReplica:epdg:Decode')", (1920, 1240)),
}
SETTLE_S = 3.0  # tables and bars are drawn piece by piece


async def pictures(cluster: LocalCluster) -> dict[str, bytes]:
    """The pictures by name, as PNG. Raises TimeoutError if the dashboard does not start."""
    async with asyncio.timeout(HANG_S):
        while (url := cluster.dashboard_url()) is None:
            await asyncio.sleep(0.5)
    found = {}
    async with Chromium() as browser:
        for name, (path, is_shown, (width, height)) in PAGES.items():
            async with browser.tab(width, height) as tab:
                await tab.do("Network.setExtraHTTPHeaders", headers=ray_headers(cluster.folder))
                await tab.open(f"{url}/{path}")
                await tab.until(is_shown)
                await asyncio.sleep(SETTLE_S)
                found[name] = await tab.screenshot()
    return found
