"""Decode pool: continuous batching over KV that prefill workers have pushed here.

`state` (one request's life), `scheduler` (pure: who runs in a step), `runner` (device code), `transfer` (incoming KV),
`engine` (owns the state), `service` (side channel, health, drain).
"""
