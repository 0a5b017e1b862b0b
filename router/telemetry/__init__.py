"""The door's metrics, traces, and the timeline of each request."""
