"""What the encoder pool does for speed, memory and crowds, measured; see README.md."""
