"""Benchmarks, load generators and the demo model's training code: nothing here is imported by a service."""
