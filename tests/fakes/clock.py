class ManualClock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at
