"""Encoder pool: images, clips and sounds become embedding rows, which are cached and pushed to prefill
workers.

* `state`: the life of an item and of a delivery
* `preparation`: files become tensors, ahead of the device
* `scheduler`: pure; which items share a call, and how long items are cut
* `calls`: what the next call holds, by memory and speed
* `runner`: decoding, preprocessing, device code
* `cache`: where finished rows are kept
* `deliveries`: which requests want an item, and what is being sent
* `engine`: owns the state
* `service`: side channel, health
"""
