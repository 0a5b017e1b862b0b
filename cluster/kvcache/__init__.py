"""Paged memory: `memory` (bytes and layout), `blocks` (who owns which block, prefix cache), `hashing` (block hashes)."""
