"""Encoder pool: images, clips and sounds become embedding rows, which are cached and pushed to prefill workers.

`state` (items and who wants them), `scheduler` (pure: which items share a batch), `runner` (decode, preprocess, device
code), `cache` (where finished rows live), `engine` (owns the state), `service` (side channel, health).
"""
