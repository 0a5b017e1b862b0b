"""Frozen values that cross a package or a process. They are valid by construction at the door and trusted
behind it.

* `media`, `media_phase`: one image, clip or sound, and the life of its embeddings.
* `request`: what is to be generated.
* `transfer`: the right to write into another process's memory.
* `members`, `curves`: the workers of the cluster, and how fast each one is.
* `messages`: the frames of the side channel.
"""
