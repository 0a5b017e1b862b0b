"""From a parsed call to a prompt: media taken in, measured and reduced; text rendered, tokenised and hashed."""
