"""Makes a prompt of a parsed call.

intake         media bytes are read and opened
media          media items are measured and reduced, by the rules of `media_budget`
builder        text is rendered, tokenised and hashed
"""
