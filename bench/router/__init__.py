"""The router in the simulator: policies against each other, splits against data parallelism, overload. See
README.md."""
