"""What one GPU does with this product: steps, attention, codecs, transfers and whole clusters."""
