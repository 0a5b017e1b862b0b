"""Workers that encode and compute prompts: the encoder and the language engine, side by side in one
process."""
