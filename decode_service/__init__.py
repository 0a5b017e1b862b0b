"""Decode pool, and the pool of workers that prefill and decode: workers that generate answers. They run
`cluster.engine`; theirs alone are the Serve calls that stay open while requests generate.
"""
