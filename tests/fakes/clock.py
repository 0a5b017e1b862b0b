class ManualClock:
    """Time passes when a test says so."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at
