"""The context compressor: few vectors in place of many tokens, for a decoder that reads them (docs/compression.md)."""
