"""How much processor time the grammar of one request may take. llguidance limits the items and the fuel of
one mask (`grammar`), which does not limit time: a row of an ambiguous grammar takes time with the third power
of its items, and every token makes the rows longer.

Thread time is counted, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# more than this is slow. Masks of ordinary structures take 0.02 to 1.5 ms, tokens 0.4 ms at most
SLOW_S = 0.002
MAX_MASK_S = 0.1  # of one mask
MAX_ASIDE_S = 10.0  # of all masks of a request that steps do not wait for
MAX_IN_STEPS_S = 0.25  # of all that was slow and that steps had to wait for: tokens taken in, forced text


class Effort:
    """Time spent on the structures of one request, all its choices together. A method is called by one thread
    at a time."""

    def __init__(self, timer: Callable[[], float] = time.thread_time):
        self.timer = timer
        self._aside_s = 0.0
        self._in_steps_s = 0.0

    def spend_aside(self, began: float) -> bool:
        """A mask was begun at this time and is filled now. Returns whether that was slow."""
        took_s = self.timer() - began
        self._aside_s += took_s
        if took_s > MAX_MASK_S:
            self._aside_s = MAX_ASIDE_S + took_s
        return took_s > SLOW_S

    def spend_in_step(self, began: float) -> bool:
        """The same for what is done on the engine's thread."""
        took_s = self.timer() - began
        if took_s > SLOW_S:
            self._in_steps_s += took_s
        return took_s > SLOW_S

    @property
    def is_spent(self) -> bool:
        """The request must end."""
        return self._aside_s > MAX_ASIDE_S or self._in_steps_s > MAX_IN_STEPS_S

    def forgive(self) -> None:
        """What was spent is not the request's fault: its tokens were matched again."""
        self._aside_s = self._in_steps_s = 0.0
