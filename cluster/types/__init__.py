"""Frozen values that cross a room or a process. Valid by construction at the door, trusted inside.

`media`: what one image, clip or sound is. `request`: what is to be generated. `transfer`: the right to write into
another process's memory. `messages`: the frames of the side channel.
"""
