"""Published shapes of disaggregated serving, each with our figure next to it: `python -m bench.claims`."""
