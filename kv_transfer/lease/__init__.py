"""The lease protocol: an owner grants a writer some blocks, the writer fills them and says so once."""
