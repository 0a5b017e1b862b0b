"""What one door process relays, with a stub in place of the workers. See README.md."""
