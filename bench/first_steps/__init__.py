"""The first steps of a new user, each run and timed: wrong set-ups, checkpoints of different kinds, an
installed wheel.

python -m bench.first_steps wrong|kinds|wheel
"""
