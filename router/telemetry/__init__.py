"""What the door reports: metrics, traces, and the timeline of each request."""
