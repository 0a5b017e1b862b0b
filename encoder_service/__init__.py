"""Encoder pool: images, clips and sounds become embedding rows, which are cached and pushed to prefill workers.

`state` (an item's life), `preparation` (files to tensors, ahead of the device), `scheduler` (pure: which items share a call, how
long ones are cut), `budget` (how much a call may need), `runner` (decode, preprocess, device code), `cache` (where finished
rows live), `deliveries` (who wants them), `engine` (owns the state), `service` (side channel, health).
"""
