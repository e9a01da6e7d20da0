"""The context compressor: a few vectors replace many tokens of a decoder's context (docs/compression.md)."""
