"""The router in the simulator: policies beside each other, splits beside data parallelism, overload. See
README.md."""
