"""Prefill pool: workers that compute prompts and send their KV. What they run is `cluster.engine`."""
