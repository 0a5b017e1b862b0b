"""Which requests start now, which wait, and which are refused: the admission queue with its fair shares."""
