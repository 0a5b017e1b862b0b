"""KV on the wire: the codecs, the wire memory that they write to, and checksums."""
