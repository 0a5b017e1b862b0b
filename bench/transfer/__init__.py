"""The hand-over between pools, measured: `python -m bench.transfer`."""
