"""Mutated HTTP requests against a running cluster: see `__main__`."""
