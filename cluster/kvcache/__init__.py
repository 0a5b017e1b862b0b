"""Paged memory: `memory` (bytes and layout), `blocks` (which requests hold a block, prefix cache), `hashing`
(block hashes).
"""
