"""Published shapes of disaggregated serving, each with our figure beside it: `python -m bench.claims`."""
