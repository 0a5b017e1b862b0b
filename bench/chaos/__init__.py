"""Processes of a running cluster are killed and stopped under load; see README.md."""
