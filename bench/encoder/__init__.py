"""Measurements of the encoder pool: speed, memory, many clients at once; see README.md."""
