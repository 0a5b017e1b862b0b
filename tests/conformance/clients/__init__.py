"""Clients, frameworks and load tools of others against a cluster: `make conformance` (see `__main__`)."""
